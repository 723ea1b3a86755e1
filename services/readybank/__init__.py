"""The ready bank: groups wait here until whole, then until a trainer leases them.

Owns: the composition of every batch, and the fate of every group. Promises: a group stands in at
most one batch, whole, with the attempt that counts for each sibling; a batch that was ever sent is
sent again unchanged; every fate is written once; nothing expires by a clock alone.
"""
