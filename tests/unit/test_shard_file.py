"""A shard's state as one file: the same to the bit, for safetensors too, and small."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from pyps.core.ledger import Ledger
from pyps.storage.shard_file import pack, unpack
from shards import adagrad_shards, everything, make_shard, push, restored, waiting


def packed(shard, vectors=None) -> bytes:
    return b"".join(pack(shard.state(), vectors))


def test_a_shard_is_the_same_to_the_bit_with_all_that_waits_in_it():
    shard = make_shard(np.linspace(-1, 1, 17), rule="adam", protocol="hardsync", settings={}, pending=waiting(1.5, 2.5))
    push(shard, np.ones(17), learning_rate=0.25, momentum=0.5, sequence=7, example_count=3)
    vectors = {"g": np.arange(17, dtype=np.float32), "s2": np.zeros(17, np.float32)}
    data = packed(shard, vectors)
    state, kept = unpack(data)
    again = restored(shard, state)
    assert everything(again) == everything(shard) and state.pending
    assert {name: values.tobytes() for name, values in kept.items()} == {n: v.tobytes() for n, v in vectors.items()}
    assert packed(again, kept) == data
    # What is read has memory of its own, in which a shard may work.
    assert state.parameters.flags.writeable and state.parameters.ctypes.data % 64 == 0


def test_the_library_reads_the_file(tmp_path):
    shard = adagrad_shards()[1]
    path = tmp_path / "shard"
    path.write_bytes(packed(shard, {"g": np.ones(16, np.float32)}))
    read = load_file(path)
    assert sorted(read) == ["ledger", "parameters", "pending", "slot.accumulator", "vector.g"]
    assert (read["parameters"] == shard.state().parameters).all()
    assert (read["slot.accumulator"] == shard.state().slots["accumulator"]).all()
    with safe_open(path, framework="np") as opened:
        assert opened.metadata()["format"] == "pyps shard"


def test_the_ledger_of_many_workers_takes_a_small_part_of_its_memory():
    shard = make_shard(np.zeros(16))
    before = len(packed(shard))
    for worker in range(200):
        for sequence in range(8):
            push(shard, np.zeros(16), worker_id=f"worker-{worker}", sequence=sequence)
    assert shard.num_receipts == 1600
    assert len(packed(shard)) - before < shard.ledger_bytes / 6
    ledger = unpack(packed(shard))[0].ledger
    assert (ledger, Ledger(ledger).num_bytes) == (shard.state().ledger, shard.ledger_bytes)


@pytest.mark.parametrize("data", [b"", b"\x05", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"])
def test_what_is_no_such_file_is_an_error_that_is_awaited(data):
    with pytest.raises((ValueError, KeyError, TypeError)):
        unpack(data)
    deep = b"[" * 200_000
    with pytest.raises(ValueError, match="nested too deeply"):
        unpack(len(deep).to_bytes(8, "little") + deep)


def test_half_a_file_is_an_error_that_is_awaited():
    whole = packed(make_shard(np.ones(16), pending=waiting(1.5)))
    for size in range(len(whole)):
        with pytest.raises((ValueError, KeyError, TypeError)):
            unpack(whole[:size])
