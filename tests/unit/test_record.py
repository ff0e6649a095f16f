"""Records of pushes: complete to the last answered push, and replayed to the same bits (ARCHITECTURE.md)."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pyps.checkpoint import RunHeader
from pyps.checkpoint.checkpoint import checksum_of
from pyps.core.gradient import Extent
from pyps.core.shard import Shard
from pyps.record import Ended, Pulled, Pushed, Record, Recorder, RecordError, record_paths, replay
from pyps.run import RuleSettings
from pyps_wire.partition import Model, Tensor
from shards import gradient, make_shard, pull, push

SETTINGS = RuleSettings.make("adagrad", ({"learning_rate": 0.1},))
HEADER = RunHeader("run 1/../x", 2, 0, 1, Model((Tensor("t", (16,)),)), SETTINGS, "async", "divide")


def recorded_shard(recorder: Recorder, **others: object) -> Shard:
    shard = make_shard(
        np.linspace(-1, 1, 16),
        **{"rule": "adagrad", "settings": SETTINGS.groups[0], "policy": "divide", "epoch": 2, **others},
        recorder=recorder,
    )
    recorder.begin(HEADER, {shard.shard_id: shard})
    return shard


def train(shard: Shard, sequences: Sequence[int]) -> None:
    for sequence in sequences:
        pull(shard, "a")
        push(shard, np.full(16, 0.1 * sequence), sequence=sequence, epoch=2, base_version=max(0, shard.version - 1))
    push(shard, [1.0, 2.0], sequence=max(sequences) + 1, epoch=2, extents=(Extent(3, 2),))
    # What leaves no trace is not recorded: a repetition, another epoch, NaN.
    push(shard, np.zeros(16), sequence=sequences[0], epoch=2)
    push(shard, np.zeros(16), sequence=900, epoch=1)
    push(shard, np.full(16, np.nan), sequence=901, epoch=2)


def test_a_replay_gives_the_same_bits(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    shard = recorded_shard(recorder)
    train(shard, range(1, 6))
    recorder.end()
    (path,) = record_paths(tmp_path)
    replayed = replay(path)
    assert replayed.faithful and not replayed.difference
    assert (replayed.run_id, replayed.epoch, replayed.shard_id) == ("run 1/../x", 2, 0)
    assert (replayed.version, replayed.updates, replayed.pulls) == (6, 6, 5)
    assert replayed.checksum == replayed.recorded_checksum == checksum_of(pull(shard)[1])


def test_the_run_can_give_no_name_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorded_shard(recorder)
    recorder.end()
    assert [path.relative_to(tmp_path).as_posix() for path in record_paths(tmp_path)] == [
        "run_1____x.epoch-2/shard-000000.log"
    ]


def test_events_come_in_order_with_payloads_and_receipts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    shard = recorded_shard(recorder)
    sent = gradient(np.arange(16), sequence=5, epoch=2)
    pull(shard, "b")
    receipt = shard.push(sent, num_workers=3)
    recorder.end()
    record = Record(record_paths(tmp_path)[0])
    assert record.run == HEADER
    assert list(record.events()) == [
        Pulled("b", 0),
        Pushed(sent, receipt),
        Ended(1, checksum_of(pull(shard)[1])),
    ]


def test_a_restored_shard_is_recorded_from_where_it_stands(tmp_path: Path) -> None:
    before = recorded_shard(Recorder(tmp_path / "first"))
    train(before, range(1, 4))
    state = before.state()
    recorder = Recorder(tmp_path / "second")
    shard = recorded_shard(recorder, version=state.version, slots=state.slots)
    train(shard, range(10, 13))
    recorder.end()
    replayed = replay(record_paths(tmp_path / "second")[0])
    assert replayed.faithful
    assert (replayed.version, replayed.updates) == (8, 4)


def test_an_earlier_record_is_never_written_over(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder(tmp_path)
        recorded_shard(recorder)
        recorder.end()
    assert [path.name for path in record_paths(tmp_path)] == ["shard-000000.2.log", "shard-000000.log"]


def test_a_killed_server_leaves_everything_it_had_answered(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    shard = recorded_shard(recorder)
    train(shard, range(1, 4))
    # Not ended, not closed: what is in the file now is what a killed process would leave.
    (path,) = record_paths(tmp_path)
    replayed = replay(path)
    assert (replayed.version, replayed.recorded_checksum, replayed.faithful) == (4, None, True)
    assert replayed.checksum == checksum_of(pull(shard)[1])


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_half_an_entry_at_the_end_is_left_out(tmp_path: Path, cut: int) -> None:
    recorder = Recorder(tmp_path)
    shard = recorded_shard(recorder)
    train(shard, range(1, 4))
    recorder.pushed(0, gradient(np.zeros(200), sequence=50), next_receipt(shard))
    (path,) = record_paths(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    assert replay(path).version == 4


def next_receipt(shard: Shard):
    (life,) = shard.state().ledger.entries
    return life.receipts[-1]


def test_a_changed_byte_is_told_with_its_place(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    train(recorded_shard(recorder), range(1, 4))
    recorder.end()
    (path,) = record_paths(tmp_path)
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"is damaged: the entry at byte \d+"):
        replay(path)


def test_a_replay_that_comes_out_otherwise_is_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    shard = recorded_shard(recorder)
    push(shard, np.ones(16), sequence=1, epoch=2)
    recorder.pushed(0, gradient(np.ones(16), sequence=2, epoch=2, base_version=1), next_receipt(shard))
    recorder.end()
    replayed = replay(record_paths(tmp_path)[0])
    assert not replayed.faithful
    assert "recorded Receipt(" in replayed.difference


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path)
    shard = recorded_shard(recorder)
    train(shard, range(1, 4))
    (path,) = record_paths(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.INFO):
        try:
            # To the process a file that may not grow is a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
            train(shard, range(10, 13))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shard.version == 8
    recorder.end()
    assert [record.message for record in caplog.records] == ["recording of a shard ended"]
    assert replay(path).version == 4


@pytest.mark.parametrize("content", [b"", b"hello, this is something else", b"pyps record 1\n", b"pyps record 1\n\x00"])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shard-000000.log"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"shard-000000\.log"):
        replay(path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be used: Not a directory"):
        Recorder(tmp_path / "file" / "inside")


def test_the_header_survives_json() -> None:
    assert RunHeader.from_json(HEADER.to_json()) == HEADER
    assert dataclasses.replace(HEADER, epoch=7) == HEADER.with_epoch(7)
