"""The server's Prometheus page, made from the run's counts at each scrape."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pyps import _kernels, logs
from pyps.config import ConfigError
from pyps.core.membership import WorkerState
from pyps.core.receipt import Reason
from pyps.core.table import TableShard
from pyps.roles import METRICS
from pyps.run.handshake import RunState
from pyps.run.run import SOFTWARE
from pyps.service.hosting import address_of, busy_port, listening_socket
from pyps.service.report import learning_rates_of, memory_of
from pyps.service.transport import Host, Transport, name_of
from pyps.statistics import APPLY_SECONDS_BOUNDS, Statistics, Tally
from pyps_wire.errors import NotAuthenticated
from pyps_wire.work_pb2 import WorkProgress

# Samples for each shard, or each worker, are useful up to here; beyond, sums and extremes say enough.
LISTED_MAX = 100
STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# The fields of the memory report that become samples of one gauge.
MEMORY_KINDS = (
    *("parameters", "slots", "in_flight", "pending", "first_parameters"),
    *("published", "ledger", "serialized", "shared", "resident"),
)
# A reader that has not received its page after this time is disconnected.
REQUEST_SECONDS = 10.0
# Readers at once. One more ends the oldest.
READERS_MAX = 16
# How often events are logged that may come by the thousands.
TELL_SECONDS = 1.0
# The longest line of a request.
_LINE_BYTES_MAX = 2**13
# The page depends on these alone.
_HEADERS = ("accept", "accept-encoding", "authorization")

log = logs.get("pyps.service")


class RunCollector(Collector):
    """Reads a run's counts at scrape time."""

    def __init__(self, host: Host, *, transports: Sequence[Transport]):
        self._host = host
        self._run = host.run
        self._transports = transports

    def collect(self) -> Iterator[Metric]:
        """Yield every family, also one without a value yet, so that a dashboard never misses it."""
        statistics = self._run.statistics
        yield from self._about_run()
        yield from _about_pushes(statistics.total())
        yield from self._about_each(statistics)
        yield from self._about_time(statistics)
        yield from self._about_shards()
        yield from _about_work(self._run.work.progress())

    def _about_run(self) -> Iterator[Metric]:
        run, texts, roster = self._run, self._run.rounds.behaviour.texts, self._run.membership.roster
        in_force = {name: texts[name] for name in ("protocol", "warmup", "staleness", "schedule")}
        content, isa = run.content, _kernels.isa()
        server = {"software": SOFTWARE, "instruction_set": isa, "server_index": str(content.server_index)}
        rule = content.settings.rule if content.settings else ""
        yield InfoMetricFamily(
            "pyps", "What is in force.", value={**server, **in_force, "run_id": content.run_id, "rule": rule}
        )
        states = {state.name.lower(): float(state == run.state) for state in RunState}
        yield gauge("run_state", "1 for the state the run is in.", states, by="state")
        yield gauge("epoch", "Restores and resets since the run began.", run.content.epoch)
        folder = self._host.checkpoints
        yield counter("checkpoint_failures", "Checkpoints that could not be written.", folder.failures if folder else 0)
        meaning = "Unix time of the newest checkpoint, before it of the server's start; none without --checkpoint-dir."
        yield gauge("checkpoint_timestamp_seconds", meaning, {(): folder.saved_at} if folder else {})
        meaning = "Newest version that checkpoints hold of every shard here."
        yield gauge("durable_version", meaning, content.durable_version)
        members = Counter(member.state for member in run.membership.all())
        workers = {state.value: members[state] for state in WorkerState}
        yield gauge("workers", "Workers known, by state.", workers, by="state")
        transports = Counter(
            name_of(self._transports, each.worker_id, each.incarnation) for each in run.membership.alive()
        )
        by_name = {transport.name: transports[transport.name] for transport in self._transports}
        meaning = "Live workers, by the transport that their gradients and parameters took last."
        yield gauge("workers_by_transport", meaning, by_name, by="transport")
        yield gauge("workers_counted", "Workers that are active in the protocol's round (L).", roster.num_workers)
        yield gauge("workers_missing", "Expected workers that the protocol still waits for.", roster.missing)
        yield gauge("batch_size", "The minibatch that workers are to use; 0 where they choose.", run.rounds.batch_size)
        rates = {str(rate.group): rate.current for rate in learning_rates_of(run)}
        yield gauge("learning_rate", "Each parameter group's rate, with the schedule.", rates, by="group")

    def _about_each(self, statistics: Statistics) -> Iterator[Metric]:
        """Yield the families of each worker and each shard, without samples where there are too many."""
        members = [member.worker_id for member in self._run.membership.all()]
        of_workers = {name: statistics.worker(name) for name in members} if len(members) <= LISTED_MAX else {}
        shards = self._run.content.shards
        of_shards = {str(shard_id): statistics.shard(shard_id) for shard_id in shards}
        for label, tallies in ("worker", of_workers), ("shard", of_shards if len(shards) <= LISTED_MAX else {}):
            staleness = {name: _staleness(tally) for name, tally in tallies.items()}
            meaning = f"Staleness of the gradients taken, by {label}."
            yield histogram(f"{label}_staleness", meaning, staleness, by=label)
        blocked = {name: tally.blocked_seconds for name, tally in of_workers.items()}
        yield counter("worker_blocked_seconds", "Seconds that each worker waited for others.", blocked, by="worker")
        scales = {name: _rate_scales(tally) for name, tally in of_workers.items()}
        yield summary("worker_rate_scale", "What staleness left of each worker's step size.", scales, by="worker")
        live = self._run.membership.alive() if of_workers else []
        reports = {(member.worker_id, name): value for member in live for name, value in member.scalars.items()}
        meaning = "What each live worker reported last, by the figure's name."
        yield gauge("worker_report", meaning, reports, by="worker figure")

    def _about_time(self, statistics: Statistics) -> Iterator[Metric]:
        last = statistics.last_update
        timestamp = 0.0 if last is None else time.time() - (self._run.clock() - last)
        yield gauge("last_update_timestamp_seconds", "Unix time of the last update; 0 before it.", timestamp)
        counts, seconds = statistics.apply_seconds()
        buckets = _buckets(APPLY_SECONDS_BOUNDS, counts)
        yield histogram("apply_seconds", "Seconds that pushes took in their shard.", (buckets, seconds))

    def _about_shards(self) -> Iterator[Metric]:
        shards = list(self._run.content.shards.values())
        versions = {str(shard.shard_id): shard.version for shard in shards}
        yield gauge("shards", "Shards on this server.", len(shards))
        yield gauge("version_min", "The min of the shards' versions.", min(versions.values(), default=0))
        yield gauge("version_max", "The max of the shards' versions.", max(versions.values(), default=0))
        listed = versions if len(versions) <= LISTED_MAX else {}
        yield gauge("shard_version", f"Each shard's version, up to {LISTED_MAX} shards.", listed, by="shard")
        yield from _about_tables(shard.table_counts() for shard in shards if isinstance(shard, TableShard))
        memory = memory_of(self._host, self._transports)
        kinds = {kind: getattr(memory, f"{kind}_bytes") for kind in MEMORY_KINDS}
        yield gauge("memory_bytes", "Bytes held, by what for.", kinds, by="kind")
        yield gauge("in_flight_bytes_max", "Most bytes of pushes and pulls held at once.", memory.in_flight_bytes_max)
        pending = sum(shard.num_pending for shard in shards)
        yield gauge("pending_gradients", "Gradients that wait for an update.", pending)
        feed = self._host.feed
        behind = feed.recorded - feed.received if feed.guards else -1
        yield gauge("standby_events_behind", "Events that the standby has yet to receive; -1 without one.", behind)
        meaning = "Messages that have not come for 5 s; gRPC may hold most of each."
        yield gauge("late_messages", meaning, memory.late_messages)


