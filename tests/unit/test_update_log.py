"""Update logs: complete to the last answered push, and replayed to the same bits (U4)."""

import dataclasses
import json
import logging
import os
import re
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps.core.gradient import Extent
from pyps.core.ledger import Ledger
from pyps.core.receipt import Outcome
from pyps.core.recorder import Configured, Event, Pulled, Pushed, Updated
from pyps.core.rule_settings import RuleSettings
from pyps.core.shard import Shard
from pyps.run_header import RunHeader
from pyps.storage.opposed import pairs_of
from pyps.storage.plain import checksum_of, quick_checksum_of
from pyps.storage.replay import Ended, NotKept, ShardLog, log_paths, replay
from pyps.storage.update_log import LoggedUpdate, UpdateLog, UpdateLogError, decode, encode
from pyps_wire.partition import Model, Tensor, partition
from replicas import CUT
from shards import gradient, make_behaviour, make_shard, nothing, pull, push, roster
from support import DEADLINE_SECONDS

SETTINGS = RuleSettings.make("adagrad", ({"learning_rate": 0.1},))
HEADER = RunHeader(
    run_id="run 1/../x",
    epoch=2,
    server_index=0,
    partition=partition(Model((Tensor("t", (16,)),)), num_servers=1),
    optimizer=SETTINGS,
    behaviour=make_behaviour("async", "divide").texts,
    configured=make_behaviour("async").texts,
)


def logged_shard(log: UpdateLog, **others: Any) -> Shard:
    shard = make_shard(
        np.linspace(-1, 1, 16),
        **{"rule": "adagrad", "settings": SETTINGS.groups[0], "policy": "divide", "epoch": 2, **others},
        recorder=log,
    )
    log.begin(HEADER, {shard.shard_id: shard})
    return shard


def train(shard: Shard, sequences: Sequence[int]) -> None:
    for sequence in sequences:
        pull(shard, "a")
        push(shard, np.full(16, 0.1 * sequence), sequence=sequence, epoch=2, base_version=max(0, shard.version - 1))
    push(shard, [1.0, 2.0], sequence=max(sequences) + 1, epoch=2, extents=(Extent(3, 2),))
    # What leaves no trace is not logged: a repetition, another epoch, NaN.
    push(shard, np.zeros(16), sequence=sequences[0], epoch=2)
    push(shard, np.zeros(16), sequence=900, epoch=1)
    push(shard, np.full(16, np.nan), sequence=901, epoch=2)


