from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from pyps.core.gradient import PayloadKind
from pyps.core.protocols.base import Contribution, Part
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.staleness import Weighing
from pyps.core.update import Update
from pyps.service import report
from pyps.statistics import (
    ACTIVITIES_MAX,
    RECENT_RECEIPTS_MAX,
    SHARDS_LISTED_MAX,
    WORKERS_MAX,
    Contacts,
    Statistics,
)
from shards import gradient, pull, run_together, serving


def receipt(outcome: Outcome = Outcome.APPLIED, **fields: Any) -> Receipt:
    grown = int(outcome is Outcome.APPLIED)
    return Receipt(
        **{
            "shard_id": 0,
            "sequence": 1,
            "outcome": outcome,
            "version_before": 4,
            "version_after": 4 + grown,
            "rate_scale": 1.0,
            **fields,
        }
    )


def push(statistics: Statistics, answer: Receipt, *, worker_id: str = "a", now: float = 1.0, **fields: Any) -> None:
    statistics.pushed(worker_id, answer.shard_id, answer, **{"payload_bytes": 8, "now": now, **fields})


def test_each_outcome_is_counted_for_everybody_the_worker_and_the_shard():
    statistics = Statistics()
    push(statistics, receipt(staleness=3, rate_scale=0.5))
    push(statistics, receipt(Outcome.PENDING, shard_id=1), worker_id="b")
    for reason in (Reason.STALE, Reason.DROPPED, Reason.DROPPED):
        push(statistics, receipt(Outcome.REJECTED, shard_id=2, reason=reason), worker_id="c")

    total = statistics.total()
    assert (total.pushes_applied, total.pushes_pending, total.pushes_rejected, total.pushes_duplicate) == (1, 1, 3, 0)
    assert (total.updates, total.bytes_in, total.staleness_max) == (1, 40, 3)
    assert statistics.worker("b").pushes_pending == 1
    for tally in (total, statistics.worker("c"), statistics.shard(2)):
        assert (tally.pushes_rejected, tally.pushes_dropped) == (3, 2)
        assert tally.reasons == {Reason.STALE: 1, Reason.DROPPED: 2}
    assert statistics.worker("nobody") == statistics.shard(9) == Statistics().total()


def test_a_duplicate_counts_as_nothing_else_and_a_rejected_gradient_not_as_stale():
    statistics = Statistics()
    push(statistics, receipt(Outcome.REJECTED, staleness=900))
    total = statistics.total()
    assert (total.staleness_mean, total.staleness_max, total.histogram) == (0, 0, {})
    assert statistics.last_update is None
    push(statistics, receipt(), now=1.0)
    push(statistics, receipt(duplicate=True), now=5.0)
    total = statistics.total()
    assert (total.pushes_applied, total.pushes_duplicate, total.updates) == (1, 1, 1)
    assert statistics.last_update == 1.0


def test_updates_without_a_push_are_counted_for_their_shard():
    statistics = Statistics()
    push(statistics, receipt(shard_id=3), now=6.0)
    statistics.updated(3, [Update(2, 0.1, 1.0, ()), Update(3, 0.1, 1.0, ())], now=7.0)
    assert (statistics.total().updates, statistics.shard(3).updates, statistics.shard(0).updates) == (3, 3, 0)
    assert statistics.last_update == 7.0
    assert statistics.total().pushes_applied == 1


def test_waits_add_up_for_everybody_and_the_worker():
    statistics = Statistics()
    for worker_id, seconds in (("a", 1.5), ("b", 0.25), ("a", 0.5)):
        statistics.blocked(worker_id, seconds, since=1.0, now=1.0 + seconds)
    assert [statistics.worker(name).blocked_seconds for name in ("a", "b", "c")] == [2.0, 0.25, 0.0]
    assert statistics.total().blocked_seconds == 2.25


def steps(statistics: Statistics, after: int = 0, *, limit: int = 100, now: float = 100.0) -> list[tuple[Any, ...]]:
    return [
        (each.number, each.worker_id, each.receipt and each.receipt.sequence, each.began, each.ended)
        for each in statistics.activities(after, limit, now=now)[0]
    ]