def _about_tables(of_shards: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the families of tables: the sums of their shards."""
    tables: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for counts in of_shards:
        tables[counts["name"]].update({name: count for name, count in counts.items() if name != "name"})
    for name, meaning in (
        ("rows", "Rows held."),
        ("candidates", "Ids that have not been pushed often enough to be rows."),
        ("bytes", "Memory of rows and index."),
    ):
        yield gauge(f"table_{name}", meaning, {table: each[name] for table, each in tables.items()}, by="table")
    for name, meaning in (
        ("admitted", "Ids that became rows."),
        ("dropped", "Gradients dropped because their id was no row yet."),
        ("evicted", "Rows dropped for new ones."),
        ("expired", "Rows and candidates dropped because no update came."),
        ("lookups", "Rows that were asked for."),
        ("hits", "Rows that were asked for and had been updated before."),
    ):
        yield counter(f"table_{name}", meaning, {table: each[name] for table, each in tables.items()}, by="table")


class MetricsServer:
    """Serves the page over HTTP on the event loop; one thread makes the pages, one at a time."""

    def __init__(self, collector: RunCollector, served: Host):
        """Bind the port. ConfigError when it is taken."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._application = make_wsgi_app(registry)
        self._access, self._tls = served.access, served.tls
        host, port = served.config.host, served.config.metrics_port
        bound = listening_socket(host, port)
        if bound is None:
            raise ConfigError(busy_port(host, port, field="metrics_port"))
        self._socket = bound
        self.address = address_of(host, bound.getsockname()[1])
        self._server: asyncio.Server | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._warnings = logs.Crowd(log)
        # A task for each connection, the earliest first.
        self._readers: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._admit, sock=self._socket, limit=_LINE_BYTES_MAX)

    def stop(self) -> None:
        """Close the port at once."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for reader in self._readers:
            reader.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a reader; where there are too many, end the oldest."""
        if len(self._readers) >= READERS_MAX:
            earliest = next(iter(self._readers))
            earliest.cancel()
            del self._readers[earliest]
        task = asyncio.create_task(self._serve(reader, writer), name="metrics reader")
        self._readers[task] = None
        task.add_done_callback(partial(self._end, writer))

    def _end(self, writer: asyncio.StreamWriter, reader: asyncio.Task[None]) -> None:
        # Not in the task, which never runs if it is cancelled at once.
        self._readers.pop(reader, None)
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                if self._tls is not None:
                    # Here, so that a slow handshake counts as a reader too.
                    await writer.start_tls(self._tls.context())
                writer.write(await self._answer(await _read_request(reader)))
                writer.close()
                await writer.wait_closed()
        except ssl.SSLError as error:
            peer = writer.get_extra_info("peername")
            event = "readers of metrics were refused by TLS"
            if self._warnings.note(event, newest=peer and peer[0], reason=error.reason):
                asyncio.get_running_loop().call_later(TELL_SECONDS, self._warnings.tell)
        except (OSError, ValueError):
            # The reader is slow, has gone, or speaks no HTTP.
            pass
        except Exception as error:
            log.error("a page of metrics could not be served", reason=repr(error))

    async def _answer(self, request: dict[str, str]) -> bytes:
        """Return the status line, the headers and the page; 401 without the token."""
        shown = request.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        try:
            # Whoever has a certificate that TLS accepts may read the page, whatever role that names.
            self._access.admit(METRICS, shown, peer="", subject="")
        except NotAuthenticated:
            page = b"this server wants its token: Authorization: Bearer TOKEN\n"
            return _response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")], page)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._page, request)

    def _page(self, request: dict[str, str]) -> bytes:
        started: list[tuple[str, Any]] = []
        blocks = self._application(request, lambda status, headers: started.append((status, headers)))
        return _response(*started[0], b"".join(blocks))


