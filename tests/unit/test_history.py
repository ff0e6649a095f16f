"""What a history makes of servers' answers: rates, lives of servers, whose steps are whose, and how much it keeps."""

import json
import math
from itertools import pairwise

import pytest

from pyps.watch import history as module
from pyps.watch.answer import Answer
from pyps.watch.history import History
from pyps_wire import inspector_pb2 as pb
from shards import Clock


def answer(address: str, *, uptime: float, version: int, clock: int = 0, taken: int = 0, mean: float = 0.0) -> Answer:
    """A server's, with one worker."""
    tally = pb.Tally(pushes_applied=taken, staleness_mean=mean)
    status = pb.Status(state=3, uptime_seconds=uptime, version_max=version, tally=tally)
    worker = pb.WorkerInfo(worker_id="w", state="alive", clock=clock, scalars={"loss": 1.0})
    # Of its pushes the other server gets none, and hears of its steps by heartbeats.
    worker.tally.bytes_in = clock if address == "a" else 0
    return Answer(address, status, [worker])


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 1000.0
    return clock


def row_of(history: History, *names: str) -> list:
    history.tick()
    return [history.rows[-1].get(name) for name in names]


def test_rates_go_by_the_servers_own_clock_and_a_new_life_of_it_begins_anew(clock):
    history = History(["a", "b"], clock=clock)
    for address in "ab":
        history.take(address, answer(address, uptime=10, version=100, clock=50, taken=10, mean=1.0))
    assert row_of(history, "steps", "updates", "staleness") == [None, None, None]
    for address, steps in (("a", 60), ("b", 90)):
        history.take(address, answer(address, uptime=12, version=140, clock=steps, taken=20, mean=2.0))
    # Both servers took a part of every gradient.
    assert row_of(history, "steps", "updates", "staleness", "loss") == [5, 20, 3.0, {"w": 1.0}]

    history.take("b", "gone")
    history.take("a", answer("a", uptime=1, version=130, clock=5))
    assert row_of(history, "steps", "updates") == [None, None]
    clock.now += 2
    assert [(each["error"], each["silent_seconds"]) for each in history.to_json()["servers"]] == [("", 0), ("gone", 2)]
    history.take("b", answer("b", uptime=1, version=130))
    for address in "ab":
        history.take(address, "gone")
    shown = history.to_json()
    told = [("b", "lost", "b does not answer: gone"), ("b", "found", "b answers again")]
    assert [tuple(event[2:5]) for event in shown["events"]][:2] == told
    # What was known last is shown of a run whose servers have ended.
    assert (shown["version"], len(shown["workers"])) == (130, 1)


def test_rates_are_of_the_last_seconds_and_add_up_to_the_counts(clock):
    history = History(["a", "b"], clock=clock)
    for second in range(41):
        clock.now += 1
        for address in ("a", "b"):
            # A step every 0.8 s, and the servers' versions a moment apart; each gradient has two shards.
            steps = int((second + 0.2 * (address == "b")) / 0.8)
            given = answer(address, uptime=10 + second, version=steps, clock=steps)
            given.status.num_shards, given.status.pending_gradients = 2, 6 if address == "a" else 4
            history.take(address, given)
        history.tick()
    rows = history.rows[1:]
    assert all(row["steps"] == pytest.approx(1.25, abs=0.26) for row in rows[5:])
    for name in ("steps", "updates"):
        assert sum(row[name] for row in rows) == pytest.approx(50, rel=0.03)
    assert {row["queue"] for row in rows} == {3}

    # A server that comes back is sent much again.
    history.take("a", "gone")
    for uptime, steps in ((1.0, 0), (2.0, 5000), (3.0, 5001)):
        clock.now += 1
        history.take("a", answer("a", uptime=uptime, version=50, clock=steps))
        assert (row_of(history, "steps")[0] or 0.0) < 2


def test_time_waited_is_that_of_the_last_seconds(clock):
    history = History(["a"], clock=clock)
    workers = [pb.WorkerInfo(worker_id=name, state="alive") for name in "vw"]
    for second in range(30):
        clock.now += 1
        history.add_step("w", clock.now - 1, clock.now)
        if second < 20:
            history.add_wait("v", clock.now - 1, clock.now, ["w"])
        else:
            history.add_step("v", clock.now - 1, clock.now)
        history.take("a", Answer("a", pb.Status(state=3, uptime_seconds=second), workers))
        history.tick()
    assert [row["waited"] for row in history.rows[:20]] == [0.5] * 20
    assert [row["waited"] for row in history.rows[20:26]] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


