"""Update logs that end midway, were changed or lost, or found no room: what is told, and what still counts."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logged import HEADER, hardsync, logged_shard, only, rewrite, train
from pyps.checksum import checksum_of
from pyps.update_log import (
    UpdateLog,
    UpdateLogError,
    log_paths,
    replay,
)
from shards import make_behaviour, make_shard, pull, push


@pytest.fixture
def log(tmp_path: Path) -> UpdateLog:
    return UpdateLog(tmp_path, log_gradients=True)


def test_a_killed_server_leaves_everything_it_had_answered(log: UpdateLog, tmp_path: Path) -> None:
    shard = logged_shard(log)
    train(shard, range(1, 4))
    # Not ended, not closed: what is in the files now is what a killed process would leave.
    replayed = replay(only(tmp_path))
    assert (replayed.version, replayed.ended, replayed.difference) == (4, False, "")
    assert replayed.checksum == checksum_of(pull(shard)[1])


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_half_a_line_at_the_end_is_left_out(log: UpdateLog, tmp_path: Path, cut: int) -> None:
    train(logged_shard(log), range(1, 4))
    path = only(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"checksum": "00c0ffee"},
            r"^update 2, by push 2 of worker 'a': the shard's checksum is logged as 00c0ffee, replayed it is \w{8} ",
        ),
        ({"rate": 0.25}, r"^update 2, by push 2 of worker 'a': rate is logged as 0.25, replayed it is 0.1000"),
        ({"weight": 2.0}, r"^update 2, by push 2 of worker 'a': weight is logged as 2, replayed it is 1$"),
        (
            {"version_after": 3},
            r"^update 3, by push 2 of worker 'a': version_after is logged as 3, replayed it is 2",
        ),
    ],
)
def test_the_first_update_that_differs_is_named_with_both_numbers(
    log: UpdateLog, tmp_path: Path, change: Mapping[str, Any], message: str
) -> None:
    train(logged_shard(log), range(1, 5))
    log.end()
    path = only(tmp_path)
    for sequence in (4, 2):
        rewrite(path, sequence, change)
    replayed = replay(path)
    assert re.search(message, replayed.difference), replayed.difference


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


def test_beyond_the_bound_no_gradient_is_kept_and_the_replay_ends_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Parameters, slots and two gradients.
    log = UpdateLog(tmp_path, log_gradients=True, payload_bytes_max=4 * 64 + 63)
    shard = logged_shard(log)
    with caplog.at_level(logging.WARNING):
        train(shard, range(1, 6))
    log.end()
    path = only(tmp_path)
    assert path.with_suffix(".payloads").stat().st_size == 4 * 64
    (warning,) = caplog.records
    assert "gradients are no longer logged" in warning.message and "--log-gradients-max-bytes" in warning.message
    replayed = replay(path)
    assert (replayed.version, replayed.cut_short, replayed.difference) == (2, True, "")
    assert shard.version == 6


def test_the_bound_holds_over_all_shards(tmp_path: Path) -> None:
    log = UpdateLog(tmp_path, log_gradients=True, payload_bytes_max=200)
    shards = {shard_id: make_shard(np.zeros(16), shard_id=shard_id, recorder=log) for shard_id in (0, 1)}
    log.begin(HEADER, shards)
    for shard in shards.values():
        push(shard, np.ones(16), sequence=1)
    push(shards[0], np.ones(16), sequence=2)
    log.end()
    sizes = [path.with_suffix(".payloads").stat().st_size for path in log_paths(tmp_path)]
    assert sizes == [128, 64]


def test_a_full_disk_ends_the_logging_and_nothing_else(
    log: UpdateLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = logged_shard(log)
    train(shard, range(1, 4))
    path = only(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.INFO):
        try:
            # To the process a file that may not grow is a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
            train(shard, range(10, 13))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shard.version == 8
    log.end()
    assert [record.message for record in caplog.records] == ["the update log of a shard ended"]
    assert replay(path).version == 4


@pytest.mark.parametrize("content", [b"", b"hello, this is something else\n", b'{"event": "begin"}\n', b"\x00"])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shard-000000.jsonl"
    path.write_bytes(content)
    with pytest.raises(UpdateLogError, match=r"shard-000000\.jsonl"):
        replay(path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
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