def only(folder: Path) -> Path:
    (path,) = log_paths(folder)
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Disk:
    """A recorder whose disk takes nothing until it is let go on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def record(self, event: Event) -> None:
        self.events.append(event)

    def write(self, shard_id: int) -> None:
        self.asked.set()
        assert self.goes_on.wait(DEADLINE_SECONDS)


def test_a_shard_is_read_while_its_log_is_written_and_the_next_push_waits_for_its_turn() -> None:
    disk = Disk()
    shard = make_shard([0.0], recorder=disk)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(push, shard, [1.0])
        assert disk.asked.wait(DEADLINE_SECONDS)
        try:
            second = pool.submit(push, shard, [1.0], sequence=1)
            # An evaluation, a checkpoint and a wait for a version.
            assert shard.read(lambda version, values: (version, float(values[0]))) == (1, -1.0)
            assert shard.state().version == 1
            assert shard.when_version(5, lambda: None)()
            assert [type(event) for event in disk.events] == [Pushed, Updated]
        finally:
            disk.goes_on.set()
        assert first.result(DEADLINE_SECONDS).version_after == 1
        assert second.result(DEADLINE_SECONDS).version_after == 2


def test_updates_of_one_call_are_logged_with_their_parameters(log: UpdateLog, tmp_path: Path) -> None:
    """Two rounds that end with one worker: the first checksum is of parameters that the second has changed."""
    shard = logged_shard(log, protocol="softsync:n=1", policy="none")
    workers = roster("a", "b", "c", "d")
    for sequence, worker_id in enumerate(("a", "b", "c"), 1):
        push(shard, np.full(16, float(sequence)), sequence=sequence, epoch=2, worker_id=worker_id, workers=workers)
    assert len(shard.complete(roster("a"))) > 1
    log.end()
    updates = [line for line in lines_of(only(tmp_path)) if line["event"] == "update"]
    assert len({line["checksum"] for line in updates}) == len(updates) > 1
    assert not replay(only(tmp_path)).difference


def hardsync(shard: Shard) -> None:
    workers = roster("a", "b")
    for sequence in range(1, 4):
        for worker_id, scale in (("b", 3.0), ("a", 1.0)):
            values = np.full(16, scale * sequence)
            push(shard, values, sequence=sequence, epoch=2, worker_id=worker_id, workers=workers, example_count=4)
    shard.push(nothing(worker_id="b", sequence=4, epoch=2, base_version=3), roster=workers)
    push(shard, np.ones(16), sequence=4, epoch=2, workers=workers)
    push(shard, np.ones(16), sequence=5, epoch=2, workers=workers)
    # Too late, and once more in the same round: both are refused and logged.
    push(shard, np.ones(16), sequence=9, epoch=2, base_version=1, worker_id="c", workers=workers)
    push(shard, np.ones(16), sequence=6, epoch=2, workers=workers)
    assert len(shard.complete(roster("a"))) == 1


def rewrite(path: Path, sequence: int, change: Mapping[str, Any]) -> None:
    """Changes the line of a push, its checksum too."""
    lines = [decode(line + b"\n") for line in path.read_bytes().splitlines()]
    changed_lines = [
        {**line, **change} if line and line.get("sequence") == sequence else line for line in lines if line
    ]
    path.write_bytes(b"".join(encode(line) for line in changed_lines))


@pytest.fixture
def log(tmp_path: Path) -> UpdateLog:
    return UpdateLog(tmp_path, log_gradients=True)


def test_an_update_tells_what_it_was_made_of_and_at_which_rate(log: UpdateLog, tmp_path: Path) -> None:
    """A gradient that waits is answered before its share and its update's scale are known."""
    both = roster("a", "b")
    behaviour = make_behaviour("softsync:n=1", "per_update")
    shard = logged_shard(log, behaviour=behaviour)
    for sequence in (1, 2, 3):
        push(shard, np.ones(16), sequence=sequence, epoch=2, base_version=0, workers=both)
        push(shard, np.ones(16), sequence=sequence, epoch=2, base_version=0, worker_id="b", workers=both)
    log.end()
    path = only(tmp_path)
    pushes = [line for line in lines_of(path) if line["event"] == "push"]
    assert ["update" in line for line in pushes] == [False, True] * 3
    waited, last = pushes[-2:]
    assert (waited["outcome"], waited["weight"], waited["rate"], waited["rate_scale"]) == ("pending", 1.0, 0.1, 1.0)
    part = {"incarnation": 1, "sequence": 3, "weight": 0.5, "rate_scale": 0.5}
    assert last["update"] == {"rate": 0.1, "parts": [{"worker_id": "a", **part}, {"worker_id": "b", **part}]}
    assert not replay(path).difference


def test_events_come_in_order_with_payloads_and_receipts(log: UpdateLog, tmp_path: Path) -> None:
    shard = logged_shard(log)
    sent = gradient(np.arange(16), sequence=5, epoch=2, clock=4, example_count=32, learning_rate=0.05)
    pull(shard, "b")
    workers = roster("a", "b", "c")
    receipt = shard.push(sent, roster=workers).receipt
    checksum = quick_checksum_of(pull(shard)[1])
    part = {"worker_id": "a", "incarnation": 1, "sequence": 5, "weight": 1.0, "rate_scale": 1.0}
    update = {"rate": 0.05, "parts": [part]}
    shard.configure(behaviour=make_behaviour("hardsync"), learning_rate=0.5, roster=workers)
    log.end()
    shard_log = ShardLog(only(tmp_path))
    assert shard_log.run == HEADER
    assert list(shard_log.events()) == [
        Pulled(0, "b", 0),
        Pushed(0, sent, receipt, workers),
        LoggedUpdate(1, update, checksum),
        Configured(0, make_behaviour("hardsync"), 0.5, workers, version=1, finished=False),
        Ended(1, checksum_of(pull(shard)[1])),
    ]


def test_without_gradients_the_lines_are_there_and_a_replay_says_what_it_lacks(tmp_path: Path) -> None:
    log = UpdateLog(tmp_path)
    train(logged_shard(log), range(1, 4))
    log.end()
    path = only(tmp_path)
    assert [line["event"] for line in lines_of(path)].count("push") == 4
    assert not path.with_suffix(".payloads").exists()
    assert list(ShardLog(path).events()) == [Pulled(0, "a", 0), NotKept()]
    with pytest.raises(UpdateLogError, match=r"holds no gradients: a server keeps them with --log-gradients"):
        replay(path)


def softsync(shard: Shard) -> None:
    workers = roster("a", "b", "c", "d")
    for sequence, worker_id in enumerate("abcda"):
        push(shard, np.full(16, sequence), sequence=sequence, epoch=2, worker_id=worker_id, workers=workers)
    assert shard.num_pending == 1


