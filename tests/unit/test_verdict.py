"""The sentence on what holds a run back, from hand-made answers, steps and waits."""

import pytest

from pyps.watch.answer import Answer
from pyps.watch.history import History, Server
from pyps.watch.recent import Recent, Step
from pyps.watch.staleness import Expected
from pyps.watch.verdict import verdicts
from pyps_wire import inspector_pb2 as pb

NOW = 1000.0
READY = 3


class Run:
    """A history in which each worker makes steps of so many seconds, whose gradients are that stale."""

    def __init__(self, protocol="hardsync", policy="divide", roster=("w0", "w1", "w2"), **status):
        self.history, self.workers = History(["a"], clock=lambda: NOW), {}
        self.status = {"state": READY, "roster": roster, "protocol": protocol, "staleness": policy, **status}
        for name in roster:
            self.worker(name)

    def worker(self, name, **facts):
        self.workers[name] = pb.WorkerInfo(**{"worker_id": name, "state": "alive", **facts})
        return self

    def steps(self, names, seconds, *, every=0.0, count=40, until=NOW, waited_for=None, **facts):
        """Each step is followed by a wait until `every` is over."""
        every = every or seconds
        for name in names.split():
            for index in range(count):
                began = until - every * (count - index)
                self.history.add_step(name, began, began + seconds, **facts)
                if waited_for is not None:
                    self.history.add_wait(name, began + seconds, began + every, waited_for)
        return self

    def verdict(self, **facts):
        self.history.take("a", Answer("a", pb.Status(**self.status), list(self.workers.values()), **facts))
        return self.history.verdict


def barrier(protocol="hardsync", *, slow=0.4):
    """Three workers, of whom the last takes longer: the others wait for it."""
    return Run(protocol).steps("w0 w1", 0.1, every=0.4, waited_for=["w2"]).steps("w2", slow, every=0.4)


def held(**facts):
    """Two workers wait for a third since 8 s."""
    run = Run().worker("w2", **facts).worker("w0", waits_for=["w2"]).worker("w1", waits_for=["w2"])
    return run.steps("w0 w1 w2", 0.1, until=NOW - 8)


def late():
    run = Run(roster=["w0", "w1"]).worker("w0", waits_for=["w1"])
    return run.steps("w0 w1", 0.1, count=4, until=NOW - 1.6)


def even(protocol="async", policy="divide", *, staleness=2, **options):
    return Run(protocol, policy).steps("w0 w1", 0.1, staleness=staleness, **options)


