"""A run's figures, numbers by name that users log while it trains, computed from its servers' reports."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyps_client.launch import Launch
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.common_pb2 import RUN_STATE_READY
from pyps_wire.inspector_pb2 import GetStatusRequest, ListWorkersReply, ListWorkersRequest, Status

# Servers answer these calls at once, however busy they are.
CALL_SECONDS = 20.0


class Answer(NamedTuple):
    status: Status
    workers: ListWorkersReply


def ask(address: str, launch: Launch) -> Answer:
    """Return a server's answer, from its control port. Raises LinkLost or a PypsError."""
    channel = GrpcChannel(address, launch.credentials, use_proxy=launch.use_proxy)
    try:
        status = channel.call("GetStatus", GetStatusRequest(), Status, timeout_seconds=CALL_SECONDS)
        workers = channel.call("ListWorkers", ListWorkersRequest(), ListWorkersReply, timeout_seconds=CALL_SECONDS)
        return Answer(status, workers)
    finally:
        channel.close()


class Figures:
    """Computes figures from answers; speeds and means are since the previous answers."""

    def __init__(self) -> None:
        # The previous sums, and their time, "at".
        self._before: Mapping[str, float] = {}
        # Whether a server no longer trains.
        self.over = False

    def of(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the figures by name; the first ones have no speeds and means."""
        statuses = [answer.status for answer in answers]
        self.over = any(status.state != RUN_STATE_READY for status in statuses)
        sums = defaultdict(float, at=time.monotonic())
        for status in statuses:
            tally, taken = status.tally, status.tally.pushes_applied + status.tally.pushes_pending
            sums["updates"] = max(sums["updates"], status.version_max)
            sums["examples"] = max(sums["examples"], status.examples)
            sums["taken"] += taken
            sums["staleness"] += tally.staleness_mean * taken
            sums["step_lost"] += tally.step_lost * taken
            sums["refused"] += tally.pushes_rejected - tally.pushes_dropped
        figures = {"updates": sums["updates"], "refused": sums["refused"]}
        figures["workers"] = float(max(status.workers_alive for status in statuses))
        if self._before:
            grown = {name: max(1e-9 if name == "at" else 0.0, sums[name] - self._before[name]) for name in sums}
            figures |= {f"{name}_per_second": grown[name] / grown["at"] for name in ("updates", "examples")}
            if grown["taken"]:
                figures |= {name: grown[name] / grown["taken"] for name in ("staleness", "step_lost")}
        self._before = sums
        figures |= {
            f"learning_rate/{rate.group}": rate.current for status in statuses for rate in status.learning_rates
        }
        # Reports of live workers, as "loss/worker-0", and their mean, as "loss".
        reports: dict[str, dict[str, float]] = defaultdict(dict)
        for worker in (worker for answer in answers for worker in answer.workers.workers if worker.state == "alive"):
            for name, value in worker.scalars.items():
                reports[name][f"{name}/{worker.worker_id}"] = value
        # A report cannot replace a figure of the same name.
        for name, values in reports.items():
            figures = {name: sum(values.values()) / len(values)} | values | figures
        return figures
