"""The plain sentence on what holds a run back now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pyps.units import counted, in_seconds
from pyps.watch.answer import Answer, waits_for, workers_of
from pyps.watch.recent import Recent, Step, long_seconds
from pyps.watch.staleness import Expected
from pyps_wire import inspector_pb2 as pb

# Below these nothing is said: a wait that is no more than jitter, a speed that is about the same.
WAITED_LEAST, SLOWER_LEAST, LOST_LEAST, REFUSED_LEAST = 0.05, 1.2, 0.2, 0.1
# Of one worker's gradients.
REFUSED_ALONE = 0.8
NOBODY_MOST = 0.005
# A server's event loop is one thread; kernels take further ones.
BUSY_LEAST, BUSY_MOST = 0.9, 1.15
# Two heartbeats of a default server.
SILENT_SECONDS = 10.0
STEPS_LEAST = 3
LOST = ("failed", "expired")
# Of a run that no server serves yet.
NOT_STARTED = {
    "initializing": "the run waits for its first parameters",
    "empty": "no run yet: a worker starts it",
    "standby": "only a standby answers: another server serves the run",
}


class Verdict(NamedTuple):
    """A sentence, and the worker that it is about; "" for none."""

    sentence: str
    worker: str = ""


def verdicts(
    answers: Sequence[Answer], recent: Recent, *, silent: Mapping[str, float], busy: Mapping[str, float]
) -> Iterator[Verdict]:
    """Yield what may be said of what holds the run back now, the weightiest first.

    Of servers, by address: `silent` since so many seconds, `busy` with so many processor cores.
    """
    states = {answer.state for answer in answers}
    if states & {"finished", "draining"}:
        yield Verdict("the run is finished" if "finished" in states else "the run ends")
    if silent:
        seconds = max(silent.values())
        # A server without shards is missed by nobody.
        goes_on = any(figures.idle < seconds - 1 for figures in recent.workers.values())
        means = "steps go on" if goes_on else "every worker waits for a server that is gone"
        yield Verdict(f"no answer from {' and '.join(silent)} for {in_seconds(seconds)}: {means}")
    if not answers:
        yield Verdict("no server has answered yet")
        return
    yield from (Verdict(words) for state, words in NOT_STARTED.items() if state in states and "ready" not in states)
    expected, status, workers = Expected(answers[0].status), answers[0].status, workers_of(answers)
    protocol = expected.protocol.text if expected.protocol else status.protocol
    alive = [name for name, known in workers.items() if known[0].state == "alive"]
    waited_for = Counter(name for known in workers.values() for name in waits_for(known))
    if status.workers_missing and (waited_for or (expected.protocol and expected.protocol.barrier)):
        yield Verdict(f"the run waits for the first gradients of {counted(status.workers_missing, 'worker')}")
    if not alive:
        ends = {known[0].state for known in workers.values()}
        yield Verdict(f"all workers have {ends.pop()}" if len(ends) == 1 else "no worker is alive")
    if expected.protocol and expected.protocol.coordinated:
        yield Verdict(f"under {protocol} a coordinator leads the workers")
    for name, [info, *_] in workers.items():
        yield from _held_up(name, info, recent, waited_for[name])
    if not recent.num_steps:
        within = in_seconds(recent.seconds)
        yield Verdict(f"{counted(len(alive), 'worker')} alive, and no gradient in the last {within}")
    in_force: dict[tuple[str, str], str] = {}
    for answer in answers:
        # One without a run has settings for the next.
        if answer.state == "ready":
            in_force.setdefault((answer.status.protocol, answer.status.staleness), answer.address)
    if len(in_force) > 1:
        words = ", ".join(f"{address} goes by {' and '.join(filter(None, each))}" for each, address in in_force.items())
        yield Verdict(f"the servers differ: {words}; set one protocol for all")
    few = "" if recent.num_steps >= STEPS_LEAST * len(alive) else f"so far ({counted(recent.num_steps, 'gradient')}): "
    gone = [f"; {name} is gone ({known[0].state})" for name, known in workers.items() if known[0].state in LOST]
    if few and recent.num_steps < len(alive):
        yield Verdict(
            f"little is known yet: {counted(recent.num_steps, 'gradient')} of {counted(len(alive), 'worker')}"
        )
    for found in _of_steps(recent, expected, protocol, busy, is_alone=len(alive) == 1, gone="".join(gone[:1])):
        yield found._replace(sentence=few + found.sentence)


def _held_up(name: str, info: pb.WorkerInfo, recent: Recent, num_waiting: int) -> Iterator[Verdict]:
    """Yield why others wait for a worker now, if that is no step like its others; and that it is silent."""
    waiting = "1 worker waits" if num_waiting == 1 else f"{num_waiting} workers wait"
    who, figures = f"{waiting} for {name}, which" if num_waiting else name, recent.workers.get(name)
    if info.state != "alive":
        yield from [Verdict(f"{who} is gone ({info.state})", name)] * bool(num_waiting)
    elif info.silent_seconds >= SILENT_SECONDS:
        yield Verdict(f"{who} has been silent for {in_seconds(info.silent_seconds)}", name)
    elif num_waiting and figures and figures.idle >= long_seconds(figures.seconds):
        yield Verdict(f"{who} has been at one step for {in_seconds(figures.idle)}", name)


def _of_steps(
    recent: Recent, expected: Expected, protocol: str, busy: Mapping[str, float], *, is_alone: bool, gone: str
) -> Iterator[Verdict]:
    """Yield what the newest steps and waits say."""
    slowest = max(recent.workers, key=lambda name: recent.workers[name].slower or 0.0)
    times, share = recent.workers[slowest].slower or 0.0, recent.share_waited()
    is_slow, slower = times >= SLOWER_LEAST, f"{times:.1f} times slower than the rest"
    part = f"{share:.0%} of the workers' time"
    nobody = "nobody waits" if share < NOBODY_MOST else f"workers wait {part}"

    steps = {name: figures.steps for name, figures in recent.workers.items() if figures.steps}
    refused = {name: sum(step.outcome == "rejected" for step in each) / len(each) for name, each in steps.items()}
    name = max(refused, key=lambda each: refused[each])
    of_all = sum(refused[each] * len(steps[each]) for each in steps) / recent.num_steps
    if of_all >= REFUSED_LEAST or (refused[name] >= REFUSED_ALONE and len(steps[name]) >= STEPS_LEAST):
        words = f"under {protocol} {of_all:.0%} of the gradients are refused, {refused[name]:.0%} of {name}'s"
        is_it = is_slow and name == slowest
        yield Verdict(f"{words}: it is {slower}" if is_it else words, name if is_it else "")
    if share >= WAITED_LEAST and not is_alone:
        if is_slow and recent.waited_for[slowest] >= max(recent.waited_for.values(), default=math.inf) / 2:
            yield Verdict(f"{slowest} is {slower}; under {protocol} all wait for it: {part}", slowest)
        yield Verdict(f"under {protocol} workers wait for one another {part}")
    for address, cores in busy.items():
        if BUSY_LEAST <= cores <= BUSY_MOST:
            yield Verdict(f"server {address} is always busy ({cores:.2f} cores): workers may wait for its answers")
    lost = _lost(expected, [step for each in steps.values() for step in each])
    if expected.policy and lost >= LOST_LEAST and not is_alone:
        words, of_it = f"{nobody}; staleness takes {lost:.0%} of the steps under {expected.policy.text}", 0.0
        if is_slow and (of_it := _lost(expected, steps[slowest])) > lost:
            yield Verdict(f"{words}, {slowest}'s {of_it:.0%}: it is {slower}", slowest)
        yield Verdict(words)
    if is_slow and not is_alone:
        yield Verdict(f"nothing holds the run back: {nobody} for {slowest}, which is {slower}{gone}", slowest)
    yield Verdict(f"nothing holds the run back{'' if is_alone else f': {nobody}'}{gone}")


def _lost(expected: Expected, steps: Sequence[Step]) -> float:
    """Return the share of the steps that the policy in force takes for their staleness."""
    ages = Counter(step.staleness for step in steps if step.outcome != "rejected")
    return expected.lost(expected.policy, ages)
