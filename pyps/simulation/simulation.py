"""A cluster in virtual time: workers with given compute times around a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.receipt import Outcome, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Store
from pyps.run.content import RunRecorder
from pyps.simulation.event import Event, Kind, Scheduler
from pyps.simulation.server import ServerPlan, VirtualServer
from pyps.simulation.worker import Compute, VirtualWorker, WorkerPlan


class Simulation:
    """Runs workers against a run in virtual time; equal inputs give equal events and equal bits."""

    def __init__(
        self,
        parameters: Sequence[Floats],
        settings: RuleSettings,
        behaviour: Behaviour,
        workers: Sequence[WorkerPlan],
        compute: Compute,
        *,
        server: ServerPlan | None = None,
        seed: int = 0,
        recorder: RunRecorder | None = None,
    ) -> None:
        """Make a shard of each of the parameters, with an update rule of these settings."""
        self.events: list[Event] = []
        # Answered pushes, and the accepted ones among them.
        self.num_pushes = self.num_taken = 0
        self._scheduler = Scheduler()
        self.server = VirtualServer(
            parameters,
            settings,
            behaviour,
            server or ServerPlan(),
            num_workers=len(workers),
            scheduler=self._scheduler,
            report=self._note,
            recorder=recorder,
        )
        self.workers = [
            VirtualWorker(
                plan,
                compute,
                server=self.server,
                scheduler=self._scheduler,
                random=np.random.default_rng([seed, index]),
            )
            for index, plan in enumerate(workers)
        ]

    @property
    def shards(self) -> list[Store]:
        """The run's shards, in the order of the parameters."""
        return list(self.server.shards.values())

    @property
    def now(self) -> float:
        return self._scheduler.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have an action called at a time, for example one that pauses a shard."""
        self._scheduler.at(time, action)

    def run(self, *, seconds: float = float("inf"), pushes: int | None = None) -> None:
        """Run until that time, until so many pushes are accepted, or until no action is left."""
        while self._scheduler.next_time <= seconds and (pushes is None or self.num_taken < pushes):
            if not self._scheduler.step():
                return

    def receipts(self, shard_id: int | None = None) -> list[Receipt]:
        """Return the receipts of all pushes, or of a shard's, in the order of time."""
        receipts = (event.receipt for event in self.events if event.receipt is not None)
        return [receipt for receipt in receipts if shard_id is None or receipt.shard_id == shard_id]

    def trace(self) -> str:
        return "".join(f"{event}\n" for event in self.events)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.kind is Kind.PUSH and event.receipt is not None:
            self.num_pushes += 1
            self.num_taken += event.receipt.outcome != Outcome.REJECTED