def test_what_staleness_costs_is_of_the_gradients_since_the_last_change(clock):
    history = History(["a"], clock=clock)

    def shown(protocol: str, uptime: float, ages: dict[int, int], mean: float, lost: float) -> list:
        """Return the histogram, since when it is, and what the worker's gradients cost."""
        clock.now = 1000 + uptime
        buckets = [pb.StalenessHistogram.Bucket(staleness=age, count=count) for age, count in ages.items()]
        status = pb.Status(uptime_seconds=uptime, protocol=protocol, staleness="constant", roster=["v", "w"])
        count = sum(ages.values())
        tally = pb.Tally(pushes_applied=count, rate_scale_count=count, staleness_mean=mean, step_lost=lost)
        workers = [pb.WorkerInfo(worker_id="w", tally=tally)]
        history.take("a", Answer("a", status, workers, staleness=pb.StalenessHistogram(buckets=buckets)))
        found = history.to_json()
        [worker] = found["workers"]
        return [*map(found["staleness"].get, ("buckets", "since")), worker["staleness_mean"], worker["step_lost"]]

    assert shown("async", 1.0, {0: 10, 4: 10}, 2.0, 0.4) == [[[0, 10], [4, 10]], None, 2.0, 0.4]
    assert shown("hardsync", 2.0, {0: 10, 4: 10}, 2.0, 0.4) == [[], 1002.0, None, None]
    assert shown("hardsync", 3.0, {0: 30, 4: 10}, 1.0, 0.2) == [[[0, 20]], 1002.0, 0.0, 0.0]
    # A server that starts again counts anew.
    assert shown("hardsync", 0.5, {0: 1}, 0.0, 0.0) == [[[0, 1]], None, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "message", "told"),
    [
        ("left", "worker left: worker w, state failed, message it ended", ("failed", "w failed: it ended")),
        ("left", "worker left: worker w, state finished, message state failed", ("left", "w finished: state failed")),
        ("expired", "worker's lease ran out: worker w, silent 9", ("expired", "w's lease ran out: silent 9")),
        ("configured", "settings changed: protocol async", ("configured", "settings changed: protocol async")),
    ],
)
def test_who_failed_is_told_in_plain_words_and_from_who_left(kind, message, told):
    assert module.in_words(kind, message, "w") == told


def test_an_answer_has_what_came_since_or_everything(clock):
    history = History(["a"], clock=clock)
    for index in range(3):
        clock.now += 1
        history.add_step("w", clock.now - 1, clock.now)
        history.add_wait("v", clock.now - 1, clock.now, ["w"])
        history.add_event(clock.now, "a", "joined", f"{index}")
        history.add_row({"t": clock.now})
    whole = history.to_json()
    assert [len(whole[name]) for name in ("rows", "steps", "waits", "events")] == [3, 3, 3, 3]
    assert whole["waits"][0] == [2, "v", 1000.0, 1001.0, ["w"]]
    since = history.to_json(6, whole["id"])
    assert [entry[0] for entry in since["steps"] + since["waits"]] == [9, 10]
    answers = (whole, since, history.to_json(13), history.to_json(6, "another"))
    assert [each["whole"] for each in answers] == [True, False, True, True]

    clock.now += module.STEPS_SECONDS
    history.tick()
    assert [history.to_json(after)["whole"] for after in (5, 6)] == [True, False]
    assert history.to_json()["steps"] == [[9, "w", 1002.0, 1003.0, 0, "applied", "", 1]]


def test_a_day_is_kept_in_bounded_memory_and_its_beginning_is_thinner_than_its_end(clock):
    history = History(clock=clock)
    for second in range(100_000):
        history.add_row({"t": float(second), "steps": second % 2, "version": second, "loss": {"w": second % 2}})
    assert len(history.rows) <= module.ROWS_MAX
    times = [row["t"] for row in history.rows]
    assert times[-500:] == [*range(99_500, 100_000)]
    # An hour and a day ago.
    for ago, most in ((3600, 120), (90_000, 3000)):
        [gap] = [after - before for before, after in pairwise(times) if before <= 99_999 - ago < after]
        assert gap < most
    thin = history.rows[5]
    assert thin["steps"] == pytest.approx(0.5, abs=0.01) == thin["loss"]["w"] and thin["version"] == thin["t"]
    assert history.to_json(history.rows[0]["n"])["whole"]


def test_odd_numbers_and_words_of_workers_do_no_harm(clock):
    words, numbers = "\x1b[2J<b>\x07\u202e", (math.inf, math.nan, 1e300)
    history = History(["a"], clock=clock)
    infos = [
        pb.WorkerInfo(
            worker_id=f"{words}{number}", state="alive", message=words, scalars={"loss": number, words: number}
        )
        for number in numbers
    ]
    for uptime in (1.0, 2.0):
        status = pb.Status(state=99, uptime_seconds=uptime, protocol="of a newer server", warnings=[words])
        history.take("a", Answer("a", status, infos, events=[pb.Event(message=words, worker=words)]))
        history.add_step(words, 999.0, 1000.0)
        history.tick()
    history.take("a", words)
    text = json.dumps(history.to_json(), allow_nan=False, ensure_ascii=False)
    assert text.isprintable() and "?[2J<b>??" in text


