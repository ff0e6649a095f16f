"""The sentence on what holds a run back, from hand-made answers, steps and waits."""

import pytest

from pyps.watch.answer import Answer
from pyps.watch.history import History
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work

NOW = 1000.0
READY, FINISHED, STANDBY = 3, 4, 6


class Run:
    """A history in which each worker makes steps of so many seconds, whose gradients are that stale."""

    def __init__(self, protocol="hardsync", policy="divide", **status):
        self.history, self.workers = History(["a"], clock=lambda: NOW), {}
        roster = status.setdefault("roster", ["w0", "w1", "w2"])
        self.status = pb.Status(**{"state": READY, "protocol": protocol, "staleness": policy, **status})
        for name in roster:
            self.worker(name)

    def worker(self, name, **facts):
        self.workers[name] = pb.WorkerInfo(**{"worker_id": name, "state": "alive", **facts})
        return self

    def steps(self, name, seconds, *, every=0.0, count=40, until=NOW, **facts):
        """Each step is followed by a wait until `every` is over."""
        waited_for = facts.pop("waited_for", ())
        every = every or seconds
        for index in range(count):
            began = until - every * (count - index)
            self.history.add_step(name, began, began + seconds, **facts)
            if waited_for:
                self.history.add_wait(name, began + seconds, began + every, waited_for)
        return self

    def sentence(self, **facts):
        status = pb.Status.FromString(self.status.SerializeToString())
        self.history.take("a", Answer("a", status, list(self.workers.values()), **facts))
        return self.history.verdict


def barrier(protocol="hardsync", *, slow=0.4, **status):
    """Three workers, of whom the last takes longer: the others wait for it."""
    run = Run(protocol, **status)
    for name in ("w0", "w1"):
        run.steps(name, 0.1, every=0.4, waited_for=["w2"])
    return run.steps("w2", slow, every=0.4)


def test_who_is_slow_under_a_barrier_and_what_that_costs_the_others():
    words = "w2 is 4.0 times slower than the rest; under hardsync all wait for it: 75% of their time"
    assert barrier().sentence() == (words, "w2")
    words = "under ssp:s=3 the others, at most 3 steps ahead, wait for it: 75% of their time"
    assert words in barrier("ssp:s=3").sentence().sentence


def test_a_wait_under_way_counts():
    run = Run(roster=["w0", "w1"]).steps("w0", 0.1, count=4, until=NOW - 1.6).steps("w1", 0.1, count=4, until=NOW - 1.6)
    run.worker("w0", waits_for=["w1"])
    assert run.sentence() == (
        "under hardsync workers wait for one another 40% of their time; none is much slower than the rest",
        "",
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"state": "expired"}, "2 workers wait for w2, which is gone (expired)"),
        ({"silent_seconds": 12.0}, "2 workers wait for w2, which has been silent for 12.0 s"),
        ({}, "2 workers wait for w2, whose step has taken 8.0 s so far"),
    ],
)
def test_for_whom_the_others_wait_now(facts, words):
    run = Run().worker("w2", **facts)
    for name in ("w0", "w1"):
        run.worker(name, waits_for=["w2"])
    for name in run.workers:
        run.steps(name, 0.1, until=NOW - 8)
    assert run.sentence() == (words, "w2")


def test_a_worker_without_a_gradient_yet_and_one_that_is_gone():
    run = Run().worker("w0", waits_for=["w2"]).steps("w0", 0.1)
    assert run.sentence() == ("1 worker waits for w2, of which no gradient has come yet", "w2")
    run = barrier(slow=0.1).worker("w2", state="failed")
    assert run.sentence() == ("the others waited for w2, which is gone (failed): 75% of their time lately", "w2")


def test_one_whose_steps_are_mostly_no_longer():
    words = (
        "under hardsync the others wait for w2, though most of its steps take no longer than theirs: 75% of their time"
    )
    assert barrier(slow=0.1).sentence() == (words, "w2")


