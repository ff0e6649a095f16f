"""Checkpoints: a run's shards on disk, complete or ignored. No gRPC in here.

folder.py       all checkpoints of one server: numbers, lock, what is kept, what is resumed
checkpoint.py   one checkpoint: its files, how they are written and verified
vectors.py      a coordinator's vectors in it
header.py       what a run is, beside its shards
manifest.py     what is written last
tensor_file.py  a safetensors file, written piece by piece
disk.py         the file operations that make it durable
"""

from pyps.checkpoint.checkpoint import Checkpoint, RestoredRun
from pyps.checkpoint.folder import CheckpointFolder, Saved, newest
from pyps.checkpoint.header import RunHeader
from pyps.checkpoint.manifest import CheckpointDamaged, CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFolder",
    "RestoredRun",
    "RunHeader",
    "Saved",
    "newest",
]
