"""Checkpoints of tables: files with the rows that were updated since earlier files give all rows again."""

import dataclasses
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pyps.core.gradient import PayloadKind
from pyps.core.ledger import Ledger
from pyps.core.table import make_table
from pyps.run_header import Snapshot
from pyps.storage.checkpoint import Checkpoint, CheckpointDamaged
from pyps.storage.folder import CheckpointFolder
from pyps_wire.partition import Model, Tensor, partition
from shards import HEADER, checkpoint_folder, gradient, make_behaviour, roster

folder = checkpoint_folder
DIM = 4


def table_of(text, state=None):
    # A push of nothing completes a round too.
    behaviour = make_behaviour("hardsync", "none")
    of_state = {} if state is None else {"version": state.version, "ledger": Ledger(state.ledger), "rows": state.rows}
    return make_table(0, "users", (1, DIM), text, offset=0, behaviour=behaviour, epoch=3, **of_state)


def push(table, ids, value, sequence):
    ids = np.unique(np.array(ids, np.int64))
    payload = ids.tobytes() + np.full((ids.size, DIM), value, np.float32).tobytes()
    kind = PayloadKind.GRADIENT if ids.size else PayloadKind.NOTHING
    fields = {"epoch": 3, "sequence": sequence, "base_version": table.version, "num_rows": ids.size, "kind": kind}
    table.push(gradient([], **fields)._replace(payload=payload), roster=roster())


def saver(folder, table, text):
    tensors = (Tensor("users", (1, DIM), 0, table=text),)
    header = dataclasses.replace(HEADER, partition=partition(Model(tensors), num_servers=1))
    return lambda: Checkpoint(folder.save(lambda: Snapshot(header, {0: table})).path)


def assert_same(found, expected):
    assert found.version == expected.version
    for name, one, other in zip(expected.rows._fields, found.rows, expected.rows, strict=True):
        np.testing.assert_array_equal(one, other, name)


@pytest.mark.parametrize(
    "text",
    [
        "rowwise_adagrad:",
        "sgd:bfloat16=true",
        "adam:ttl=3",
        "adagrad:capacity=5",
        "sgd:min_count=2,capacity=4",
        "adagrad:min_count=3,ttl=4,capacity=6",
    ],
)
@example(steps=[[1], [2], [], [], [], [], None, [3], None])
@given(steps=st.lists(st.none() | st.lists(st.integers(-4, 8), max_size=6), max_size=30))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_increments_give_the_rows_that_the_table_has(tmp_path_factory, text, steps):
    folder = CheckpointFolder(tmp_path_factory.mktemp("checkpoints") / "server-0")
    table = table_of(text)
    save = saver(folder, table, text)
    for sequence, ids in zip(count(1), steps):
        if ids is not None:
            push(table, ids, sequence / 8, sequence)
            continue
        checkpoint, live = save(), table.state()
        kept, _ = checkpoint.read_shard(0)
        assert_same(kept, live)
        assert_same(table_of(text, kept).state(), live)
    folder.close()


def test_a_checkpoint_writes_what_was_updated_and_everything_again_in_time(folder):
    table = table_of("rowwise_adagrad:")
    save, written = saver(folder, table, "rowwise_adagrad:"), []
    push(table, range(1000), 1.0, 1)
    for sequence in range(2, 12):
        entry = save().shards[0]
        written.append((len(entry.files), entry.num_bytes))
        push(table, range(sequence, sequence + 200), 1.0, sequence)
    sizes = [size for _, size in written]
    assert sizes[1] < 0.3 * sizes[0]
    # The fifth increment makes them as large as what they follow.
    assert [number for number, _ in written] == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


def test_an_earlier_file_that_is_gone_is_missed_and_written_again(folder):
    table = table_of("rowwise_adagrad:")
    save = saver(folder, table, "rowwise_adagrad:")
    push(table, range(100), 1.0, 1)
    save()
    push(table, range(10), 1.0, 2)
    damaged = save()
    (folder.path / "shards" / damaged.shards[0].earlier[0].file).unlink()
    with pytest.raises(CheckpointDamaged, match="is missing"):
        damaged.require_files()
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        damaged.read_shard(0)
    push(table, range(10), 1.0, 3)
    assert_same(save().read_shard(0)[0], table.state())


def test_files_that_a_checkpoint_needs_outlive_the_checkpoints_that_wrote_them(tmp_path):
    folder = CheckpointFolder(tmp_path / "server-0", keep=1)
    table = table_of("rowwise_adagrad:")
    save = saver(folder, table, "rowwise_adagrad:")
    for sequence in range(1, 9):
        push(table, range(60 * sequence), 1.0, sequence)
        checkpoint = save()
        checkpoint.require_files()
        assert_same(checkpoint.read_shard(0)[0], table.state())
    needed = {file.file for file in checkpoint.shards[0].files}
    assert {path.name for path in (folder.path / "shards").iterdir()} == needed
    folder.close()