def test_turns_under_serial():
    run = Run("serial")
    for name, other in (("w0", "w2"), ("w1", "w0"), ("w2", "w1")):
        run.steps(name, 0.1, every=0.3, waited_for=[other])
    words = "under serial one worker computes at a time: workers wait for their turn 67% of their time"
    assert run.sentence() == (words, "")


def test_what_staleness_costs_where_nobody_waits():
    run = (
        Run("async")
        .steps("w0", 0.1, staleness=2)
        .steps("w1", 0.1, staleness=2)
        .steps("w2", 0.4, staleness=10, count=10)
    )
    words = (
        "nobody waits; staleness takes 54% of the steps under divide, w2's 90%: it is 4.0 times slower than the rest"
    )
    assert run.sentence() == (words, "w2")
    run = Run("async").steps("w0", 0.1, staleness=2).steps("w1", 0.1, staleness=2)
    assert run.sentence() == ("nobody waits; staleness takes 50% of the steps under divide", "")


def test_what_is_refused():
    run = Run("backup:b=1").steps("w0", 0.1).steps("w1", 0.1)
    run.steps("w2", 0.4, count=10, outcome="rejected", reason="dropped")
    words = (
        "11% of the gradients are refused under backup:b=1, most of them w2's, which is 4.0 times slower than the rest"
    )
    assert run.sentence() == (words, "w2")


def test_nothing_holds_it_back():
    run = Run("async", "none").steps("w0", 0.1, staleness=3).steps("w1", 0.1, staleness=3)
    assert run.sentence() == ("nothing holds the run back: nobody waits", "")
    run.steps("w2", 0.2)
    words = "nothing holds the run back: nobody waits for w2, which is 2.0 times slower than the rest"
    assert run.sentence() == (words, "w2")
    assert Run(roster=["w0"]).steps("w0", 0.1).sentence() == ("nothing holds the run back", "")


def test_little_is_said_of_little():
    assert Run().sentence() == ("3 workers alive, and no gradient in the last minute", "")
    run = Run("async").steps("w0", 0.1, staleness=2, count=2).steps("w1", 0.1, staleness=2, count=1)
    assert run.sentence().sentence.startswith("so far (3 gradients): nobody waits; staleness takes 50%")


def test_a_server_that_is_always_busy():
    run = Run("async", "none", uptime_seconds=10.0, cpu_seconds=3.0).steps("w0", 0.1).steps("w1", 0.1)
    run.sentence()
    run.status.MergeFrom(pb.Status(uptime_seconds=12.0, cpu_seconds=4.9))
    assert run.sentence() == ("server a is always busy (0.95 cores): workers may wait for its answers", "")


def test_a_run_that_has_not_begun_is_over_or_cannot_be_seen():
    for status, words in (
        ({"state": 1}, "no run yet: a worker starts it"),
        ({"state": 2}, "the run waits for its first parameters"),
        ({"state": STANDBY}, "only a standby answers: another server serves the run"),
        ({"state": FINISHED, "version_max": 1234}, "the run is finished, at version 1,234"),
        ({"state": 5}, "the run ends, at version 0"),
        ({"workers_missing": 2}, "the run waits for 2 workers that have not pushed yet"),
        ({"roster": []}, "no worker is alive: the run waits for one"),
    ):
        assert Run(**status).sentence() == (words, "")
    portions = work.WorkProgress(done=3, num_portions=8)
    words = "under sandblaster a coordinator leads: 3 of 8 portions of this pass are done"
    assert Run("sandblaster").sentence(work=portions) == (words, "")

    history = History(["a", "b"], clock=lambda: NOW)
    assert history.verdict == ("no server has answered yet", "")
    history.take("a", Answer("a", pb.Status(state=READY)))
    history.take("b", "gone")
    assert history.verdict == ("server b does not answer: if it is gone, every worker waits for it", "")


def test_what_workers_are_called_is_no_command_to_a_terminal():
    run = Run(roster=["\x1b[2J"]).worker("w0", waits_for=["\x1b[2J"])
    assert run.sentence().sentence == "1 worker waits for ?[2J, of which no gradient has come yet"