def test_the_shards_of_a_push_are_one_step_which_begins_when_its_worker_could_go_on():
    statistics = Statistics()
    push(statistics, receipt(), now=1.0)
    statistics.pulled("a", 8, now=2.0)
    push(statistics, receipt(sequence=2, staleness=3), now=4.0)
    push(statistics, receipt(Outcome.REJECTED, sequence=2, shard_id=1, reason=Reason.STALE), now=5.0)
    push(statistics, receipt(Outcome.PENDING, sequence=2, shard_id=2, staleness=1), now=6.0)
    push(statistics, receipt(sequence=2, duplicate=True), now=7.0)
    # It has pushed as many shards as before, and a second has not passed.
    assert steps(statistics, now=6.5) == [(1, "a", 1, 1.0, 1.0)]
    statistics.blocked("a", 1.0, since=7.0, now=8.0)
    statistics.blocked("a", 1.0, since=7.0, now=10.0, waited_for=("b",))
    assert steps(statistics, 1, now=10.5) == [(2, "a", 2, 2.0, 6.0)]
    push(statistics, receipt(sequence=2), incarnation=9, now=12.0)
    (step, wait, again), forgotten = statistics.activities(1, 9, now=100.0)
    assert (step.receipt.outcome, step.receipt.reason, step.staleness, step.updates) == (
        *(Outcome.REJECTED, Reason.STALE, 3, 1),
    )
    assert (wait.receipt, wait.began, wait.ended, wait.waited_for) == (None, 7.0, 10.0, ("b",))
    assert (again.number, again.began, again.ended, forgotten) == (4, 10.0, 12.0, 0)


def test_a_step_is_listed_once_nothing_more_can_come_of_it():
    statistics = Statistics()
    for sequence in (1, 2):
        push(statistics, receipt(sequence=sequence), now=1.0)
        push(statistics, receipt(sequence=sequence, shard_id=1), now=1.0)
    push(statistics, receipt(sequence=3), now=2.0)
    assert [step[2] for step in steps(statistics, now=5.0)] == [1, 2]
    push(statistics, receipt(sequence=3, shard_id=1, staleness=9), now=9.0)
    assert steps(statistics, 2, now=9.5) == []
    assert [step[2:] for step in steps(statistics, 2, now=10.5)] == [(3, 1.0, 9.0)]
    # A part that comes even later makes no second step.
    push(statistics, receipt(sequence=3, shard_id=2), now=20.0)
    assert len(steps(statistics, now=99.0)) == 3


def test_of_very_many_steps_the_newest_are_kept_and_the_others_counted():
    statistics = Statistics()
    push(statistics, receipt(sequence=0))
    assert steps(statistics)[0][:3] == (1, "a", 0)
    for sequence in range(1, ACTIVITIES_MAX + 5):
        push(statistics, receipt(sequence=sequence), worker_id="ab"[sequence % 2])
    found, forgotten = statistics.activities(1, 10, now=100.0)
    assert ([each.number for each in found], forgotten) == ([*range(6, 16)], 4)
    # Numbers that none has are of an earlier life.
    for after in (0, 10_000):
        assert [step[0] for step in steps(statistics, after, limit=2)] == [ACTIVITIES_MAX + 4, ACTIVITIES_MAX + 5]
    assert steps(statistics, ACTIVITIES_MAX + 5) == []


def test_each_worker_and_shard_has_a_histogram_of_its_own_of_the_gradients_taken():
    statistics = Statistics()
    push(statistics, receipt(Outcome.REJECTED, reason=Reason.STALE))
    before = statistics.total()
    assert (before.staleness_mean, before.rate_scale_mean) == (0.0, 1.0)
    push(statistics, receipt(shard_id=0, staleness=2, rate_scale=0.5))
    push(statistics, receipt(shard_id=1, staleness=4, rate_scale=0.25), worker_id="b")
    push(statistics, receipt(Outcome.REJECTED, reason=Reason.STALE))
    assert (statistics.worker("a").histogram, statistics.worker("b").histogram) == ({2: 1}, {4: 1})
    assert (statistics.shard(0).histogram, statistics.shard(1).histogram) == ({2: 1}, {4: 1})
    assert (statistics.total().histogram, statistics.total().staleness_mean) == ({2: 1, 4: 1}, 3.0)
    assert (before.reasons, before.histogram) == ({Reason.STALE: 1}, {})


def test_recent_receipts_come_newest_first_and_are_bounded():
    statistics = Statistics()
    for sequence in range(RECENT_RECEIPTS_MAX + 5):
        push(statistics, receipt(sequence=sequence), worker_id="ab"[sequence % 2])
    assert [logged.receipt.sequence for logged in statistics.recent(2)] == [1004, 1003]
    assert [logged.receipt.sequence for logged in statistics.recent(2, "a")] == [1004, 1002]
    assert len(statistics.recent(5000)) == RECENT_RECEIPTS_MAX


def test_memory_is_bounded_whatever_workers_call_themselves_and_however_stale_they_are():
    statistics = Statistics()
    for index in range(WORKERS_MAX + 10):
        statistics.pulled(f"worker-{index}", 4, now=0.0)
    assert statistics.worker("worker-0").bytes_out == 0
    assert statistics.worker(f"worker-{WORKERS_MAX}").bytes_out == 4
    assert statistics.total().bytes_out == 4 * (WORKERS_MAX + 10)
    staleness = (1023, 1024, 1100, 5000, *range(10_000, 10**7, 997))
    for each in staleness:
        push(statistics, receipt(staleness=each))
    total = statistics.total()
    assert len(total.histogram) < 1200
    # From 1024 on to one part in eight.
    assert sorted(total.histogram)[:3] == [1023, 1024, 4608]
    assert (total.staleness_max, total.staleness_sum) == (max(staleness), sum(staleness))


