"""How weights travel from a trainer to the engine replicas.

manifest.py says what travels (names, shapes, dtypes, digests) and is the same on both sides;
group.py is the process group that carries it; wire.py turns both into protobuf; publisher.py
drives one publication from the trainer. torch is imported only where tensors are touched.
"""
