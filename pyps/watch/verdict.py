"""The plain sentence on what holds a run back now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pyps.core.protocols.paced import Serial, Ssp
from pyps.units import counted, in_seconds
from pyps.watch.answer import Answer, waits_for, workers_of
from pyps.watch.recent import Figures, Recent
from pyps.watch.staleness import Expected
from pyps_wire import inspector_pb2 as pb

# Below these nothing is said: a wait that is no more than jitter, a speed that is about the same.
WAITED_LEAST, SLOWER_LEAST, LOST_LEAST, REFUSED_LEAST = 0.05, 1.2, 0.2, 0.1
REFUSED_ALONE = 0.8
NOBODY_MOST = 0.005
# A server's event loop is one thread; kernels take further ones.
BUSY_LEAST, BUSY_MOST = 0.9, 1.15
# Two heartbeats of a default server.
SILENT_SECONDS = 10.0
# A step takes long by both: seconds, and times its worker's median.
LONG_SECONDS, LONG_TIMES = 2.0, 5.0
STEPS_LEAST = 3
LOST = ("failed", "expired")


class Verdict(NamedTuple):
    """A sentence, and the worker that it is about; "" for none."""

    sentence: str
    worker: str = ""


def verdicts(
    answers: Sequence[Answer], recent: Recent, *, silent: Mapping[str, float], busy: Mapping[str, float]
) -> Iterator[Verdict]:
    """Yield what may be said of what holds the run back now, the weightiest first.

    Args:
        silent: Seconds by address of servers that do not answer.
        busy: Processor cores in use by address, where known.
    """
    states = {answer.state for answer in answers}
    if states & {"finished", "draining"}:
        version = max(answer.status.version_max for answer in answers)
        yield Verdict(f"the run {'is finished' if 'finished' in states else 'ends'}, at version {version:,}")
    if silent:
        do, seconds = "does not answer" if len(silent) == 1 else "do not answer", max(silent.values())
        since = f" since {in_seconds(seconds)}" if seconds >= 1 else ""
        # A server without shards is missed by nobody.
        goes_on = any(figures.idle < seconds - 1 for figures in recent.workers.values())
        means = "steps go on" if goes_on else "every worker waits for a server that is gone"
        yield Verdict(f"{' and '.join(silent)} {do}{since}: {means}")
    if not answers:
        yield Verdict("no server has answered yet")
        return
    if states == {"standby"}:
        yield Verdict("only a standby answers: another server serves the run")
    if not states & {"ready", "finished", "draining"}:
        coming = "initializing" in states
        yield Verdict("the run waits for its first parameters" if coming else "no run yet: a worker starts it")
    expected, status = Expected(answers[0].status), answers[0].status
    protocol = expected.protocol.text if expected.protocol else status.protocol
    protocol += " (the warm-up)" * status.warming_up
    workers = workers_of(answers)
    alive = [name for name, known in workers.items() if known[0].state == "alive"]
    waiting = [others for known in workers.values() if (others := waits_for(known))]
    missing = status.workers_missing
    if missing and (waiting or (expected.protocol is not None and expected.protocol.barrier)):
        have = "has" if missing == 1 else "have"
        yield Verdict(f"the run waits for {counted(missing, 'worker')} that {have} not pushed yet")
    if not alive:
        ends = {known[0].state for known in workers.values()}
        ended = f"all workers have {next(iter(ends))}" if ends in ({"finished"}, {"failed"}) else "no worker is alive"
        yield Verdict(ended if ends == {"finished"} else f"{ended}: the run waits for one")
    if expected.protocol is not None and expected.protocol.coordinated:
        work = answers[0].work
        portions = f"{work.done:,} of {counted(work.num_portions, 'portion')}"
        yield Verdict(f"under {protocol} a coordinator leads: {portions} of this pass are done")
    for name, count in Counter(chain(*waiting)).most_common():
        if name in workers:
            yield from _held_up(name, workers[name][0], recent.workers.get(name), f"{_wait(count)} for {name}")
    if not recent.num_steps:
        yield Verdict(
            f"{counted(len(alive), 'worker')} alive, and no gradient in the last {in_seconds(recent.seconds)}"
        )
    few = "" if recent.num_steps >= STEPS_LEAST * len(alive) else f"so far ({counted(recent.num_steps, 'gradient')}): "
    slowest = max(recent.workers, key=lambda name: recent.workers[name].slower or 0.0)
    share = recent.share_waited()
    nobody = "nobody waits" if share < NOBODY_MOST else f"workers wait {_part(share)}"
    found = list(_refused(recent, protocol, alone=True))
    if len(alive) > 1:
        found += _waits(recent, expected, protocol, slowest)
    for address, cores in busy.items():
        if BUSY_LEAST <= cores <= BUSY_MOST:
            words = f"server {address} is always busy ({cores:.2f} cores): workers may wait for its answers"
            found.append(Verdict(words))
    for name, [info, *_] in workers.items():
        if info.state == "alive" and info.silent_seconds >= SILENT_SECONDS:
            found.append(Verdict(f"{name} has been silent for {in_seconds(info.silent_seconds)}", name))
    found += [*_refused(recent, protocol), *_stale(recent, expected, slowest, nobody)]
    least = "nothing holds the run back"
    if len(alive) > 1 and _is_slow(recent, slowest):
        found.append(Verdict(f"{least}: {nobody} for {slowest}, which is {_slower(recent, slowest)}", slowest))
    gone = next((name for name, known in workers.items() if known[0].state in LOST), "")
    also = f"; {gone} is gone ({workers[gone][0].state})" if gone else ""
    found.append(Verdict(least + (f": {nobody}" if len(alive) > 1 else "") + also, gone))
    yield from (Verdict(few + each.sentence, each.worker) for each in found)


def _held_up(name: str, info: pb.WorkerInfo, figures: Figures | None, who_waits: str) -> Iterator[Verdict]:
    """Yield why others wait for a worker now, if that is no step like its others."""
    if info.state != "alive":
        yield Verdict(f"{who_waits}, which is gone ({info.state})", name)
    elif info.silent_seconds >= SILENT_SECONDS:
        yield Verdict(f"{who_waits}, which has been silent for {in_seconds(info.silent_seconds)}", name)
    elif figures is not None and figures.idle >= max(LONG_SECONDS, LONG_TIMES * (figures.seconds or 0.0)):
        yield Verdict(f"{who_waits}, whose step has taken {in_seconds(figures.idle)} so far", name)


def _waits(recent: Recent, expected: Expected, protocol: str, slowest: str) -> Iterator[Verdict]:
    """Yield what is to be said of waits for other workers."""
    share = recent.share_waited()
    if share < WAITED_LEAST:
        return
    if isinstance(expected.protocol, Serial):
        yield Verdict(f"under {protocol} one worker computes at a time: workers wait for their turn {_part(share)}")
    if _is_slow(recent, slowest):
        if recent.waited_for[slowest] >= max(recent.waited_for.values()) / 2:
            lead = "all"
            if isinstance(expected.protocol, Ssp) and expected.protocol.s:
                lead = f"the others, at most {counted(expected.protocol.s, 'step')} ahead,"
            words = f"under {protocol} {lead} wait for it: {_part(share)}"
            yield Verdict(f"{slowest} is {_slower(recent, slowest)}; {words}", slowest)
        yield Verdict(f"under {protocol} workers wait for one another {_part(share)}")
    yield Verdict(f"under {protocol} workers wait for one another {_part(share)}; none is much slower than the rest")


def _refused(recent: Recent, protocol: str, *, alone: bool = False) -> Iterator[Verdict]:
    """Yield what is to be said of gradients that were refused; `alone`: of a worker that nearly only has such."""
    all_steps = {name: figures.steps for name, figures in recent.workers.items() if figures.steps}
    refused = Counter(step.worker for steps in all_steps.values() for step in steps if step.outcome == "rejected")
    if not refused or (len(all_steps) < 2 and alone):
        return
    name = max(refused, key=lambda each: (refused[each] / len(all_steps[each]), refused[each]))
    share, slower = refused[name] / len(all_steps[name]), ""
    if _is_slow(recent, name):
        slower = f": it is {_slower(recent, name)}"
    if alone and share >= REFUSED_ALONE and refused[name] >= STEPS_LEAST:
        yield Verdict(f"under {protocol} {share:.0%} of {name}'s gradients are refused{slower}", name)
    of_all = refused.total() / recent.num_steps
    if not alone and of_all >= REFUSED_LEAST:
        yield Verdict(f"under {protocol} {of_all:.0%} of the gradients are refused")


def _stale(recent: Recent, expected: Expected, slowest: str, nobody: str) -> Iterator[Verdict]:
    """Yield what is to be said of gradients that were taken in part."""
    if (policy := expected.policy) is None or len(recent.workers) < 2:
        return
    ages = {
        name: Counter(step.staleness for step in figures.steps if step.outcome != "rejected")
        for name, figures in recent.workers.items()
    }
    if (lost := expected.lost(policy, sum(ages.values(), Counter()))) < LOST_LEAST:
        return
    of_it = expected.lost(policy, ages[slowest])
    words = f"{nobody}; staleness takes {lost:.0%} of the steps under {policy.text}"
    if _is_slow(recent, slowest) and of_it > lost:
        yield Verdict(f"{words}, {slowest}'s {of_it:.0%}: it is {_slower(recent, slowest)}", slowest)
    yield Verdict(words)


def _is_slow(recent: Recent, name: str) -> bool:
    return (recent.workers[name].slower or 0.0) >= SLOWER_LEAST


def _slower(recent: Recent, name: str) -> str:
    return f"{recent.workers[name].slower or 0.0:.1f} times slower than the rest"


def _part(share: float) -> str:
    return f"{share:.0%} of the workers' time"


def _wait(count: int) -> str:
    return "1 worker waits" if count == 1 else f"{count} workers wait"
