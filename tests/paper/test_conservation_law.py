"""The law of conservation of staleness for every protocol (algorithm notes 1.3).

The papers (Zhang, Gupta, Lian, Liu, IJCAI 2016; Gupta, Zhang, Wang, ICDM 2016) measure a mean staleness of about n
under n-softsync. It is no property of machines: sum over workers what each saw pass between pull and push, and
the sum telescopes.
"""

from collections import defaultdict
from itertools import pairwise

from pyps.core.receipt import Outcome
from pyps.simulation.event import Kind
from pyps.simulation.simulation import exponential
from simulated import Cluster, cluster, worker_plans

PROTOCOLS = (
    *("async", "softsync:n=1", "softsync:n=3", "hardsync", "backup:b=2", "ssp:s=0", "ssp:s=4"),
    *("ssp:s=0,strict_bsp=true", "serial", "asgd", "asgd:mutex=shard"),
)
WORKERS = 6


def both_sides(run: Cluster) -> tuple[int, int]:
    """SUM (T_push - T_pull) by the receipts, and SUM (T_last push - T_first pull) - SUM (T_pull[k+1] - T_push[k]).

    T is counted from the order of the log; a push's own update comes after its T.
    """
    timed: dict[str, list[tuple[Kind, int]]] = defaultdict(list)
    from_receipts = version = 0
    for event in run.simulation.events:
        if event.kind is Kind.PULL:
            timed[event.worker_id].append((event.kind, version))
        elif event.kind is Kind.PUSH and event.receipt is not None:
            timed[event.worker_id].append((event.kind, version))
            from_receipts += event.receipt.version_before - event.version
            version += event.receipt.outcome == Outcome.APPLIED
    from_the_log = 0
    for events in timed.values():
        last_push = max(index for index, (kind, _) in enumerate(events) if kind is Kind.PUSH)
        cycles = events[: last_push + 1]
        between = sum(after - before for (kind, before), (_, after) in pairwise(cycles) if kind is Kind.PUSH)
        from_the_log += cycles[-1][1] - cycles[0][1] - between
    return from_receipts, from_the_log


def test_the_law_holds_to_the_last_update_under_every_protocol():
    for protocol in PROTOCOLS:
        run = cluster(protocol, workers=worker_plans(WORKERS, exponential())).run(pushes=300)
        from_receipts, from_the_log = both_sides(run)
        assert from_receipts == from_the_log, protocol


def test_under_ssp_blocked_workers_do_not_count():
    """The bound is on clocks: staleness stays below async's, and the tighter the bound, the fresher."""

    def mean(protocol: str) -> float:
        ages = cluster(protocol, workers=worker_plans(WORKERS, exponential())).run(pushes=800).staleness()
        return sum(ages) / len(ages)

    means = [mean(protocol) for protocol in ("ssp:s=0", "ssp:s=1", "ssp:s=4", "async")]
    assert means == sorted(means)
    assert means[0] < WORKERS - 1