def changed(shard: Shard) -> None:
    softsync(shard)
    changes: list[dict[str, Any]] = [
        {"behaviour": make_behaviour("async", "exponential:beta=0.3333333333333333")},
        {"learning_rate": 0.1 / 3},
        {"behaviour": make_behaviour("softsync:n=1", rate_schedule="step:every=2,factor=0.3"), "learning_rate": 0.7},
    ]
    for sequence, change in enumerate(changes, 10):
        shard.configure(roster=roster("a", "b"), **change)
        push(shard, np.full(16, sequence), sequence=sequence, epoch=2, base_version=1, workers=roster("a", "b"))
    assert shard.num_pending == 1
    shard.finish()
    shard.configure(roster=roster("a"), behaviour=make_behaviour("async"))


@pytest.mark.parametrize(
    ("protocol", "train_so", "version"),
    [
        ("async", partial(train, sequences=range(1, 6)), 6),
        ("hardsync", hardsync, 5),
        ("softsync:n=2", softsync, 2),
        ("softsync:n=2", changed, 5),
    ],
)
def test_every_kind_of_update_is_replayed(
    log: UpdateLog, tmp_path: Path, protocol: str, train_so: Callable[[Shard], None], version: int
) -> None:
    shard = logged_shard(log, behaviour=make_behaviour(protocol, "divide", clip_norm=2.0))
    train_so(shard)
    log.end()
    path = only(tmp_path)
    # The run can give no name that leads out of the folder.
    assert path.relative_to(tmp_path).as_posix() == "run_1____x.epoch-2/shard-000000.jsonl"
    replayed = replay(path)
    assert not replayed.difference
    assert (replayed.version, replayed.updates, replayed.pulls) == (version, version, 5 if protocol == "async" else 0)
    assert (replayed.run.run_id, replayed.run.epoch, replayed.shard_id) == ("run 1/../x", 2, 0)
    assert (replayed.ended, replayed.cut_short) == (True, False)
    assert replayed.checksum == checksum_of(pull(shard)[1])


def test_the_log_tells_which_pushes_that_were_computed_beside_each_other_are_opposed(
    log: UpdateLog, tmp_path: Path
) -> None:
    shard, up = logged_shard(log), np.ones(16)
    push(shard, up, sequence=1, epoch=2, worker_id="a", base_version=0)
    # Beside a's, of the same version.
    push(shard, -2 * up, sequence=1, epoch=2, worker_id="b", base_version=0)
    # Beside b's, whose version is one below; a's had come before.
    push(shard, [3.0], sequence=2, epoch=2, worker_id="a", base_version=1, extents=(Extent(3, 1),))
    # Beside this one; what was refused counts for nothing.
    push(shard, np.full(16, np.nan), sequence=2, epoch=2, worker_id="b", base_version=1)
    push(shard, up, sequence=3, epoch=2, worker_id="b", base_version=2)
    log.end()

    same, one = pairs_of(log_paths(tmp_path))

    assert same == (0, 0, 1, 1.0, pytest.approx(-1.0))
    assert one == (1, 1, 2, 0.5, pytest.approx((-0.25 + 0.25) / 2))


def test_a_restored_shard_is_logged_from_where_it_stands(tmp_path: Path) -> None:
    before = logged_shard(UpdateLog(tmp_path / "first"), behaviour=make_behaviour("softsync:n=2", "divide"))
    softsync(before)
    state = before.state()
    log = UpdateLog(tmp_path / "second", log_gradients=True)
    shard = logged_shard(
        log,
        behaviour=before.behaviour,
        version=state.version,
        slots=state.slots,
        ledger=Ledger(state.ledger),
        pending=state.pending,
        examples=state.examples,
        learning_rate=0.3,
    )
    assert ShardLog(only(tmp_path / "second")).shard().state().ledger == state.ledger
    push(shard, np.ones(16), sequence=20, epoch=2, workers=roster("a", "b", "c", "d"))
    log.end()
    replayed = replay(only(tmp_path / "second"))
    assert not replayed.difference
    assert (replayed.version, replayed.updates) == (3, 1)


