"""How the demo puts the answers of several servers together."""

from __future__ import annotations

import pytest

from pyps.cli.demo.progress import merge_workers
from pyps.cli.demo.screen import headline_of
from pyps_wire import inspector_pb2 as pb


def worker(worker_id: str, **known: float) -> pb.WorkerInfo:
    return pb.WorkerInfo(worker_id=worker_id, state="alive", **known)


def test_a_worker_of_two_servers_is_listed_once_with_means_over_both() -> None:
    first = worker("b", clock=5, pushes_applied=9, staleness_mean=1.0, staleness_max=2, rate_scale_mean=1.0)
    second = worker("b", clock=5, pushes_applied=3, staleness_mean=3.0, staleness_max=7, rate_scale_mean=0.6)
    first.scalars["loss"] = 0.5

    merged = merge_workers([[first, worker("a")], [second]], [pb.Status(num_shards=3), pb.Status(num_shards=1)])

    assert [one.worker_id for one in merged] == ["a", "b"]
    b = merged[1]
    assert (b.steps, b.loss, b.pushes, b.staleness_mean, b.staleness_max) == (5, 0.5, 3.0, 1.5, 7)
    assert b.rate_scale_mean == pytest.approx(0.9)


def test_workers_that_joined_before_there_are_shards_have_pushed_nothing() -> None:
    merged = merge_workers([[worker("a")]], [pb.Status()])

    assert (merged[0].pushes, merged[0].staleness_mean, merged[0].loss) == (0.0, 0.0, None)


def test_the_line_of_a_run_fits_a_terminal_of_80_columns() -> None:
    from pyps.cli.demo.progress import Progress

    progress = Progress(99.9, True, 9999, 9999, 9999, 12.34, 123, 0.5, 2, merge_workers([[worker("a")]], [pb.Status()]))

    assert len(headline_of(progress, updates_per_second=999, loss=2.30259, accuracy=0.98765)) <= 80
