"""Warm start as a stage before the main protocol (algorithm notes 2.3): its text, and which stage decides when."""

from itertools import product

import numpy as np

from pyps.core.behaviour import Behaviour
from pyps.core.pacing import StagedPacer
from pyps.core.receipt import Outcome
from pyps.core.warmup import WarmUp
from shards import make_shard, pull, push, refusal, roster, roster_of
from simulated import cluster
from simulated import worker_plans as simulated_crew

MAINS = ["async", "softsync:n=1", "ssp:s=1", "serial", "asgd"]
BARRIERS = ["hardsync", "backup:b=1", "ssp:s=0,strict_bsp=true"]
TWO = roster("a", "b")


def staged(warmup: str, protocol: str = "async", staleness: str = "none") -> Behaviour:
    return Behaviour.parse(protocol=protocol, warmup=warmup, staleness=staleness)


def test_every_protocol_may_follow_a_warm_up_and_without_a_barrier_also_release_workers_one_by_one():
    cases = [*product([*MAINS, *BARRIERS], ("",)), *product(MAINS, (",release_every=3",))]
    for (main, release), warmup in product(cases, ("serial", "hardsync")):
        text = f"updates=5,protocol={warmup}{release}"
        run = cluster(main, workers=simulated_crew(3, steps=15), warmup=text).run()
        assert [run.steps(worker_id) for worker_id in "abc"] == [15, 15, 15], (main, text)


def test_a_barrier_cannot_release_workers_one_by_one():
    """Those let in would wait for those that are not, and these for their updates."""
    for main in BARRIERS:
        words = f"lets the workers in one after the other, and {main} waits for the gradients of the others"
        assert words in refusal(Behaviour.parse, protocol=main, warmup="updates=5,release_every=3")


def test_a_warm_ups_text_is_that_of_an_equal_one_and_a_wrong_one_is_refused_in_one_sentence():
    for text in ("updates=200", "updates=1,protocol=hardsync:weighting=equal,release_every=5"):
        assert WarmUp.parse(text).text == text
    for text, words in {
        "protocol=serial": "warmup's updates is 0; expected at least 1, as in updates=200",
        "updates=5,release_every=-1": "warmup's release_every is -1; expected updates, or 0 for none",
        "updates=5,protocol=softsync:n=2": "warmup's protocol is 'softsync:n=2'; expected serial or hardsync",
        "updates=5,protocol=gentle": "protocol 'gentle' is unknown",
    }.items():
        assert words in refusal(WarmUp.parse, text)


def test_the_main_protocol_decides_from_the_named_version_on_also_after_a_restore():
    behaviour = staged("updates=2,protocol=hardsync")
    shard = make_shard([0.0], behaviour=behaviour)
    outcomes = []
    for sequence in range(3):
        for worker_id in "ab":
            receipt = push(shard, [1.0], worker_id=worker_id, sequence=sequence, workers=TWO)
            outcomes.append((receipt.version_before, receipt.outcome))
    pending, applied = Outcome.PENDING, Outcome.APPLIED
    assert outcomes == [(0, pending), (0, applied), (1, pending), (1, applied), (2, applied), (3, applied)]
    # Each shard changes at its own version.
    later = [make_shard([0.0], behaviour=behaviour, version=version) for version in (1, 2)]
    assert [push(shard, [1.0], workers=TWO).outcome for shard in later] == [pending, applied]


def test_gradients_of_the_warm_up_are_settled_as_its_round_and_none_waits_when_it_ends():
    shard = make_shard([0.0], behaviour=staged("updates=5,protocol=hardsync"))
    push(shard, [1.0], example_count=3, workers=roster_of(3))
    push(shard, [5.0], worker_id="b", example_count=1, workers=roster_of(3))
    shard.configure(behaviour=Behaviour.parse(), roster=roster_of(3))
    assert pull(shard)[1].tolist() == [-2.0]
    shard = make_shard([0.0], behaviour=staged("updates=1,protocol=hardsync", "softsync:n=1"))
    push(shard, [1.0], workers=TWO)
    assert (len(shard.complete(roster("a"))), shard.num_pending) == (1, 0)
    assert push(shard, [1.0], sequence=1, workers=TWO).min_version == 0


def test_the_split_is_that_of_the_stage():
    shard = make_shard(np.zeros(1), behaviour=staged("updates=1,protocol=serial", "async", "constant"))
    rates = [push(shard, [1.0], sequence=sequence, workers=roster_of(4)).rate for sequence in range(2)]
    assert rates == [1.0, 0.25]


def test_steps_are_granted_where_a_stage_or_the_release_asks_for_it_and_a_barrier_in_either_is_one():
    for warmup, protocol, paced, barrier in (
        ("protocol=serial", "async", True, False),
        ("protocol=serial", "hardsync", True, True),
        ("protocol=hardsync", "async", False, True),
        ("protocol=hardsync", "ssp:s=1", True, True),
        ("protocol=hardsync,release_every=2", "async", True, True),
    ):
        aggregation = staged(f"updates=5,{warmup}", protocol).aggregation
        assert (type(aggregation.pacer()) is StagedPacer, aggregation.barrier) == (paced, barrier), (warmup, protocol)
        assert paced or aggregation.pacer() is None


def test_the_main_protocol_says_the_rest():
    aggregation = staged("updates=5", "asgd:accumulate=4").aggregation
    assert aggregation.text == "asgd:accumulate=4 after updates=5"
    assert (aggregation.whole_model, aggregation.accumulate, aggregation.barrier) == (True, 4, False)
    assert staged("updates=5", "softsync:n=3").aggregation.warnings(4) == (
        "softsync:n=3 with 4 workers makes an update of every gradient, so the effective n is 4",
    )
