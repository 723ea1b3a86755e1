"""Ways to make a box: `native` (namespaces of this kernel) and `fake` (in memory)."""
