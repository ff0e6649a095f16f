"""The plain sentence on what holds a run back now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pyps.core.protocols.paced import Serial, Ssp
from pyps.units import counted, in_seconds
from pyps.watch.answer import Answer, printable, waits_for, workers_of
from pyps.watch.recent import Figures, Recent
from pyps.watch.staleness import Expected
from pyps_wire import inspector_pb2 as pb

# Below these nothing is said: a wait that is no more than jitter, a speed that is about the same.
WAITED_LEAST, SLOWER_LEAST, LOST_LEAST, REFUSED_LEAST = 0.05, 1.2, 0.2, 0.1
NOBODY_MOST = 0.005
# A server's event loop is one thread; kernels take further ones.
BUSY_LEAST, BUSY_MOST = 0.9, 1.15
# Two heartbeats of a default server.
SILENT_SECONDS = 10.0
# A step takes long by both: seconds, and times its worker's median.
LONG_SECONDS, LONG_TIMES = 2.0, 5.0
STEPS_LEAST = 3


class Verdict(NamedTuple):
    """A sentence, and the worker that it is about; "" for none."""

    sentence: str
    worker: str = ""


def verdict(
    answers: Sequence[Answer], recent: Recent, *, silent: Mapping[str, float], busy: Mapping[str, float]
) -> Verdict:
    """Return what holds the run back now.

    Args:
        silent: Seconds by address of servers that do not answer.
        busy: Processor cores in use by address, where known.
    """
    found = next(_cases(answers, recent, silent, busy))
    return Verdict(printable(found.sentence), found.worker)


def _cases(
    answers: Sequence[Answer], recent: Recent, silent: Mapping[str, float], busy: Mapping[str, float]
) -> Iterator[Verdict]:
    """Yield all that may be said, the weightiest first."""
    states = {answer.state for answer in answers}
    if states & {"finished", "draining"}:
        version = max(answer.status.version_max for answer in answers)
        yield Verdict(f"the run {'is finished' if 'finished' in states else 'ends'}, at version {version:,}")
    for address, seconds in silent.items():
        since = f"has not answered for {in_seconds(seconds)}" if seconds >= 1 else "does not answer"
        yield Verdict(f"server {address} {since}: if it is gone, every worker waits for it")
    if not answers:
        yield Verdict("no server has answered yet")
        return
    if states == {"standby"}:
        yield Verdict("only a standby answers: another server serves the run")
    if not states & {"ready", "finished", "draining"}:
        coming = "initializing" in states
        yield Verdict("the run waits for its first parameters" if coming else "no run yet: a worker starts it")
    expected, status = Expected(answers[0].status), answers[0].status
    protocol = status.warmup if status.warming_up else status.protocol
    workers = workers_of(answers)
    alive = [name for name, known in workers.items() if known[0].state == "alive"]
    waiting = [others for known in workers.values() if (others := waits_for(known))]
    missing = status.workers_missing
    if missing and (waiting or (expected.protocol is not None and expected.protocol.barrier)):
        have = "has" if missing == 1 else "have"
        yield Verdict(f"the run waits for {counted(missing, 'worker')} that {have} not pushed yet")
    if not alive:
        finished = {known[0].state for known in workers.values()} == {"finished"}
        yield Verdict("all workers have finished" if finished else "no worker is alive: the run waits for one")
    if expected.protocol is not None and expected.protocol.coordinated:
        work = answers[0].work
        portions = f"{work.done:,} of {counted(work.num_portions, 'portion')}"
        yield Verdict(f"under {protocol} a coordinator leads: {portions} of this pass are done")
    for name, count in Counter(chain(*waiting)).most_common():
        if name in workers:
            yield from _held_up(name, workers[name][0], recent.workers.get(name), f"{_wait(count)} for {name}")
    if not recent.num_steps:
        yield Verdict(f"{counted(len(alive), 'worker')} alive, and no gradient in the last minute")
    few = "" if recent.num_steps >= STEPS_LEAST * len(alive) else f"so far ({counted(recent.num_steps, 'gradient')}): "
    slowest = max(recent.workers, key=lambda name: recent.workers[name].slower or 0.0)
    if len(alive) > 1:
        yield from (
            Verdict(few + found.sentence, found.worker) for found in _waits(workers, recent, expected, protocol)
        )
    for address, cores in busy.items():
        if BUSY_LEAST <= cores <= BUSY_MOST:
            yield Verdict(f"server {address} is always busy ({cores:.2f} cores): workers may wait for its answers")
    share = recent.share_waited()
    nobody = "nobody waits" if share < NOBODY_MOST else f"workers wait {share:.0%} of their time"
    found = _costs(recent, expected, protocol, slowest, nobody)
    yield from (Verdict(few + each.sentence, each.worker) for each in found)
    if len(alive) > 1 and _is_slow(recent.workers[slowest]):
        words = f"{nobody} for {slowest}, which is {_slower(recent, slowest)}"
        yield Verdict(f"{few}nothing holds the run back: {words}", slowest)
    yield Verdict(f"{few}nothing holds the run back" + (f": {nobody}" if len(alive) > 1 else ""))


def _held_up(name: str, info: pb.WorkerInfo, figures: Figures | None, who_waits: str) -> Iterator[Verdict]:
    """Yield why others wait for a worker now, if that is no step like its others."""
    if info.state != "alive":
        yield Verdict(f"{who_waits}, which is gone ({info.state})", name)
    elif info.silent_seconds >= SILENT_SECONDS:
        yield Verdict(f"{who_waits}, which has been silent for {in_seconds(info.silent_seconds)}", name)
    elif figures is None or figures.seconds is None:
        yield Verdict(f"{who_waits}, of which no gradient has come yet", name)
    elif figures.idle >= max(LONG_SECONDS, LONG_TIMES * figures.seconds):
        yield Verdict(f"{who_waits}, whose step has taken {in_seconds(figures.idle)} so far", name)


def _waits(
    workers: Mapping[str, Sequence[pb.WorkerInfo]], recent: Recent, expected: Expected, protocol: str
) -> Iterator[Verdict]:
    """Yield what is to be said of waits for other workers."""
    share = recent.share_waited()
    if share < WAITED_LEAST:
        return
    if isinstance(expected.protocol, Serial):
        yield Verdict(f"under {protocol} one worker computes at a time: workers wait for their turn {_part(share)}")
    waited = sum(figures.waited for figures in recent.workers.values())
    name = max(recent.waited_for, key=recent.waited_for.__getitem__, default="")
    for_it, of_others = recent.waited_for[name] / waited, _part(recent.share_waited(without=name))
    if name in workers and for_it >= 0.5:
        info, figures = workers[name][0], recent.workers[name]
        if info.state != "alive":
            yield Verdict(f"others waited for {name}, which is gone ({info.state}): {of_others} lately", name)
        elif _is_slow(figures):
            lead = "all"
            if isinstance(expected.protocol, Ssp) and expected.protocol.s:
                lead = f"the others, at most {counted(expected.protocol.s, 'step')} ahead,"
            yield Verdict(f"{name} is {_slower(recent, name)}; under {protocol} {lead} wait for it: {of_others}", name)
        elif for_it >= 0.8 and len(workers) > 2:
            why = "though most of its steps take no longer than theirs"
            yield Verdict(f"under {protocol} the others wait for {name}, {why}: {of_others}", name)
    yield Verdict(f"under {protocol} workers wait for one another {_part(share)}; none is much slower than the rest")


def _costs(recent: Recent, expected: Expected, protocol: str, slowest: str, nobody: str) -> Iterator[Verdict]:
    """Yield what is to be said of gradients that were refused, or taken in part."""
    steps = [step for figures in recent.workers.values() for step in figures.steps]
    refused = Counter(step.worker for step in steps if step.outcome == "rejected")
    if (count := sum(refused.values())) >= REFUSED_LEAST * len(steps):
        name, most = refused.most_common(1)[0]
        whose, about = "", ""
        if most > count / 2 and len(recent.workers) > 1:
            slower = f", which is {_slower(recent, name)}" if _is_slow(recent.workers[name]) else ""
            whose, about = f", most of them {name}'s{slower}", name
        yield Verdict(f"{count / len(steps):.0%} of the gradients are refused under {protocol}{whose}", about)
    if (policy := expected.policy) is None or len(recent.workers) < 2:
        return
    lost = expected.lost(policy, Counter(step.staleness for step in steps))
    if lost < LOST_LEAST:
        return
    of_it = expected.lost(policy, Counter(step.staleness for step in recent.workers[slowest].steps))
    words = f"{nobody}; staleness takes {lost:.0%} of the steps under {policy.text}"
    if _is_slow(recent.workers[slowest]) and of_it > lost:
        yield Verdict(f"{words}, {slowest}'s {of_it:.0%}: it is {_slower(recent, slowest)}", slowest)
    yield Verdict(words)


def _is_slow(figures: Figures) -> bool:
    return (figures.slower or 0.0) >= SLOWER_LEAST


def _slower(recent: Recent, name: str) -> str:
    return f"{recent.workers[name].slower or 0.0:.1f} times slower than the rest"


def _part(share: float) -> str:
    return f"{share:.0%} of their time"


def _wait(count: int) -> str:
    return "1 worker waits" if count == 1 else f"{count} workers wait"