def test_a_momentum_that_was_moved_before_the_log_and_in_it_is_replayed(log: UpdateLog, tmp_path: Path) -> None:
    shard = make_shard(np.linspace(-1, 1, 16), rule="adam", epoch=2, momentum=0.5, recorder=log)
    log.begin(dataclasses.replace(HEADER, optimizer=RuleSettings.make("adam", ({},))), {0: shard})
    for sequence, momentum in enumerate((None, 0.8, None), 1):
        push(shard, np.full(16, sequence), sequence=sequence, epoch=2, base_version=sequence - 1, momentum=momentum)
    log.end()
    replayed = replay(only(tmp_path))
    assert (replayed.difference, replayed.updates) == ("", 3)
    assert replayed.checksum == checksum_of(pull(shard)[1])


def test_the_log_of_a_model_in_parts_keeps_its_cut(log: UpdateLog, tmp_path: Path) -> None:
    shard = make_shard(np.linspace(-1, 1, 16), epoch=2, recorder=log)
    optimizer = RuleSettings.make("sgd", ({"learning_rate": 0.1},) * 2)
    log.begin(dataclasses.replace(HEADER, partition=partition(CUT, num_servers=2), optimizer=optimizer), {0: shard})
    train(shard, range(1, 4))
    log.end()
    assert ShardLog(only(tmp_path)).run.model == CUT
    replayed = replay(only(tmp_path))
    assert (replayed.difference, replayed.ended, replayed.updates) == ("", True, 4)


def test_an_earlier_log_is_never_written_over(tmp_path: Path) -> None:
    for _ in range(2):
        log = UpdateLog(tmp_path, log_gradients=True)
        train(logged_shard(log), range(1, 3))
        log.end()
    assert [path.name for path in log_paths(tmp_path)] == ["shard-000000.2.jsonl", "shard-000000.jsonl"]
    assert [replay(path).difference for path in log_paths(tmp_path)] == ["", ""]


def test_any_value_that_differs_shows_in_the_quick_checksum() -> None:
    for size in (1, 7, 1023, 1024, 1025, 4097):
        values = np.linspace(-1, 1, size, dtype=np.float32)
        places = range(0, size, max(1, size // 50))
        checksums = {quick_checksum_of(values)}
        for place in places:
            changed_values = values.copy()
            changed_values[place] = np.nextafter(values[place], np.float32(2))
            checksums.add(quick_checksum_of(changed_values))
        assert len(checksums) == 1 + len(places), size
        assert quick_checksum_of(values) == quick_checksum_of(values.tobytes())


def test_a_refused_push_is_logged_with_its_reason(log: UpdateLog, tmp_path: Path) -> None:
    shard = logged_shard(log, behaviour=make_behaviour("hardsync"))
    receipts = [push(shard, np.ones(16), sequence=1, epoch=2)]
    receipts.append(push(shard, np.ones(16), sequence=2, epoch=2, base_version=0))
    log.end()
    assert [receipt.outcome for receipt in receipts] == [Outcome.APPLIED, Outcome.REJECTED]
    line = [line for line in lines_of(only(tmp_path)) if line["event"] == "push"][1]
    assert (line["outcome"], line["reason"], line["weight"]) == ("rejected", "stale", 0.0)
    assert "checksum" not in line


# Logs that end midway, were changed or lost, or found no room: what is told, and what still counts.


def test_a_killed_server_leaves_everything_it_had_answered(log: UpdateLog, tmp_path: Path) -> None:
    shard = logged_shard(log)
    train(shard, range(1, 4))
    # Not ended, not closed: what is in the files now is what a killed process would leave.
    path = only(tmp_path)
    replayed = replay(path)
    assert (replayed.version, replayed.ended, replayed.difference) == (4, False, "")
    assert replayed.checksum == checksum_of(pull(shard)[1])
    length = path.stat().st_size
    for cut in (1, 30, 200):
        os.truncate(path, length - cut)
        assert replay(path).version == 3


def test_a_changed_byte_is_told_with_its_place(log: UpdateLog, tmp_path: Path) -> None:
    train(logged_shard(log), range(1, 4))
    log.end()
    path = only(tmp_path)
    for file, message in ((path, r"line \d+ is not what was written"), (path.with_suffix(".payloads"), "bytes at")):
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
        with pytest.raises(UpdateLogError, match=f"is damaged.*{message}"):
            replay(path)
        data[-100] ^= 1
        file.write_bytes(data)
    assert not replay(path).difference


def test_the_first_update_that_differs_is_named_with_both_numbers(log: UpdateLog, tmp_path: Path) -> None:
    train(logged_shard(log), range(1, 5))
    log.end()
    path = only(tmp_path)
    whole = path.read_bytes()
    [line] = [line for line in lines_of(path) if line.get("sequence") == 2]
    changes: list[tuple[dict[str, Any], int, str]] = [
        ({"checksum": "00c0ffee"}, 2, r"the shard's checksum is logged as 00c0ffee, replayed it is \w{8} "),
        ({"rate": 0.25}, 2, "rate is logged as 0.25, replayed it is 0.1000"),
        ({"weight": 2.0}, 2, "weight is logged as 2, replayed it is 1$"),
        ({"version_after": 3}, 3, "version_after is logged as 3, replayed it is 2"),
        ({"update": {**line["update"], "rate": 0.25}}, 2, "rate is logged as 0.25, replayed it is "),
        ({"update": {**line["update"], "parts": []}}, 2, r"parts is logged as \[\], replayed it is "),
    ]
    for change, update, words in changes:
        path.write_bytes(whole)
        for sequence in (4, 2):
            rewrite(path, sequence, change)
        difference = replay(path).difference
        assert re.match(f"update {update}, by push 2 of worker 'a': {words}", difference), difference


def test_an_update_that_is_missing_or_too_many_is_told(log: UpdateLog, tmp_path: Path) -> None:
    hardsync(logged_shard(log, behaviour=make_behaviour("hardsync")))
    log.end()
    path = only(tmp_path)
    whole = path.read_bytes().splitlines(keepends=True)
    without_update = [line for line in whole if b'"event": "update"' not in line]
    path.write_bytes(b"".join(without_update))
    assert "update 5: the replay makes it (checksum" in replay(path).difference
    without_cause = [line for line in whole if b'"event": "complete"' not in line]
    path.write_bytes(b"".join(without_cause))
    assert replay(path).difference == "update 5: it is logged, but the replay makes none"


def test_other_parameters_at_the_end_are_told(log: UpdateLog, tmp_path: Path) -> None:
    train(logged_shard(log), range(1, 4))
    log.end()
    path = only(tmp_path)
    *lines, end = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, encode({**(decode(end) or {}), "checksum": "00c0ffee"})]))
    assert replay(path).difference.startswith(
        "the end: version 4 with CRC-32 00c0ffee is logged, replayed it is version 4"
    )