def test_what_two_servers_tell_is_one_event_and_the_law_is_of_the_workers_that_there_were(clock):
    history = History(["a", "b"], clock=clock)
    joined = [pb.Event(number=1, age_seconds=1.0, kind="joined", message="worker joined: w", worker="w")]
    status = pb.Status(state=3, protocol="async", staleness="constant", roster=["v", "w"])
    for address in ("a", "b", "a"):
        history.take(address, Answer(address, status, events=joined))
        clock.now += 1
    # The second time at the same server it is another one.
    assert [event[2:4] for event in history.events] == [("a", "joined"), ("a", "joined")]
    for address in ("a", "b"):
        history.take(address, Answer(address, pb.Status(state=4)))
    assert history.to_json()["staleness"]["law"] == 1.0


def worker_of(state: str = "alive", **tally: float) -> pb.WorkerInfo:
    return pb.WorkerInfo(worker_id="w", state=state, tally=pb.Tally(**tally))


def test_gradients_that_wait_cost_no_step(clock):
    history = History(["a"], clock=clock)
    before, sync = (pb.Status(protocol=name, staleness="divide", roster="w") for name in ("async", "hardsync"))
    history.take("a", Answer("a", before, [worker_of(pushes_applied=100, rate_scale_count=100, step_lost=0.5)]))
    history.take("a", Answer("a", sync, [worker_of(pushes_applied=100, rate_scale_count=100, step_lost=0.5)]))
    more = worker_of(pushes_applied=101, pushes_pending=1, rate_scale_count=101, step_lost=50 / 101)
    history.take("a", Answer("a", sync, [more]))
    [worker] = history.to_json()["workers"]
    assert worker["step_lost"] == 0.0


def test_a_run_that_has_ended_keeps_what_held_it_back(clock):
    history = History(["a"], clock=clock)
    status = pb.Status(state=3, protocol="hardsync", staleness="none", uptime_seconds=1, roster=["v", "w"])
    workers = [pb.WorkerInfo(worker_id=name, state="alive") for name in "vw"]
    for second in range(8):
        clock.now += 1
        history.add_step("w", clock.now - 1, clock.now)
        history.add_step("v", clock.now - 1, clock.now - 0.75)
        history.add_wait("v", clock.now - 0.75, clock.now, ["w"])
        status.uptime_seconds = second
        history.take("a", Answer("a", status, workers))
        history.tick()
    at_work = history.verdict
    assert at_work.sentence.startswith("w is 4.0 times slower than the rest; under hardsync all wait for it")
    for worker in workers:
        worker.state = "finished"
    history.take("a", Answer("a", status, workers))
    assert history.verdict == (f"all workers have finished; before: {at_work.sentence}", "w")
    history.take("a", "connection refused")
    found = history.to_json()
    assert found["sentence"] == f"the run has ended, and its servers with it; before: {at_work.sentence}"
    assert found["state"] == "ended"
    assert [worker["slower"] for worker in found["workers"]] == [0.25, 4.0]


def test_a_step_between_two_waits_is_no_wait_before_it_is_listed(clock):
    history = History(["a"], clock=clock)
    for second in range(10):
        history.add_wait("v", clock.now + second, clock.now + second + 0.5, ["w"])
        if second < 9:
            history.add_step("v", clock.now + second + 0.5, clock.now + second + 1)
    clock.now += 10.5
    waiting = pb.WorkerInfo(worker_id="v", state="alive", waits_for=["w"])
    history.take("a", Answer("a", pb.Status(state=3, uptime_seconds=11), [waiting]))
    history.tick()
    assert history.rows[-1]["waited"] == pytest.approx(0.5, abs=0.06)


def test_checkpoints_and_refusals_are_events_and_a_score_has_its_examples(clock):
    history = History(["a"], clock=clock)
    for second, (checkpoint, refused) in enumerate([("", 0), ("c-1", 0), ("c-1", 3)]):
        tally = pb.Tally(pushes_rejected=refused)
        status = pb.Status(run_id="r", state=3, uptime_seconds=second, checkpoint=checkpoint, tally=tally)
        status.version_max, status.examples = second, 64 * second
        history.take("a", Answer("a", status))
        history.tick()
    history.add_score(1, {"accuracy": 0.5})
    assert [event[3:5] for event in history.events] == [
        ("checkpoint", "checkpoint written: c-1"),
        ("refused", "gradients refused: 3 pushed shards"),
    ]
    assert (history.rows[-1]["seen"], history.rows[-1]["score"]) == (64, {"accuracy": 0.5})


def test_figures_that_are_none_end_nothing(clock):
    history = History(["a"], clock=clock)
    step = {"worker_id": "w", "sequence": 1, "outcome": 1}
    wrong = [{"age_seconds": math.nan}, {"staleness": -1}, {"staleness": 2**62}]
    steps = [pb.Activity(**step, **each) for each in wrong]
    buckets = [pb.StalenessHistogram.Bucket(staleness=each, count=1) for each in (-5, 2**62)]
    status = pb.Status(state=3, protocol="async", staleness="divide_plus_one", roster="w", uptime_seconds=1)
    answer = Answer("a", status, [worker_of()], staleness=pb.StalenessHistogram(buckets=buckets), activity=steps)
    history.take("a", answer)
    history.tick()
    json.dumps(history.to_json(), allow_nan=False)
    assert len(history.steps) == 2