async def _read_request(reader: asyncio.StreamReader) -> dict[str, str]:
    """Return a request as WSGI's environment; ValueError where it is not HTTP."""
    method, target, *_ = (await reader.readline()).decode("latin-1").split()
    path, _, query = target.partition("?")
    request = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        if name.lower() in _HEADERS:
            request["HTTP_" + name.upper().replace("-", "_")] = value.strip()
    return request


def _response(status: str, headers: Iterable[tuple[str, str]], page: bytes) -> bytes:
    lines = [f"{name}: {value}" for name, value in (*headers, ("Content-Length", len(page)))]
    return "\r\n".join([f"HTTP/1.0 {status}", *lines, "", ""]).encode("latin-1") + page


def _family(kind: Any, name: str, meaning: str, samples: Any, *, by: str = "") -> Metric:
    """Return a family of one sample, or of a sample for each value (or tuple of values) of the labels `by`.

    A sample is a number, or a tuple of what the kind takes.
    """
    family: Any = kind(f"pyps_{name}", meaning, labels=by.split())
    for values, sample in samples.items() if isinstance(samples, Mapping) else [((), samples)]:
        labels = [values] if isinstance(values, str) else values
        family.add_metric(labels, *(sample if isinstance(sample, tuple) else (sample,)))
    return family  # type: ignore[no-any-return]


