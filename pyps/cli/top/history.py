"""What servers report over time, and the threads that call them: one silent server delays no other."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from pyps.control import Control, change_all, in_force, settled
from pyps.watch import answer
from pyps.watch.answer import workers_of
from pyps_client.credentials import read_token
from pyps_client.places import address_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work_wire
from pyps_wire.contract import CONTROL_PORT
from pyps_wire.errors import InvalidArgument, NotAllowed, NotAuthenticated, PypsError

# A round of calls costs a server about 3 ms of a core, 7 ms with 256 workers: this pace keeps it below 1 %.
INTERVAL_SECONDS = 1.0
WORKERS_A_SECOND = 256
CALL_SECONDS = 5.0


@dataclass(frozen=True)
class Answer(answer.Answer):
    """A server's answers of one round, with the events since the last one and without shards.

    `refusal` says why the caller may not change the server; "" where it may.
    """

    refusal: str = ""


def poll(
    address: str,
    token_file: Path | None,
    report: Callable[[str, Answer | str], None],
    *,
    interval_seconds: float,
    running: Event,
    closed: Event,
) -> None:
    """Call one server again and again, and report each answer or error; pause while `running` is not set."""
    newest, uptime_seconds = 0, 0.0

    def rest(num_workers: int) -> None:
        closed.wait(interval_seconds + num_workers / WORKERS_A_SECOND)
        running.wait()

    while not closed.is_set():
        try:
            # A new connection after each failure: gRPC would wait ever longer, and the server may have moved.
            place, token = address_of(address, port=CONTROL_PORT), read_token(token_file)
            with Control(place, token=token, timeout_seconds=CALL_SECONDS) as control:
                refusal = _refusal_of(control)
                while not closed.is_set():
                    answer = _answer(control, address, refusal, after=newest)
                    newest = max([newest, *(event.number for event in answer.events)])
                    if answer.status.uptime_seconds < uptime_seconds:
                        # A restarted server, which numbers its events from 1.
                        newest = 0
                    uptime_seconds = answer.status.uptime_seconds
                    report(address, answer)
                    rest(len(answer.workers))
        except PypsError as error:
            report(address, str(error))
            rest(0)


def configure(addresses: Sequence[str], token_file: Path | None, request: pb.ConfigureRequest) -> str:
    """Change every server if all would accept it; return a line for each reply and each refusal."""
    try:
        places = [address_of(address, port=CONTROL_PORT) for address in addresses]
        replies, refusals = change_all(places, read_token(token_file), "Configure", request)
    except PypsError as error:
        replies, refusals = [], [error]
    lines = [f"not changed: {refusal}" for refusal in refusals]
    for address, reply in replies:
        warnings = "".join(f" It warns: {warning}." for warning in reply.warnings)
        lines.append(f"{address}: {in_force(reply)}{settled(reply)}.{warnings}")
    return "\n".join(lines)


def _answer(control: Control, address: str, refusal: str, *, after: int) -> Answer:
    return Answer(
        address,
        control.call("GetStatus", pb.GetStatusRequest()),
        control.call("ListWorkers", pb.ListWorkersRequest()).workers,
        (),
        control.call("ListEvents", pb.ListEventsRequest(after=after)).events,
        control.call("GetWork", work_wire.GetWorkRequest()),
        control.call("GetStaleness", pb.GetStalenessRequest()),
        control.call("GetMemory", pb.GetMemoryRequest()),
        refusal=refusal,
    )


def _refusal_of(control: Control) -> str:
    """Return why this caller is no operator, "" if it is: from an operator an empty change is only invalid."""
    try:
        with suppress(InvalidArgument):
            control.call("Configure", pb.ConfigureRequest())
    except (NotAllowed, NotAuthenticated) as error:
        return str(error)
    return ""


POINTS_MAX = 400
EVENTS_MAX = 1000
# Bands of staleness.
BANDS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33+")


def band_of(staleness: int) -> int:
    return min((staleness - 1).bit_length() + 1, len(BANDS) - 1) if staleness else 0


@dataclass(frozen=True)
class Point:
    """An interval: rates a second, and gradients by band of staleness."""

    steps: float
    updates: float
    examples: float
    bytes_in: float
    bytes_out: float
    bands: Mapping[int, int]


@dataclass
class Server:
    """One server: its last answer or error, rates since the previous answer, and gradients not yet in a point."""

    address: str
    answer: Answer | None = None
    error: str = ""
    silent_since: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    # Steps a second of each worker.
    paces: dict[str, float] = field(default_factory=dict)
    bands: Counter[int] = field(default_factory=Counter)

    def take(self, answer: Answer | str) -> None:
        self.rates, self.paces = {}, {}
        if isinstance(answer, str):
            self.silent_since = self.silent_since if self.error else time.monotonic()
            self.error = answer
            return
        before, self.answer, self.error = self.answer, answer, ""
        seconds = answer.status.uptime_seconds - before.status.uptime_seconds if before else 0.0
        if before is None or seconds <= 0:
            # The first answer, or the first of a restarted server.
            return
        self.rates = _rates(_counts(before), _counts(answer), seconds)
        self.paces = _rates(_clocks(before), _clocks(answer), seconds)
        self.bands += _bands(answer) - _bands(before)


class History:
    """The answers of all servers of a run over time. Used by one thread."""

    def __init__(self, addresses: Sequence[str]):
        self.servers = {address: Server(address) for address in addresses}
        self.points: deque[Point] = deque(maxlen=POINTS_MAX)
        # Time of day, server and message.
        self.events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_MAX)
        self.losses: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=POINTS_MAX))

    def take(self, address: str, answer: Answer | str) -> None:
        server, now = self.servers[address], time.time()
        if isinstance(answer, str):
            events = [] if server.error else [(now, f"no answer: {answer}")]
        else:
            events = [(now, "answers again")] if server.error else []
            events += [(now - event.age_seconds, event.message) for event in answer.events]
        server.take(answer)
        self.events.extend((at, address, words) for at, words in events)

    def tick(self) -> None:
        """End an interval, and append its point."""
        bands: Counter[int] = Counter()
        for server in self.servers.values():
            bands += server.bands
            server.bands = Counter()
        steps = 0.0
        for name, known in workers_of(self.answers).items():
            steps += self.pace(name)
            if "loss" in known[0].scalars:
                self.losses[name].append(known[0].scalars["loss"])
        rates = [server.rates for server in self.servers.values() if server.rates]
        # All servers see the same pushes and examples.
        updates, examples = (max((rate[name] for rate in rates), default=0.0) for name in ("updates", "examples"))
        received, sent = (sum(rate[name] for rate in rates) for name in ("bytes_in", "bytes_out"))
        self.points.append(Point(steps, updates, examples, received, sent, bands))

    @property
    def answers(self) -> list[Answer]:
        return [server.answer for server in self.servers.values() if server.answer and not server.error]

    @property
    def silent(self) -> list[Server]:
        return [server for server in self.servers.values() if server.error]

    def pace(self, worker_id: str) -> float:
        """Return the steps a second of a worker, from the server that counted the most."""
        return max(server.paces.get(worker_id, 0.0) for server in self.servers.values())


def _rates(then: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float]:
    return {name: max(0.0, count - then.get(name, 0)) / seconds for name, count in now.items()}


def _counts(answer: Answer) -> dict[str, float]:
    status, tally = answer.status, answer.status.tally
    return {
        "updates": status.version_max,
        "examples": status.examples,
        "bytes_in": tally.bytes_in,
        "bytes_out": tally.bytes_out,
    }


def _clocks(answer: Answer) -> dict[str, float]:
    return {worker.worker_id: worker.clock for worker in answer.workers}


def _bands(answer: Answer) -> Counter[int]:
    bands: Counter[int] = Counter()
    for bucket in answer.staleness.buckets:
        bands[band_of(bucket.staleness)] += bucket.count
    return bands
