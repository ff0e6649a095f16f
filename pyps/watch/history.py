"""What is known of a run over time: kept in bounded memory, given as JSON."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from threading import RLock
from typing import Any

from pyps.control import not_named
from pyps.watch import answer as of
from pyps.watch.answer import Answer, merged, waits_for, workers_of
from pyps.watch.recent import Figures, Recent, Step, Wait
from pyps.watch.staleness import Expected
from pyps.watch.verdict import Verdict, verdicts
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb

ROWS_MAX = 2048
STEPS_MAX = 50_000
STEPS_SECONDS = 900.0
EVENTS_MAX = 2000
SAME_EVENT_SECONDS, SAME_EVENT_AMONG = 10.0, 300
# Rates are of so many seconds: a worker's count of steps goes up by whole ones.
RATE_SECONDS = 5.0
# What came before one of these tells nothing of now; a change of the settings is one too.
TURNS = frozenset(("failed", "expired", "found"))
# Workers whose losses rows have; of more the first by name.
LOSSES_MAX = 64
# What a thinner row takes from its newest; of other numbers it has the mean.
LATEST = ("version", "seen", "alive", "score")
# Kinds of memory, and their fields in an answer.
MEMORY = {name: name for name in ("parameters", "slots", "shared")} | {"waiting": "pending", "in flight": "in_flight"}
Key = str | tuple[str, str]


@dataclass
class Server:
    """One server: its last answer or error, and what it counted a second between its last two answers."""

    address: str
    answer: Answer | None = None
    error: str = ""
    # Times of day: when this life of it began, and since when it has not answered.
    began: float = math.nan
    silent_since: float = math.nan
    # Its answer right after the last change of protocol or policy in this life, and when that was.
    base: Answer | None = None
    since: float | None = None
    # By worker its counts since then.
    tallies: Mapping[str, pb.Tally] = field(default_factory=dict)
    skipped: int = 0
    rates: Mapping[Key, float] = field(default_factory=dict)
    # Its uptime and counts in the last seconds; none before it has settled.
    _samples: deque[tuple[float, Mapping[Key, float]]] = field(default_factory=deque)
    _settles: float = -math.inf

    def take(self, answer: Answer, now: float) -> None:
        before, was_silent, self.answer, self.error = self.answer, bool(self.error), answer, ""
        uptime, now_counted = answer.status.uptime_seconds, counts(answer)
        self.skipped += answer.skipped
        lives_on = before is not None and 0 <= uptime - before.status.uptime_seconds < math.inf
        if not lives_on:
            self.began, self.base, self.since = now - uptime, None, None
        if before is not None and (was_silent or not lives_on):
            # What workers send again is no speed of theirs.
            self._settles = now + RATE_SECONDS
        told = any(_is_change(event.kind, event.message) for event in answer.events)
        if told if before is None else lives_on and _is_other(before, answer):
            self.base, self.since = answer, now
        then = {each.worker_id: each.tally for each in self.base.workers} if self.base else {}
        self.tallies = {
            each.worker_id: of.difference(each.tally, then.get(each.worker_id, pb.Tally())) for each in answer.workers
        }
        if not lives_on or now < self._settles:
            self._samples.clear()
        self._samples.append((uptime, now_counted))
        while len(self._samples) > 2 and self._samples[1][0] <= uptime - RATE_SECONDS:
            self._samples.popleft()
        # Who has just come brings counts from before.
        first = {key: (at, count) for at, kept in reversed(self._samples) for key, count in kept.items()}
        spans = {key: (uptime - first[key][0], count - first[key][1]) for key, count in now_counted.items()}
        self.rates = {key: max(0.0, count) / seconds for key, (seconds, count) in spans.items() if seconds > 0}

    @property
    def ages(self) -> Counter[int]:
        """The gradients since then by staleness."""
        answer, base = self.answer or Answer(self.address, pb.Status()), self.base or Answer(self.address, pb.Status())
        return Counter(_buckets(answer)) - Counter(_buckets(base))


class History:
    """The answers of all servers of a run over time, or what a log has of it. Used from any thread."""

    def __init__(self, addresses: Sequence[str] = (), *, live: bool = True, clock: Callable[[], float] = time.time):
        self.id = secrets.token_hex(4)
        # What `to_json` gives in place of what it makes of answers.
        self.facts: dict[str, Any] = {}
        self._live, self._clock = live, clock
        self._lock = RLock()
        # Guarded by _lock.
        self.servers = {address: Server(address) for address in addresses}
        self.rows: list[dict[str, Any]] = []
        self.steps: deque[Step] = deque()
        self.waits: deque[Wait] = deque()
        # Number, time of day, server, kind, message, worker.
        self.events: deque[tuple[int, float, str, str, str, str]] = deque()
        self._number = 0
        # The largest number of what is no longer kept as it was.
        self._forgotten = 0
        # By worker the server whose list of steps is taken, and the end of the last one.
        self._sources: dict[str, tuple[str, float]] = {}
        self._judged: tuple[Recent, Verdict] | None = None
        # The newest status with workers: what the law says of a run whose workers have left.
        self._staffed: pb.Status | None = None
        # When what came before stopped to tell of now.
        self._turns: deque[float] = deque(maxlen=EVENTS_MAX)

    def take(self, address: str, answer: Answer | str) -> None:
        """Take one server's answers, with the events, steps and waits since the last ones; or why it gave none."""
        with self._lock:
            server, now = self.servers[address], self._clock()
            self._judged = None
            if isinstance(answer, str):
                if not server.error:
                    self.add_event(now, address, "lost", f"{address} does not answer: {answer}")
                    server.silent_since = now
                server.error, server.rates = answer, {}
                return
            if server.error:
                self.add_event(now, address, "found", f"{address} answers again")
            if self._live and server.answer and _is_other(server.answer, answer):
                self._turns.append(now)
            server.take(answer, now)
            if answer.status.roster:
                self._staffed = answer.status
            for event in answer.events:
                self.add_event(now - event.age_seconds, address, event.kind, event.message, event.worker)
            for each in answer.activity:
                self._take_activity(address, each, now)

    def _take_activity(self, address: str, each: pb.Activity, now: float) -> None:
        ended = now - each.age_seconds
        source, last = self._sources.get(each.worker_id, (address, -math.inf))
        # Several servers list the same steps, a moment apart.
        order = list(self.servers)
        goes_before = order.index(source) < order.index(address) and not self.servers[source].error
        if source != address and (goes_before or ended - each.seconds / 2 < last):
            return
        self._sources[each.worker_id] = (address, ended)
        if not each.sequence:
            self.add_wait(each.worker_id, ended - each.seconds, ended, waited_for=tuple(each.waited_for))
            return
        facts = {
            "outcome": _name(common.Outcome, each.outcome),
            "staleness": max(0, each.staleness),
            "updates": each.updates,
        }
        reason = _name(common.Reason, each.reason) if each.reason else ""
        self.add_step(each.worker_id, ended - each.seconds, ended, reason=reason, **facts)

    def add_step(self, worker: str, began: float, ended: float, **facts: Any) -> None:
        """Add a step with the further facts of a `Step`; times are of day."""
        self._add(self.steps, Step, worker, began, ended, facts)

    def add_wait(self, worker: str, began: float, ended: float, waited_for: Sequence[str]) -> None:
        self._add(self.waits, Wait, worker, began, ended, {"waited_for": waited_for})

    def add_event(self, at: float, address: str, kind: str, message: str, worker: str = "") -> None:
        """Add an event, in plain words; what several servers tell, each at its own time, once."""
        with self._lock:
            at = round(at, 3) if 0 <= at < math.inf else self._clock()
            kind, message = in_words(kind, message, worker)
            if any(
                each[2] != address and each[3:] == (kind, message, worker) and abs(each[1] - at) < SAME_EVENT_SECONDS
                for each in islice(reversed(self.events), SAME_EVENT_AMONG)
            ):
                return
            if kind in TURNS or _is_change(kind, message):
                self._turns.append(at)
            self._append(self.events, (self._next(), at, address, kind, message, worker), EVENTS_MAX)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the figures of an interval, which ends at `row["t"]`; thin the earlier ones if there are too many."""
        with self._lock:
            self.rows.append({"n": self._next(), **row})
            if len(self.rows) > ROWS_MAX:
                self.rows = _thinned(self.rows)
                self._forgotten = self.rows[-1]["n"]

    def tick(self) -> None:
        """End an interval: append its row, forget what is too old."""
        with self._lock:
            now = self._clock()
            self._judged = None
            if answers := self.answers:
                self.add_row({"t": round(now, 3), **self._row(answers)})
            if self._live:
                for kept in (self.steps, self.waits):
                    while kept and kept[0].ended < now - STEPS_SECONDS:
                        self._forgotten = max(self._forgotten, kept.popleft().n)

    @property
    def answers(self) -> list[Answer]:
        """Return the last answers of the servers that answer."""
        return [server.answer for server in self.servers.values() if server.answer and not server.error]

    @property
    def verdict(self) -> Verdict:
        """What holds the run back now."""
        return self._judge()[1]

    def to_json(self, after: int = 0, id: str = "") -> dict[str, Any]:
        """Return the present state, and what was added after that number; all that is kept for 0 or an unknown one."""
        with self._lock:
            whole = after <= 0 or not self._forgotten <= after <= self._number or id not in ("", self.id)
            since = 0 if whole else after
            rows = [row for row in self.rows if row["n"] > since]
            return {
                **_clean({**self._head(), **self.facts, "rows": rows}),
                "number": self._number,
                "whole": whole,
                "id": self.id,
                "live": self._live,
                "steps": [[step.n, _shown(step.worker), *step[2:]] for step in _newer(self.steps, since)],
                "waits": _clean(_newer(self.waits, since)),
                "events": _clean(_newer(self.events, since)),
            }

    # What follows is called under the lock.

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _add(self, kept: deque[Any], kind: Any, worker: str, began: float, ended: float, facts: Any) -> None:
        with self._lock:
            if math.isfinite(began + ended):
                self._append(kept, kind(self._next(), worker, round(began, 3), round(ended, 3), **facts), STEPS_MAX)

    def _append(self, kept: deque[Any], entry: Any, most: int) -> None:
        kept.append(entry)
        if len(kept) > most:
            self._forgotten = max(self._forgotten, kept.popleft()[0])

    def _judge(self) -> tuple[Recent, Verdict]:
        with self._lock:
            if self._judged is None:
                now, answers = self._clock(), self.answers
                since = max((at for at in self._turns if at <= now), default=-math.inf)
                recent = Recent(answers, reversed(self.steps), reversed(self.waits), now=now, since=since)
                silent = {each.address: now - each.silent_since for each in self.servers.values() if each.error}
                busy = {each.address: each.rates.get("cpu", 0.0) for each in self.servers.values()}
                found = next(verdicts(answers, recent, silent=silent, busy=busy))
                self._judged = recent, found._replace(sentence=_shown(found.sentence))
            return self._judged

    def _rate(self, key: Key) -> float | None:
        """Return what each server counts a second, as the first one says that answers."""
        return next((server.rates[key] for server in self.servers.values() if key in server.rates), None)

    def _pace(self, worker: str) -> float:
        """Return the steps a second of a worker, from who gets its pushes: others hear of them by heartbeats."""
        pushed = max(self.servers.values(), key=lambda server: server.rates.get((worker, "bytes_in"), 0.0))
        return pushed.rates.get((worker, "steps"), 0.0)

    def _sum(self, key: Key) -> float | None:
        known = [server.rates[key] for server in self.servers.values() if key in server.rates]
        return sum(known) if known else None

    def _row(self, answers: Sequence[Answer]) -> dict[str, Any]:
        workers = workers_of(answers)
        alive = [known[0] for _, known in sorted(workers.items()) if known[0].state == "alive"]
        losses = [(info.worker_id, info.scalars["loss"]) for info in alive if "loss" in info.scalars]
        rates: dict[str, Any] = {
            "steps": sum(map(self._pace, workers)),
            "updates": self._rate("updates"),
            **{name: self._sum(name) for name in ("bytes_in", "bytes_out")},
        }
        row = {
            **(rates if any(server.rates for server in self.servers.values()) else {}),
            "version": max(answer.status.version_max for answer in answers),
            "seen": max(answer.status.examples for answer in answers),
            "alive": max(answer.status.workers_alive for answer in answers),
            "waited": self._judge()[0].share_waited(RATE_SECONDS),
            "queue": max(map(_queue, answers)),
            "loss": dict(losses[:LOSSES_MAX]),
            "cpu": {each.address: each.rates["cpu"] for each in self.servers.values() if "cpu" in each.rates},
        }
        if gradients := self._sum("taken"):
            row["staleness"] = (self._sum("staleness") or 0.0) / gradients
        return {name: value for name, value in row.items() if value != {}}

    def _head(self) -> dict[str, Any]:
        now, (recent, judged) = self._clock(), self._judge()
        # Of a run whose servers are all gone, as they are at its end, what they said last.
        last = [server.answer for server in self.servers.values() if server.answer]
        answers = self.answers or last or [Answer("", pb.Status())]
        status = answers[0].status
        rates = [rate.current for rate in status.learning_rates]
        statuses = [answer.status for answer in answers]
        warnings = [warning for each in statuses for warning in each.warnings]
        warnings += [f"{each.address}: {failed}" for each in answers if (failed := each.status.checkpoint_failure)]
        warnings += [not_named(statuses)] if len(answers) == len(self.servers) else []
        return {
            "now": round(now, 3),
            "run": status.run_id,
            "state": answers[0].state,
            "protocol": status.protocol,
            "staleness_policy": status.staleness,
            "rule": status.optimizer.rule,
            "rate": rates[0] if rates else None,
            "schedule": "" if status.schedule == "constant" else status.schedule,
            "warmup": status.warmup if status.warming_up else "",
            "version": max(each.version_max for each in statuses),
            "examples": max(each.examples for each in statuses),
            "alive": max(each.workers_alive for each in statuses),
            "began": min((each.began for each in self.servers.values() if each.answer), default=None),
            "sentence": judged.sentence,
            "slow": judged.worker,
            "warnings": list(dict.fromkeys(filter(None, warnings))),
            "skipped": max((each.skipped for each in self.servers.values()), default=0),
            "servers": [self._server(each, now) for each in self.servers.values()],
            "workers": [self._worker(name, known, recent) for name, known in sorted(workers_of(answers).items())],
            "staleness": self._staleness(self._staffed or status),
        }

    def _staleness(self, status: pb.Status) -> dict[str, Any]:
        """Return what the law and the policies say of the gradients since the last change of either."""
        buckets = sum((server.ages for server in self.servers.values()), Counter[int]())
        expected, total = Expected(status), buckets.total()
        return {
            "buckets": sorted(map(list, buckets.items())),
            "mean": sum(stale * count for stale, count in buckets.items()) / max(1, total),
            "max": max(buckets, default=0),
            "law": expected.law,
            "law_words": expected.law_words,
            "policies": expected.policies(buckets),
            "since": max((each.since for each in self.servers.values() if each.since is not None), default=None),
        }

    def _server(self, server: Server, now: float) -> dict[str, Any]:
        answer = server.answer or Answer(server.address, pb.Status())
        memory = answer.memory
        kinds = {name: getattr(memory, f"{field}_bytes") for name, field in MEMORY.items()}
        return {
            "address": server.address,
            "error": server.error,
            "state": answer.state,
            "silent_seconds": now - server.silent_since if server.error else 0,
            "version": answer.status.version_max,
            "queue": _queue(answer),
            "cpu": server.rates.get("cpu"),
            "memory": {**kinds, "other": max(0, memory.resident_bytes - sum(kinds.values()))},
            **_fields(answer.status, "checkpoint", "standby"),
        }

    def _worker(self, name: str, known: Sequence[pb.WorkerInfo], recent: Recent) -> dict[str, Any]:
        latest, tally = known[0], merged([each.tally for each in known])
        since = merged([server.tallies[name] for server in self.servers.values() if name in server.tallies])
        costs = _fields(since, "staleness_mean", "step_lost") if of.taken(since) else {}
        figures = recent.workers.get(name, Figures())
        num_shards = max(1, sum(server.answer.status.num_shards for server in self.servers.values() if server.answer))
        return {
            "name": name,
            **_fields(latest, "state", "host", "device", "message", "silent_seconds"),
            "steps": latest.clock,
            "pace": self._pace(name),
            "loss": latest.scalars.get("loss"),
            "staleness_mean": None,
            "step_lost": None,
            **costs,
            "staleness_max": tally.staleness_max,
            "waited": figures.share_waited,
            "slower": figures.slower,
            "waits_for": waits_for(known),
            "transport": ", ".join(sorted({each.transport for each in known} - {""})),
            "codecs": of.codecs_of(latest),
            "applied": round(of.taken(tally) / num_shards),
            "rejected": round(tally.pushes_rejected / num_shards),
            "dropped": round(tally.pushes_dropped / num_shards),
            **{key: self._sum((name, key)) for key in ("bytes_in", "bytes_out")},
        }


def _fields(message: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def counts(answer: Answer) -> dict[Key, float]:
    """Return what rates are made of."""
    status, tally = answer.status, answer.status.tally
    found: dict[Key, float] = {"updates": status.version_max, "cpu": status.cpu_seconds}
    found |= {"bytes_in": tally.bytes_in, "bytes_out": tally.bytes_out}
    found |= {"taken": of.taken(tally), "staleness": tally.staleness_mean * of.taken(tally)}
    for worker in answer.workers:
        name = worker.worker_id
        found[name, "steps"] = worker.clock
        found[name, "bytes_in"], found[name, "bytes_out"] = worker.tally.bytes_in, worker.tally.bytes_out
    return found


def _queue(answer: Answer) -> int:
    """Return how many gradients wait, each of several shards."""
    return math.ceil(answer.status.pending_gradients / max(1, answer.status.num_shards))


def _buckets(answer: Answer) -> dict[int, int]:
    return {max(0, bucket.staleness): bucket.count for bucket in answer.staleness.buckets}


def _is_change(kind: str, message: str) -> bool:
    return kind == "configured" and ("protocol" in message or "staleness" in message)


def _is_other(before: Answer, answer: Answer) -> bool:
    """Tell whether another protocol or policy is in force."""
    then, now = ((each.protocol, each.staleness, each.warming_up) for each in (before.status, answer.status))
    return "" not in (then[0], now[0]) and then != now


def in_words(kind: str, message: str, worker: str) -> tuple[str, str]:
    """Return an event's kind, "failed" for a worker that left so, and its message with the worker's name in front."""
    what, found, facts = message.partition(f": worker {worker}")
    if not worker or not found or not what.startswith("worker"):
        return kind, message
    words, facts = worker + what.removeprefix("worker"), facts.removeprefix(", ")
    if kind == "left":
        state, _, facts = facts.removeprefix("state ").partition(", message ")
        kind, words = "failed" if state == "failed" else kind, f"{worker} {state}"
    return kind, f"{words}: {facts}" if facts else words


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return three quarters of the most rows: each spans a part of its age, since the newest matter most."""
    part = 1 / ROWS_MAX
    while len(rows) > ROWS_MAX * 3 // 4:
        part *= 2
        kept, start = rows[:1], rows[0]["t"]
        for row in rows[1:]:
            if len(kept) > 1 and row["t"] - start <= part * (rows[-1]["t"] - row["t"]):
                kept[-1] = _joined(kept[-1], row, of_first=(kept[-1]["t"] - start) / max(1e-9, row["t"] - start))
            else:
                start = kept[-1]["t"]
                kept.append(row)
        rows = kept
    return rows


def _joined(first: Mapping[str, Any], last: Mapping[str, Any], *, of_first: float) -> dict[str, Any]:
    """Return one row in place of two."""
    row = {**first, **last}
    for name, value in last.items():
        before = first.get(name)
        if name in ("n", "t", *LATEST) or before is None or value is None:
            continue
        if isinstance(value, Mapping):
            row[name] = {**before, **_joined(before, value, of_first=of_first)}
        else:
            row[name] = before * of_first + value * (1 - of_first)
    return row


def _newer(kept: deque[Any], number: int) -> list[Any]:
    """Return the entries with a larger number, oldest first."""
    newest_first = []
    for entry in reversed(kept):
        if entry[0] <= number:
            break
        newest_first.append(entry)
    return newest_first[::-1]


def _name(kind: Any, number: int) -> str:
    known = number in kind.values()
    return kind.Name(number).partition("_")[2].lower() if known else f"{number}"


_shown = lru_cache(of.printable)


def _clean(value: Any) -> Any:
    """Return what JSON has words for: no number that is not finite, and no control characters."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, Mapping):
        return {_shown(name): _clean(each) for name, each in value.items()}
    return [*map(_clean, value)] if isinstance(value, list | tuple) else value