gauge = partial(_family, GaugeMetricFamily)
counter = partial(_family, CounterMetricFamily)
histogram = partial(_family, HistogramMetricFamily)
summary = partial(_family, SummaryMetricFamily)


def _about_pushes(total: Tally) -> Iterator[Metric]:
    yield counter("updates", "Updates applied to shards.", total.updates)
    outcomes = {name: getattr(total, f"pushes_{name}") for name in ("applied", "pending", "rejected", "duplicate")}
    yield counter("pushes", "Pushed shards, by outcome.", outcomes, by="outcome")
    rejected = {reason.name.lower(): total.reasons.get(reason, 0) for reason in Reason if reason}
    yield counter("pushes_rejected", "Rejected pushes, by reason.", rejected, by="reason")
    yield counter("blocked_seconds", "Seconds that workers waited for others.", total.blocked_seconds)
    payload = {"in": total.bytes_in, "out": total.bytes_out}
    yield counter("payload_bytes", "Payload bytes moved.", payload, by="direction")
    yield histogram("staleness", "Staleness of the gradients taken, in updates.", _staleness(total))
    meaning = "What staleness left of the step size, of each gradient from 1 to 0."
    yield summary("rate_scale", meaning, _rate_scales(total))


def _rate_scales(tally: Tally) -> tuple[int, float]:
    """Return count and sum of the rate scales, from which a mean over any time can be computed."""
    return tally.rate_scale_count, tally.rate_scale_sum


def _about_work(work: WorkProgress) -> Iterator[Metric]:
    """Yield server 0's families, at 0 on others and where no worker shares a data set."""
    states = {state: getattr(work, state) for state in ("done", "running", "pending", "ahead")}
    meaning = "Portions of the present pass, by state; ahead: of later ones, done."
    yield gauge("work_portions", meaning, states, by="state")
    yield gauge("work_pass", "The present pass over the data set.", getattr(work, "pass"))
    yield counter("work_passes", "Passes over the data set that are done.", work.passes_done)
    yield counter("work_copies", "Backup copies of portions given out.", work.copies)
    yield counter("work_stolen", "Portions that a backup copy finished first.", work.stolen)
    yield counter("work_lost", "Leases of portions whose workers died or delivered nothing for too long.", work.lost)
    yield counter("work_wasted", "Results of portions that were thrown away.", work.wasted)
    speeds = {worker.worker_id: worker.examples_per_second for worker in work.workers}
    yield gauge("work_examples_per_second", "Speed over a worker's last portions.", speeds, by="worker")


def _staleness(tally: Tally) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram and the sum."""
    counts = [0] * (len(STALENESS_BOUNDS) + 1)
    for staleness, count in tally.histogram.items():
        counts[bisect_left(STALENESS_BOUNDS, staleness)] += count
    return _buckets(STALENESS_BOUNDS, counts), tally.staleness_sum


def _buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: each counts all values up to its bound. `counts` ends with the larger values."""
    return list(zip(map(floatToGoString, (*bounds, math.inf)), accumulate(counts), strict=True))
