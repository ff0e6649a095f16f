import tracemalloc
from collections.abc import Callable

from pyps.config import resolve
from pyps.run.run import Run
from pyps.storage.checkpoint import Checkpoint, Writer
from pyps.storage.disk import Disk
from pyps_wire.partition import Model, Tensor
from shards import serving as serve

SHARD_SIZE = 65_536
NUM_SHARDS = 16
MODEL = Model((Tensor("x", (NUM_SHARDS * SHARD_SIZE,)),), shard_size=SHARD_SIZE)
SHARD_BYTES = 4 * SHARD_SIZE
MODEL_BYTES = NUM_SHARDS * SHARD_BYTES
# What a run needs beside its arrays.
MARGIN_BYTES = 1_000_000


def serving() -> Run:
    return serve(model=MODEL, optimizer="adagrad:learning_rate=1")


def peak_bytes(work: Callable[[], Run]) -> int:
    tracemalloc.start()
    try:
        # Kept until the figure is taken.
        run = work()
        assert run.content.version_max == 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_first_parameters_are_held_once_and_the_message_at_hand_beside_them():
    # Adagrad's accumulator makes the second model.
    assert peak_bytes(serving) < 2 * MODEL_BYTES + 2 * SHARD_BYTES + MARGIN_BYTES


def test_a_restored_model_is_held_once(tmp_path):
    run = serving()
    path = tmp_path / "checkpoint-00000001.json"
    Writer(tmp_path, Disk()).write(path, run.snapshot(), require=lambda: False)

    def restored() -> Run:
        fresh = Run(resolve({}, {}, warn=print))
        fresh.restore(Checkpoint(path).load())
        return fresh

    assert peak_bytes(restored) < 2 * MODEL_BYTES + 2 * SHARD_BYTES + MARGIN_BYTES
