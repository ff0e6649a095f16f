"""How a run goes, as its servers' Inspectors tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pyps.cli.control import Control
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import RUN_STATE_FINISHED, RUN_STATE_READY
from pyps_wire.errors import PypsError

CALL_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerProgress:
    """One worker, over all servers."""

    worker_id: str
    state: str
    # The worker's own count of steps, and what it last said of its loss.
    steps: int
    loss: float | None
    pushes: float
    staleness_mean: float
    staleness_max: int
    # Mean share of the step size that staleness left.
    rate_scale_mean: float


@dataclass(frozen=True)
class Progress:
    """The run at one moment."""

    seconds: float
    ready: bool
    updates: int
    version_min: int
    version_max: int
    staleness_mean: float
    staleness_max: int
    rate_scale_mean: float
    # Of all servers.
    num_shards: int
    workers: tuple[WorkerProgress, ...]

    @property
    def workers_finished(self) -> int:
        return sum(worker.state == "finished" for worker in self.workers)


class ProgressReader:
    """Asks the control port of each server of a run and puts the answers together."""

    def __init__(self, control_addresses: Sequence[str], *, token: str = "") -> None:
        self._controls = [Control(address, token=token) for address in control_addresses]

    def read(self, seconds: float) -> Progress | None:
        """The run now, `seconds` after its start; None where a server does not answer."""
        try:
            statuses = self._ask("GetStatus", pb.GetStatusRequest())
            listings = self._ask("ListWorkers", pb.ListWorkersRequest())
        except PypsError:
            return None
        applied = [taken(status) for status in statuses]
        return Progress(
            seconds=seconds,
            ready=all(status.state in (RUN_STATE_READY, RUN_STATE_FINISHED) for status in statuses),
            updates=max(status.version_max for status in statuses),
            version_min=min(status.version_min for status in statuses),
            version_max=max(status.version_max for status in statuses),
            staleness_mean=mean([status.staleness_mean for status in statuses], applied),
            staleness_max=max(status.staleness_max for status in statuses),
            rate_scale_mean=mean([status.rate_scale_mean for status in statuses], applied),
            num_shards=sum(status.num_shards for status in statuses),
            workers=merge_workers([listing.workers for listing in listings], statuses),
        )

    def staleness(self) -> Counter[int]:
        """How many gradients, pushed shards that is, were how stale."""
        counts: Counter[int] = Counter()
        for histogram in self._ask("GetStaleness", pb.GetStalenessRequest()):
            for bucket in histogram.buckets:
                counts[bucket.staleness] += bucket.count
        return counts

    def _ask(self, method: str, request: Any) -> list[Any]:
        return [control.call(method, request, timeout_seconds=CALL_SECONDS) for control in self._controls]

    def __enter__(self) -> ProgressReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for control in self._controls:
            control.__exit__(kind, error, trace)


def merge_workers(
    listings: Sequence[Sequence[pb.WorkerInfo]], statuses: Sequence[pb.Status]
) -> tuple[WorkerProgress, ...]:
    """Each worker once, with what all servers know of it."""
    found: dict[str, list[tuple[pb.WorkerInfo, int]]] = {}
    for listing, status in zip(listings, statuses, strict=True):
        for worker in listing:
            found.setdefault(worker.worker_id, []).append((worker, status.num_shards))
    return tuple(merge_worker(found[worker_id]) for worker_id in sorted(found))


def merge_worker(known: Sequence[tuple[pb.WorkerInfo, int]]) -> WorkerProgress:
    """One worker from what each server knows, beside that server's number of shards."""
    infos = [info for info, _ in known]
    applied = [taken(info) for info in infos]
    losses = [info.scalars["loss"] for info in infos if "loss" in info.scalars]
    return WorkerProgress(
        worker_id=infos[0].worker_id,
        state=infos[0].state,
        steps=max(info.clock for info in infos),
        loss=losses[-1] if losses else None,
        # A push has a part for each shard; before the run is initialised there are none.
        pushes=max((taken(info) / num_shards for info, num_shards in known if num_shards), default=0.0),
        staleness_mean=mean([info.staleness_mean for info in infos], applied),
        staleness_max=max(info.staleness_max for info in infos),
        rate_scale_mean=mean([info.rate_scale_mean for info in infos], applied),
    )


def taken(counts: pb.Status | pb.WorkerInfo) -> int:
    """The pushed shards that became part of an update, or wait for theirs."""
    return counts.pushes_applied + counts.pushes_pending


def mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """The mean of means over so many things each; 0 over nothing."""
    total = sum(counts)
    return sum(value * count for value, count in zip(values, counts, strict=True)) / total if total else 0.0
