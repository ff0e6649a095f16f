"""What is known of a run over time: kept in bounded memory, given as JSON."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from operator import itemgetter
from threading import RLock
from typing import Any

from pyps.control import not_named
from pyps.units import counted
from pyps.watch.answer import Answer, merged, name_of, printable, tables_of, taken, waits_for, workers_of
from pyps.watch.recent import Figures, Recent, Step, Wait
from pyps.watch.staleness import Expected
from pyps.watch.verdict import Verdict, verdicts
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb

ROWS_MAX = 2048
STEPS_MAX = 50_000
STEPS_SECONDS = 900.0
EVENTS_MAX = 2000
SAME_EVENT_SECONDS = 10.0
# Rates are of so many seconds: a worker's count of steps goes up by whole ones.
RATE_SECONDS = 5.0
STALENESS_MAX = 10**9
# What came before one of these tells nothing of now; a change of the settings is one too.
TURNS = frozenset(("failed", "expired", "found"))
# Workers whose losses rows have; of more the first by name.
LOSSES_MAX = 64
# What a thinner row takes from its newest; of other numbers it has the mean.
LATEST = ("n", "t", "version", "seen", "alive", "score")
# Kinds of memory, and their fields in an answer.
MEMORY = {name: name for name in ("parameters", "slots", "shared")} | {"waiting": "pending", "in flight": "in_flight"}
Key = str | tuple[str, str]


@dataclass
class Server:
    """One server: its last answer or error, and what it counts a second."""

    address: str
    answer: Answer | None = None
    error: str = ""
    # Times of day: when this life of it began, since when it has not answered, when protocol or policy changed last.
    began: float = math.nan
    silent_since: float = math.nan
    since: float | None = None
    # Its answer right after that change.
    base: Answer | None = None
    skipped: int = 0
    rates: Mapping[Key, float] = field(default_factory=dict)
    # Its uptime and counts in the last seconds; none before the uptime at which it has settled.
    _samples: deque[tuple[float, Mapping[Key, float]]] = field(default_factory=deque)
    _settles: float = 0.0

    # When it answered last.
    answered: float = math.nan

    def take(self, answer: Answer, now: float) -> bool:
        """Take an answer; return whether protocol or policy have changed since the one before."""
        self.answered = now
        before, uptime, now_counted = self.answer, answer.status.uptime_seconds, counts(answer)
        lives_on = before is not None and not self.error and uptime >= before.status.uptime_seconds
        changed = before is not None and lives_on and _is_other(before.status, answer.status)
        if not lives_on:
            # What workers send again is no speed of theirs.
            self._settles = uptime + RATE_SECONDS if before else 0.0
            self.began, self.base, self.since = now - uptime, None, None
        if changed or (before is None and any(_is_change(event.kind, event.message) for event in answer.events)):
            self.base, self.since = answer, now
        self.answer, self.error, self.skipped = answer, "", self.skipped + answer.skipped
        if uptime < self._settles:
            self._samples.clear()
        self._samples.append((uptime, now_counted))
        while len(self._samples) > 2 and self._samples[1][0] <= uptime - RATE_SECONDS:
            self._samples.popleft()
        # Who has just come brings counts from before.
        first = {key: (at, count) for at, kept in reversed(self._samples) for key, count in kept.items()}
        spans = {key: (uptime - first[key][0], count - first[key][1]) for key, count in now_counted.items()}
        self.rates = {key: max(0.0, count) / seconds for key, (seconds, count) in spans.items() if seconds > 0}
        return changed

    @property
    def ages(self) -> Counter[int]:
        """The gradients since that change by staleness."""
        now, then = (
            Counter({_possible(bucket.staleness): bucket.count for bucket in each.staleness.buckets} if each else {})
            for each in (self.answer, self.base)
        )
        return now - then


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
        # By worker the server whose list of steps is taken.
        self._sources: dict[str, str] = {}
        self._judged: tuple[Recent, Verdict] | None = None
        # What held the run back, and what workers did, when some were at work last.
        self._at_work: tuple[dict[str, Figures], Verdict] | None = None
        # Since the last change, by the number of workers, the updates with so many, and a status of then.
        self._staffed: dict[int, tuple[int, pb.Status]] = {}
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
                    server.silent_since = now if math.isnan(server.answered) else server.answered
                server.error, server.rates = answer, {}
                return
            if server.error:
                self.add_event(now, address, "found", f"{address} answers again")
            former = server.answer.status if server.answer else pb.Status()
            if server.take(answer, now):
                self._turns.append(now)
                self._staffed.clear()
            if num_workers := len(answer.status.roster):
                made, _ = self._staffed.get(num_workers, (0, None))
                made += max(0, answer.status.version_max - former.version_max)
                self._staffed[num_workers] = made, answer.status
            if former.run_id and answer.status.checkpoint not in ("", former.checkpoint):
                self.add_event(now, address, "checkpoint", f"checkpoint written: {answer.status.checkpoint}")
            if (refused := refusals(answer.status) - refusals(former)) > 0 and former.run_id:
                self.add_event(now, address, "refused", f"gradients refused: {counted(refused, 'pushed shard')}")
            for event in answer.events:
                self.add_event(now - event.age_seconds, address, event.kind, event.message, event.worker)
            for each in answer.activity:
                self._take_activity(address, each, now)

    def _take_activity(self, address: str, each: pb.Activity, now: float) -> None:
        began, ended = now - each.age_seconds - each.seconds, now - each.age_seconds
        if not math.isfinite(began + ended):
            return
        # Several servers list the same steps.
        source = self._sources.setdefault(each.worker_id, address)
        if source != address and not self.servers[source].error:
            return
        self._sources[each.worker_id] = address
        if not each.sequence:
            self.add_wait(each.worker_id, began, ended, waited_for=tuple(each.waited_for))
            return
        outcome = name_of(common.Outcome, each.outcome, "OUTCOME_")
        reason = name_of(common.Reason, each.reason, "REASON_")
        facts = {"staleness": _possible(each.staleness), "outcome": outcome, "reason": reason, "updates": each.updates}
        self.add_step(each.worker_id, began, ended, **facts)

    def add_step(self, worker: str, began: float, ended: float, **facts: Any) -> None:
        """Add a step with the further facts of a `Step`; times are of day."""
        with self._lock:
            step = Step(self._next(), worker, round(began, 3), round(ended, 3), **facts)
            self._keep(self.steps, step, STEPS_MAX)

    def add_wait(self, worker: str, began: float, ended: float, waited_for: Sequence[str]) -> None:
        with self._lock:
            wait = Wait(self._next(), worker, round(began, 3), round(ended, 3), waited_for)
            self._keep(self.waits, wait, STEPS_MAX)

    def add_event(self, at: float, address: str, kind: str, message: str, worker: str = "") -> None:
        """Add an event, in plain words; what several servers tell, each at its own time, once."""
        with self._lock:
            kind, message = in_words(kind, message, worker)
            if any(
                each[2] != address and each[3:] == (kind, message, worker) and abs(each[1] - at) < SAME_EVENT_SECONDS
                for each in self.events
            ):
                return
            if kind in TURNS or _is_change(kind, message):
                self._turns.append(at)
            self._keep(self.events, (self._next(), round(at, 3), address, kind, message, worker), EVENTS_MAX)

    def add_score(self, version: int, score: Mapping[str, float]) -> None:
        """Add the score of the parameters of a version, on as many examples as were behind it."""
        with self._lock:
            before = (
                row for row in reversed(self.rows) if "seen" in row and row.get("version", version + 1) <= version
            )
            seen = next(before, {"seen": 0})["seen"]
            self.add_row({"t": round(self._clock(), 3), "version": version, "seen": seen, "score": dict(score)})

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
    def _is_over(self) -> bool:
        """Whether all workers had left when servers answered last."""
        last = [server.answer for server in self.servers.values() if server.answer]
        known = workers_of(self.answers or last)
        return bool(known) and all(infos[0].state != "alive" for infos in known.values())

    @property
    def verdict(self) -> Verdict:
        """What holds the run back now."""
        return self._judge()[1]

    def to_json(self, after: int = 0, id: str = "") -> dict[str, Any]:
        """Return the present state, and what was added after that number; all that is kept for 0 or an unknown one."""
        with self._lock:
            whole = after <= 0 or not self._forgotten <= after <= self._number or id not in ("", self.id)
            since = 0 if whole else after
            about = {"number": self._number, "whole": whole, "id": self.id, "live": self._live}
            new: dict[str, Any] = {name: _newer(getattr(self, name), since) for name in ("waits", "events")}
            new["rows"] = [row for row in self.rows if row["n"] > since]
            steps = [[step.n, _shown(step.worker), *step[2:]] for step in _newer(self.steps, since)]
            return {**_clean({**self._head(), **self.facts, **about, **new}), "steps": steps}

    # What follows is called under the lock.

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _keep(self, kept: deque[Any], entry: tuple[Any, ...], most: int) -> None:
        kept.append(entry)
        if len(kept) > most:
            self._forgotten = max(self._forgotten, kept.popleft()[0])

    def _judge(self) -> tuple[Recent, Verdict]:
        with self._lock:
            if self._judged is None:
                now, answers, servers = self._clock(), self.answers, self.servers.values()
                since = max((at for at in self._turns if at <= now), default=-math.inf)
                recent = Recent(answers, reversed(self.steps), reversed(self.waits), now=now, since=since)
                silent = {each.address: now - each.silent_since for each in servers if each.error}
                busy = {each.address: each.rates.get("cpu", 0.0) for each in servers}
                found = next(verdicts(answers, recent, silent=silent, busy=busy))
                if self._is_over:
                    words = found.sentence if answers else "the run has ended, and its servers with it"
                    if self._at_work is not None:
                        found = Verdict(f"{words}; before: {self._at_work[1].sentence}", self._at_work[1].worker)
                elif recent.num_steps:
                    self._at_work = recent.workers, found
                self._judged = recent, found._replace(sentence=_shown(found.sentence))
            return self._judged

    def _rate(self, key: Key, join: Callable[[list[float]], float] = sum) -> float | None:
        """Return what the servers count a second; None where that is not known."""
        known = [server.rates[key] for server in self.servers.values() if key in server.rates]
        return join(known) if known else None

    def _pace(self, worker: str) -> float:
        """Return the steps a second of a worker, from those who get its pushes: others hear of them by heartbeats."""
        rates = [server.rates for server in self.servers.values()]
        pushed = [each for each in rates if each.get((worker, "bytes_in"))] or rates
        return _mean([each.get((worker, "steps"), 0.0) for each in pushed])

    def _row(self, answers: Sequence[Answer]) -> dict[str, Any]:
        workers, updates, gradients = workers_of(answers), self._rate("updates", _mean), self._rate("taken")
        alive = [known[0] for _, known in sorted(workers.items()) if known[0].state == "alive"]
        losses = [(info.worker_id, info.scalars["loss"]) for info in alive if "loss" in info.scalars]
        row = {
            "steps": None if updates is None else sum(map(self._pace, workers)),
            "updates": updates,
            "bytes_in": self._rate("bytes_in"),
            "bytes_out": self._rate("bytes_out"),
            "version": _most("version_max", answers),
            "seen": _most("examples", answers),
            "alive": _most("workers_alive", answers),
            "waited": self._judge()[0].share_waited(RATE_SECONDS),
            # The servers give means: of whole numbers their sums are not exact.
            "staleness": round((self._rate("staleness") or 0.0) / gradients, 6) if gradients else None,
            "queue": max(map(_queue, answers)),
            "loss": dict(losses[:LOSSES_MAX]),
            "cpu": {each.address: each.rates["cpu"] for each in self.servers.values() if "cpu" in each.rates},
        }
        return {name: value for name, value in row.items() if value not in (None, {})}

    def _head(self) -> dict[str, Any]:
        now, (recent, judged), servers = self._clock(), self._judge(), self.servers.values()
        # Of a run whose servers are all gone, as they are at its end, what they said last.
        known = [each for each in servers if not each.error and each.answer] or [
            each for each in servers if each.answer
        ]
        answers = [each.answer for each in known if each.answer] or [Answer("", pb.Status())]
        figures = self._at_work[0] if self._is_over and self._at_work else recent.workers
        tables = tables_of(info for each in answers for info in each.status.tables)
        bases, status = workers_of([each.base for each in known if each.base]), answers[0].status
        warnings = [warning for each in answers for warning in each.status.warnings]
        warnings += [f"{each.address}: {failed}" for each in answers if (failed := each.status.checkpoint_failure)]
        warnings += [not_named([each.status for each in answers])] if len(answers) == len(servers) else []
        return {
            "now": round(now, 3),
            "run": status.run_id,
            "state": "ended" if self._is_over and not self.answers else answers[0].state,
            "protocol": status.protocol,
            "staleness_policy": status.staleness,
            "rule": status.optimizer.rule,
            "rate": next((rate.current for rate in status.learning_rates), None),
            "schedule": "" if status.schedule == "constant" else status.schedule,
            "warmup": status.warmup if status.warming_up else "",
            "version": _most("version_max", answers),
            "examples": _most("examples", answers),
            "alive": _most("workers_alive", answers),
            "began": min((each.began for each in servers if each.answer), default=None),
            "sentence": judged.sentence,
            "slow": judged.worker,
            "warnings": list(dict.fromkeys(filter(None, warnings))),
            "skipped": max((each.skipped for each in servers), default=0),
            "servers": [self._server(each, now) for each in servers],
            "tables": [
                {"name": name, **each, "hit_rate": each["hits"] / max(1, each["lookups"])}
                for name, each in tables.items()
            ],
            "workers": [
                self._worker(name, infos, bases.get(name, ()), figures.get(name, Figures()))
                for name, infos in sorted(workers_of(answers).items())
            ],
            "staleness": self._staleness(max(self._staffed.values(), default=(0, status), key=itemgetter(0))[1]),
        }

    def _staleness(self, status: pb.Status) -> dict[str, Any]:
        """Return what the law and the policies say of the gradients since the last change of either."""
        buckets = sum((server.ages for server in self.servers.values()), Counter[int]())
        expected, servers = Expected(status), self.servers.values()
        now, then = (
            [each.tally for one in found if one for each in one.workers]
            for found in ([server.answer for server in servers], [server.base for server in servers])
        )
        measured = merged(now, then)
        return {
            "buckets": sorted(map(list, buckets.items())),
            "mean": sum(stale * count for stale, count in buckets.items()) / max(1, buckets.total()),
            "max": max(buckets, default=0),
            "law": expected.law,
            "law_words": expected.law_words,
            "policies": expected.policies(buckets, measured.step_lost if measured.rate_scale_count else None),
            "since": max((each.since for each in self.servers.values() if each.since is not None), default=None),
        }

    def _server(self, server: Server, now: float) -> dict[str, Any]:
        answer = server.answer or Answer(server.address, pb.Status())
        kinds = {name: getattr(answer.memory, f"{field}_bytes") for name, field in MEMORY.items()}
        return {
            "address": server.address,
            "error": server.error,
            "state": answer.state,
            "silent_seconds": now - server.silent_since if server.error else 0,
            "version": answer.status.version_max,
            "queue": _queue(answer),
            "cpu": server.rates.get("cpu"),
            "memory": {**kinds, "other": max(0, answer.memory.resident_bytes - sum(kinds.values()))},
            "checkpoint": answer.status.checkpoint,
            "standby": answer.status.standby,
        }

    def _worker(
        self, name: str, known: Sequence[pb.WorkerInfo], before: Sequence[pb.WorkerInfo], figures: Figures
    ) -> dict[str, Any]:
        latest, since = known[0], merged([each.tally for each in known], [each.tally for each in before])
        costs = bool(taken(since))
        return {
            "name": name,
            **{field: getattr(latest, field) for field in ("state", "host", "device", "message")},
            "steps": latest.clock,
            "pace": self._pace(name),
            "loss": latest.scalars.get("loss"),
            "staleness_mean": since.staleness_mean if costs else None,
            "step_lost": since.step_lost if since.rate_scale_count else None,
            "waited": figures.share_waited,
            "slower": figures.slower,
            "waits_for": waits_for(known),
            "transport": ", ".join(sorted({each.transport for each in known} - {""})),
            "bytes_in": self._rate((name, "bytes_in")),
            "bytes_out": self._rate((name, "bytes_out")),
        }


def counts(answer: Answer) -> dict[Key, float]:
    """Return what rates are made of."""
    status, tally = answer.status, answer.status.tally
    found: dict[Key, float] = {"updates": status.version_max, "cpu": status.cpu_seconds}
    found |= {"bytes_in": tally.bytes_in, "bytes_out": tally.bytes_out}
    found |= {"taken": taken(tally), "staleness": tally.staleness_mean * taken(tally)}
    for worker in answer.workers:
        name = worker.worker_id
        found[name, "steps"] = worker.clock
        found[name, "bytes_in"], found[name, "bytes_out"] = worker.tally.bytes_in, worker.tally.bytes_out
    return found


def _possible(staleness: int) -> int:
    """Return the staleness, or the nearest one that policies take: what comes from a server may be anything."""
    return min(max(0, staleness), STALENESS_MAX)


def refusals(status: pb.Status) -> int:
    """Return how many pushed shards were refused, and not only not needed."""
    return status.tally.pushes_rejected - status.tally.pushes_dropped


def _mean(rates: list[float]) -> float:
    """Return the mean of what several servers count of the same, but for servers without shards."""
    known = [rate for rate in rates if rate]
    return sum(known) / len(known) if known else 0.0


def _most(count: str, answers: Sequence[Answer]) -> int:
    counts: list[int] = [getattr(answer.status, count) for answer in answers]
    return max(counts)


def _queue(answer: Answer) -> int:
    """Return how many gradients wait, each of several shards."""
    return math.ceil(answer.status.pending_gradients / max(1, answer.status.num_shards))


def _is_change(kind: str, message: str) -> bool:
    return kind == "configured" and ("protocol" in message or "staleness" in message)


def _is_other(before: pb.Status, now: pb.Status) -> bool:
    """Tell whether another protocol or policy is in force."""
    changed = any(getattr(before, name) != getattr(now, name) for name in ("protocol", "staleness", "warming_up"))
    return changed and "" not in (before.protocol, now.protocol)


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
                joined = _joined(kept[-1], row, (kept[-1]["t"] - start) / max(1e-9, row["t"] - start))
                kept[-1] = joined | {name: row[name] for name in LATEST if name in row}
            else:
                start = kept[-1]["t"]
                kept.append(row)
        rows = kept
    return rows


def _joined(first: Any, last: Any, of_first: float) -> Any:
    """Return one number in place of two, or such numbers by name; the first has a part of their time."""
    if isinstance(last, Mapping):
        first = first or {}
        return {**first, **{name: _joined(first.get(name), each, of_first) for name, each in last.items()}}
    return last if first is None or last is None else first * of_first + last * (1 - of_first)


def _newer(kept: deque[Any], number: int) -> list[Any]:
    """Return the entries with a larger number, oldest first."""
    return [*takewhile(lambda entry: entry[0] > number, reversed(kept))][::-1]


_shown = lru_cache(printable)


def _clean(value: Any) -> Any:
    """Return what JSON has words for: no number that is not finite, and no control characters."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, Mapping):
        return {_shown(name): _clean(each) for name, each in value.items()}
    return [*map(_clean, value)] if isinstance(value, list | tuple) else value