TIMES = "4.0 times slower than the rest"
STALE = "nobody waits; staleness takes"
SHARE = "50% of the workers' time"
LEAST = "nothing holds the run back"
CASES = (
    (barrier(), f"w2 is {TIMES}; under hardsync all wait for it: {SHARE}"),
    # Of a worker that is gone nothing is said, nor is anybody compared with it.
    (
        barrier(slow=0.2).steps("w3", 9.0, count=6).worker("w3", state="failed"),
        f"w2 is 2.0 times slower than the rest; under hardsync all wait for it: {SHARE}",
    ),
    # Whose push ended a wait is not always known.
    (
        Run().steps("w0 w1", 0.1, every=0.4, waited_for=()).steps("w2", 0.4),
        f"under hardsync workers wait for one another {SHARE}",
    ),
    (late(), "under hardsync workers wait for one another 40% of the workers' time"),
    (held(state="expired"), "2 workers wait for w2, which is gone (expired)"),
    (held(silent_seconds=12.0), "2 workers wait for w2, which has been silent for 12.0 s"),
    (held(), "2 workers wait for w2, which has been at one step for 8.0 s"),
    (even().worker("w2", silent_seconds=12.0), "w2 has been silent for 12.0 s"),
    (even(policy="none").worker("w2", state="failed"), f"{LEAST}: nobody waits; w2 is gone (failed)"),
    (even().steps("w2", 0.4, staleness=10, count=9), f"{STALE} 54% of the steps under divide, w2's 90%: it is {TIMES}"),
    (even(), f"{STALE} 50% of the steps under divide"),
    (even(count=2), f"so far (4 gradients): {STALE} 50% of the steps under divide"),
    (
        even("backup:b=1", staleness=0).steps("w2", 0.4, count=5, outcome="rejected", reason="dropped"),
        f"under backup:b=1 6% of the gradients are refused, 100% of w2's: it is {TIMES}",
    ),
    (
        even(staleness=0).steps("w0 w1", 0.1, count=5, outcome="rejected", reason="stale"),
        "under async 11% of the gradients are refused, 11% of w1's",
    ),
    (even(policy="none"), f"{LEAST}: nobody waits"),
    (even(policy="none").steps("w2", 0.4), f"{LEAST}: nobody waits for w2, which is {TIMES}"),
    (
        Run().steps("w0", 0.3, every=0.31, waited_for=["w1"]).steps("w1", 0.3, every=0.31),
        f"{LEAST}: workers wait 2% of the workers' time",
    ),
    (Run(roster=["w0"]).steps("w0", 0.1), LEAST),
    (Run(), "3 workers alive, and no gradient in the last 60.0 s"),
    (Run(state=1), "no run yet: a worker starts it"),
    (Run(state=2), "the run waits for its first parameters"),
    (Run(state=6), "only a standby answers: another server serves the run"),
    (Run(state=4), "the run is finished"),
    (Run(state=5), "the run ends"),
    (Run(workers_missing=2), "the run waits for the first gradients of 2 workers"),
    (Run(roster=[]), "no worker is alive"),
    (Run(roster=[]).worker("w0", state="failed"), "all workers have failed"),
    (Run("sandblaster"), "under sandblaster a coordinator leads the workers"),
    # What was before one long step, as of a process that was stopped and goes on, is not said of now.
    (
        Run().steps("w0 w1", 0.1, every=8.0, count=1, until=NOW - 2, waited_for=["w2"])
        .steps("w2", 8.0, count=1, until=NOW - 2).steps("w0 w1 w2", 0.1, count=20),
        f"{LEAST}: nobody waits",
    ),
    # A name is no command to a terminal.
    (
        Run(roster=["\x1b[2J"]).worker("w0", waits_for=["\x1b[2J"]).worker("\x1b[2J", silent_seconds=12.0),
        "1 worker waits for ?[2J, which has been silent for 12.0 s",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("run", "words"), CASES, ids=[words for _, words in CASES])
def test_what_holds_a_run_back(run, words):
    sentence, worker = run.verdict()
    assert sentence == words
    # The worker that the page marks.
    about = words.partition("; w2 is gone")[0]
    assert worker.replace("\x1b", "?") == next((name for name in ("w2", "?[2J") if name in about), "")


EVENTS = (
    pb.Event(age_seconds=2.0, kind="configured", message="settings changed: protocol async, staleness divide"),
    pb.Event(age_seconds=2.0, kind="expired", message="worker's lease ran out: worker w2, silent 9", worker="w2"),
    pb.Event(age_seconds=2.0, kind="left", message="worker left: worker w2, state failed", worker="w2"),
)


@pytest.mark.parametrize("event", EVENTS, ids=[event.kind for event in EVENTS])
def test_what_was_before_a_change_or_a_death_is_not_said_of_now(event):
    run = Run().steps("w0 w1", 0.1, every=0.4, until=NOW - 2, waited_for=["w2"]).steps("w2", 0.4, until=NOW - 2)
    run.steps("w0 w1", 0.1, count=20)
    assert "under hardsync all wait for it" in run.verdict().sentence
    assert run.verdict(events=[event]).sentence == "nothing holds the run back: nobody waits"


def test_the_end_of_a_warm_up_which_no_event_tells_is_a_change():
    run = barrier()
    run.status |= {"warmup": "updates=9,protocol=hardsync", "warming_up": True}
    assert "all wait for it" in run.verdict().sentence
    run.status |= {"warming_up": False, "protocol": "async"}
    assert run.verdict().sentence == "3 workers alive, and no gradient in the last 0.0 s"


def test_of_slow_steps_more_is_looked_at_than_the_last_seconds():
    run = Run().steps("w0 w1", 2.0, every=15.0, count=3, waited_for=["w2"]).steps("w2", 15.0, count=3)
    assert "7.5 times slower than the rest; under hardsync all wait for it: 58%" in run.verdict().sentence


def test_a_server_that_is_always_busy_or_does_not_answer():
    run = even(policy="none")
    for uptime, cpu in ((10.0, 3.0), (12.0, 4.9)):
        run.status |= {"uptime_seconds": uptime, "cpu_seconds": cpu}
        verdict = run.verdict()
    assert verdict == ("server a is always busy (0.95 cores): workers may wait for its answers", "")

    history = History(["a", "b"], clock=lambda: NOW)
    assert history.verdict == ("no server has answered yet", "")
    history.take("a", Answer("a", pb.Status(state=READY)))
    history.take("b", "gone")
    assert history.verdict == ("no answer from b for 0.0 s: every worker waits for a server that is gone", "")
    run.history.servers["b"] = Server("b", error="gone", silent_since=NOW - 9)
    assert run.verdict().sentence == "no answer from b for 9.0 s: steps go on"


def test_servers_that_differ_are_named():
    workers = [pb.WorkerInfo(worker_id="w", state="alive")]
    in_force = {"a": "async", "b": "hardsync"}
    answers = [Answer(address, pb.Status(state=3, protocol=each), workers) for address, each in in_force.items()]
    recent = Recent(answers, [Step(1, "w", 0.0, 1.0)], [], now=2.0)
    found = next(verdicts(answers, recent, silent={}, busy={}))
    assert found.sentence == "the servers differ: a goes by async, b goes by hardsync; set one protocol for all"


def test_what_a_policy_takes_of_updates_of_several_gradients_is_that_of_drawn_ones():
    status = pb.Status(protocol="softsync:n=2", staleness="none", roster=["a", "b", "c", "d"])
    lost = {each["name"]: each["lost"] for each in Expected(status).policies({1: 50, 2: 50})}
    # Two gradients an update: both 1 in a quarter of them, one 2 in a half, both 2 in a quarter.
    assert lost["per_update"] == pytest.approx(1 - (1 + 2 * 2 / 3 + 1 / 2) / 4, abs=0.03)
