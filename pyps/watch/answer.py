"""A server's answers, and what several servers say of one worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict

from pyps.control import Control
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work_wire

PUSHES = tuple(f"pushes_{outcome}" for outcome in ("applied", "pending", "rejected", "dropped", "duplicate"))
# The counts of a table's shards that are added up.
TABLE_COUNTS = ("rows", "bytes", "hits", "lookups", "candidates", "admitted", "dropped", "evicted", "expired")
# Steps and waits in a reply, for the sake of the server.
ACTIVITY_MAX = 1000
WORDS_MAX = 1000
# A message as a dictionary, without leaving out fields that are 0 or empty.
_plain = partial(MessageToDict, always_print_fields_with_no_presence=True)


@dataclass(frozen=True)
class Answer:
    """The answers of one server; events, steps and waits are in order, `work` is server 0's."""

    address: str
    status: pb.Status
    workers: Sequence[pb.WorkerInfo] = ()
    shards: Sequence[pb.ShardInfo] = ()
    events: Sequence[pb.Event] = ()
    work: work_wire.WorkProgress = field(default_factory=work_wire.WorkProgress)
    staleness: pb.StalenessHistogram = field(default_factory=pb.StalenessHistogram)
    memory: pb.Memory = field(default_factory=pb.Memory)
    activity: Sequence[pb.Activity] = ()
    # Steps and waits since the answer before that are not in `activity`.
    skipped: int = 0

    @property
    def state(self) -> str:
        return name_of(common.RunState, self.status.state, "RUN_STATE_")

    def to_json(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "status": _plain(self.status),
            "workers": [*map(_plain, self.workers)],
            "shards": [*map(_plain, self.shards)],
            "events": [*map(_plain, self.events)],
            "work": _plain(self.work),
        }


def activity_of(control: Control, *, after: int = 0) -> pb.ListActivityReply:
    """Return the steps and waits after that number, the newest for 0."""
    reply: pb.ListActivityReply = control.call("ListActivity", pb.ListActivityRequest(after=after, limit=ACTIVITY_MAX))
    return reply


def workers_of(answers: Sequence[Answer]) -> dict[str, list[pb.WorkerInfo]]:
    """Return each worker's entries by name; the first is of the server that heard from the worker last."""
    known = defaultdict(list)
    for worker in (worker for answer in answers for worker in answer.workers):
        known[worker.worker_id].append(worker)
    return {name: sorted(infos, key=lambda info: info.silent_seconds) for name, infos in known.items()}


def waits_for(known: Sequence[pb.WorkerInfo]) -> list[str]:
    return sorted({name for worker in known for name in worker.waits_for})


def taken(tally: pb.Tally) -> int:
    """Return the pushed shards that became part of an update, or wait for one."""
    return tally.pushes_applied + tally.pushes_pending


def merged(tallies: Sequence[pb.Tally], before: Sequence[pb.Tally] = ()) -> pb.Tally:
    """Return the counts of several servers in one, since those before; means are weighted by their gradients."""
    total = pb.Tally(staleness_max=max((tally.staleness_max for tally in tallies), default=0))
    for name in (*PUSHES, "bytes_in", "bytes_out", "rate_scale_count"):
        count = sum(getattr(tally, name) for tally in tallies) - sum(getattr(tally, name) for tally in before)
        setattr(total, name, max(0, count))
    total.blocked_seconds = sum(tally.blocked_seconds for tally in tallies)
    weights: dict[str, Callable[[pb.Tally], int]]
    weights = {"staleness_mean": taken, "step_lost": lambda tally: tally.rate_scale_count}
    for name, weight in weights.items():
        now, then = (sum(getattr(tally, name) * weight(tally) for tally in each) for each in (tallies, before))
        # Differences of means are not exact.
        setattr(total, name, max(0.0, round(now - then, 9)) / max(1, weight(total)))
    return total


def tables_of(infos: Iterable[pb.TableInfo]) -> dict[str, Counter[str]]:
    """Return the counts of each table by name: the sums of its shards'."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for info in infos:
        found[info.name].update({name: getattr(info, name) for name in TABLE_COUNTS})
    return dict(found)


def codecs_of(worker: pb.WorkerInfo) -> str:
    """Return the codecs of a worker's gradients and parameters; empty where both are float32."""
    both = worker.gradient_codec, worker.parameter_codec
    return "" if set(both) <= {"float32", ""} else ", ".join(both)


def printable(words: str) -> str:
    """Return the words without control characters, which names from workers may contain, and not at any length."""
    return "".join(character if character.isprintable() else "?" for character in words[:WORDS_MAX])


def name_of(kind: Any, number: int, prefix: str) -> str:
    """Return an enum's value in lower case; "" for none, and the number for one of a newer server."""
    return kind.Name(number).removeprefix(prefix).lower() if number in kind.values()[1:] else f"{number or ''}"