def test_apply_times_fall_into_the_first_bucket_that_holds_them():
    statistics = Statistics()
    for seconds in (1e-5, 1.1e-5, 9.0):
        push(statistics, receipt(), apply_seconds=seconds)
    push(statistics, receipt())
    counts, seconds = statistics.apply_seconds()
    assert (counts[:2], counts[-1], sum(counts)) == ([1, 1], 1, 3)
    assert seconds == 1e-5 + 1.1e-5 + 9.0


def test_threads_lose_no_count():
    statistics = Statistics()

    def count() -> None:
        for _ in range(500):
            push(statistics, receipt())
            statistics.pulled("a", 1, now=0.0)

    run_together([count] * 4)
    total = statistics.total()
    assert (total.pushes_applied, total.bytes_in, total.bytes_out) == (2000, 16000, 2000)


def test_the_shards_that_a_worker_pushed_to_and_pulled_are_kept_apart_for_each():
    statistics = Statistics()
    for shard_id in (5, 2, 5):
        push(statistics, receipt(shard_id=shard_id))
    push(statistics, receipt(Outcome.REJECTED, shard_id=9, reason=Reason.STALE))
    push(statistics, receipt(shard_id=3), worker_id="b", answer_bytes=8)
    statistics.pulled("a", 8, now=0.0, shard_ids=(7, 6))
    assert statistics.contacts("a") == Contacts(pushed={2, 5, 9}, pulled={6, 7})
    assert statistics.contacts("b") == Contacts(pushed={3}, pulled={3})
    assert statistics.contacts("nobody") == Contacts(set(), set())
    # Of very many shards the first are listed and no more kept.
    statistics.pulled("c", 8, now=0.0, shard_ids=range(10, 10 + 2 * SHARDS_LISTED_MAX))
    assert statistics.contacts("c").pulled == set(range(10, 10 + SHARDS_LISTED_MAX))


def part(worker_id: str, rate_scale: float, **fields: Any) -> Part:
    pushed = Contribution(gradient([1.0], worker_id=worker_id, **fields), 0, Weighing(rate_scale=rate_scale))
    return Part(pushed, 0.5)


def test_the_step_lost_is_that_of_the_updates_made():
    """A gradient that waits has lost nothing yet: what its update loses depends on the others (Gupta et al. 2016)."""
    statistics = Statistics()
    push(statistics, receipt(Outcome.PENDING, rate_scale=1.0))
    assert statistics.total().step_lost == 0.0
    statistics.updated(0, [Update(1, 0.1, 0.5, (part("a", 1.0), part("b", 0.5)))], now=1.0)
    statistics.updated(1, [Update(1, 0.1, 1.0, (part("b", 1.0), part("c", 1.0, kind=PayloadKind.NOTHING)))], now=1.0)
    assert (statistics.worker("a").step_lost, statistics.worker("b").step_lost) == (0.5, 1 - 1.25 / 2)
    assert (statistics.shard(0).step_lost, statistics.shard(1).step_lost) == (1 - 0.75 / 2, 0.0)
    assert statistics.total().rate_scale_mean == 1.75 / 3


def test_status_memory_and_shards_are_reported_while_a_push_holds_their_shard(monkeypatch):
    run = serving()
    shard = run.content.shards[0]
    partition = run.content.partition
    held = SimpleNamespace(bytes_held=0, bytes_max=0, num_late=0)
    host: Any = SimpleNamespace(run=run, budget=held, serializations=held, waiting=held)

    def report_all() -> None:
        report.status_of(run, report.Addresses("", "", ""), None)
        report.memory_of(host, ())
        report.shard_info(run, shard, partition, with_checksum=False)

    shard.read(lambda version, parameters: run_together([report_all]))
    # Of parameters that are read, the copy alone is made there.
    monkeypatch.setattr(report, "checksum_of", lambda values: run_together([lambda: pull(shard)]) or "sum")
    assert report.shard_info(run, shard, partition, with_checksum=True).checksum == "sum"


def test_a_total_is_summed_shard_by_shard_so_that_pushes_are_counted_in_between():
    statistics, holds = Statistics(), []

    class Counted(nullcontext[None]):
        def __enter__(self) -> None:
            holds.append(sum(tally.pushes_applied for tally in statistics._shards.values()))

    for shard_id in range(5):
        push(statistics, receipt(shard_id=shard_id))
    statistics._lock = Counted()  # type: ignore[assignment]
    assert statistics.total().pushes_applied == 5
    assert len(holds) > 5
