"""Ways to make a box: `native` (namespaces of this kernel), `fake` (a toy shell in memory) and
`scripted` (made-up answers, for tests of other services); and what callers wait for (callers.py).
"""
