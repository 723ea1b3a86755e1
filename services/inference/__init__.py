"""One engine replica behind gRPC: token ids in, token ids with log-probabilities and versions out.

Owns: which version it serves, its KV budget, and the receiving of weights. Promises: every sampled
token carries the version that the engine says produced it; a replica that missed part of a
publication, or started with another version than the published one, serves nothing until it is
whole again; an update never stops decoding while it arrives.
"""