def test_beyond_the_bound_for_all_shards_no_gradient_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Parameters and slots of both, a gradient of each, and a part of the third.
    log = UpdateLog(tmp_path, log_gradients=True, payload_bytes_max=6 * 64 + 63)
    shards = {i: make_shard(np.zeros(16), shard_id=i, rule="adagrad", epoch=2, recorder=log) for i in (0, 1)}
    log.begin(HEADER, shards)
    with caplog.at_level(logging.WARNING):
        for sequence in (1, 2, 3):
            for shard in shards.values():
                push(shard, np.ones(16), sequence=sequence, epoch=2)
    log.end()
    paths = log_paths(tmp_path)
    assert [path.with_suffix(".payloads").stat().st_size for path in paths] == [192, 192]
    (warning,) = caplog.records
    assert "gradients are no longer logged" in warning.message and "--log-gradients-max-bytes" in warning.message
    for replayed in map(replay, paths):
        assert (replayed.version, replayed.cut_short, replayed.difference) == (1, True, "")
    assert [shard.version for shard in shards.values()] == [3, 3]


def test_a_full_disk_ends_logging_only(log: UpdateLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shard = logged_shard(log)
    train(shard, range(1, 4))
    path = only(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.INFO):
        try:
            # To the process a file that may not grow is a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
            train(shard, range(10, 13))
            for _ in range(100):
                log.note({"event": "report", "worker_id": "a"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shard.version == 8
    log.end()
    assert [record.message for record in caplog.records] == [
        *("the update log of a shard ended", "the log of a run's events ended"),
    ]
    assert replay(path).version == 4


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.jsonl"
    for content in (b"", b"hello, this is something else\n", b'{"event": "begin"}\n', b"\x00"):
        path.write_bytes(content)
        with pytest.raises(UpdateLogError, match=r"shard-000000\.jsonl"):
            pytest.fail(f"{replay(path)} of {content!r}")


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UpdateLogError, match="cannot be used: Not a directory"):
        UpdateLog(tmp_path / "file" / "inside")


def test_a_log_that_could_not_be_begun_leaves_nothing_behind(log: UpdateLog, tmp_path: Path) -> None:
    train(logged_shard(log), range(1, 3))
    log.end()
    before = sorted(tmp_path.rglob("*"))
    later = dataclasses.replace(HEADER, epoch=HEADER.epoch + 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for header in (HEADER, later):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
            with pytest.raises(UpdateLogError, match="cannot be written"):
                log.begin(header, {0: make_shard(np.zeros(16))})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.end()
        assert sorted(tmp_path.rglob("*")) == before
