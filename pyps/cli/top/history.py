"""What servers have said over time: how fast a run goes, how stale its gradients are, how each worker's loss moves."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyps.cli.status import workers_of
from pyps.cli.top.asking import Answer

# As many as the widest terminal shows.
POINTS_MAX = 400
EVENTS_MAX = 1000
# The staleness of each band; the last holds all above.
BANDS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33+")


def band_of(staleness: int) -> int:
    """The band that a staleness belongs to."""
    return min((staleness - 1).bit_length() + 1, len(BANDS) - 1) if staleness else 0


@dataclass(frozen=True)
class Point:
    """An interval: what came in each second, and how many gradients of each band of staleness there were."""

    steps: float
    updates: float
    examples: float
    bytes_in: float
    bytes_out: float
    bands: Mapping[int, int]


@dataclass
class Server:
    """One server: its last answer, and what has changed in each second since the one before it."""

    address: str
    answer: Answer | None = None
    # Why it does not answer, and since when; empty while it does.
    error: str = ""
    silent_since: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    # Steps, by worker.
    paces: dict[str, float] = field(default_factory=dict)
    # Gradients by band that no point holds yet.
    bands: Counter[int] = field(default_factory=Counter)

    def take(self, heard: Answer | str) -> None:
        """Takes its next answer, or why there was none."""
        self.rates, self.paces = {}, {}
        if isinstance(heard, str):
            self.silent_since = self.silent_since if self.error else time.monotonic()
            self.error = heard
            return
        before, self.answer, self.error = self.answer, heard, ""
        seconds = heard.status.uptime_seconds - before.status.uptime_seconds if before else 0.0
        if before is None or seconds <= 0:
            # The first, or that of a new life, which counts anew.
            return
        self.rates = _rates(_counts(before), _counts(heard), seconds)
        self.paces = _rates(_clocks(before), _clocks(heard), seconds)
        self.bands += _bands(heard) - _bands(before)


class History:
    """All servers of a run, as far as they were heard. For one thread."""

    def __init__(self, addresses: Sequence[str]):
        self.servers = {address: Server(address) for address in addresses}
        self.points: deque[Point] = deque(maxlen=POINTS_MAX)
        # The time of day, the server and what happened, oldest first.
        self.events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_MAX)
        self.losses: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=POINTS_MAX))

    def take(self, address: str, heard: Answer | str) -> None:
        """Takes what was heard of a server."""
        server = self.servers[address]
        if isinstance(heard, str):
            happened = [] if server.error else [(time.time(), f"no answer: {heard}")]
        else:
            happened = [(time.time(), "answers again")] if server.error else []
            happened += [(time.time() - event.age_seconds, event.message) for event in heard.events]
        server.take(heard)
        self.events.extend((at, address, words) for at, words in happened)

    def tick(self) -> None:
        """Ends an interval: makes a point of what came in it."""
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
        # Every server makes an update of its shards of the same pushes, and counts the same examples.
        updates, examples = (max((rate[name] for rate in rates), default=0.0) for name in ("updates", "examples"))
        received, sent = (sum(rate[name] for rate in rates) for name in ("bytes_in", "bytes_out"))
        self.points.append(Point(steps, updates, examples, received, sent, bands))

    @property
    def answers(self) -> list[Answer]:
        """The newest answers of the servers that do answer."""
        return [server.answer for server in self.servers.values() if server.answer and not server.error]

    @property
    def silent(self) -> list[Server]:
        """The servers that do not answer."""
        return [server for server in self.servers.values() if server.error]

    def pace(self, worker_id: str) -> float:
        """The steps of a worker each second, by the server that was told of the most."""
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
