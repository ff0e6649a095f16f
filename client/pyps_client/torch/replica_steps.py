"""Downpour SGD's worker where several processes of a replica are one worker (Dean et al. 2012, sections 3 and 4.1).

Each process pushes and pulls the shards of its own parts, and all take the same steps. With each push the worker
agrees upon the servers' terms. The rest is decided here, by sums over the processes, in one order on all of them:

* All processes take a minibatch or none does: where one of them finds NaN, all leave it out.
* Gradients of numbers that several processes hold are summed on one process, which sends the new numbers to the others
  before the next minibatch.
* With overlap a push or pull begins at the same minibatch on all processes, and ends between two minibatches, once all
  have found that it has ended on all. So all push sums of the same minibatches, and pull at the same ones. As with one
  process, shards of one pull may be of different versions.

Only the threads that train make collective calls, or those of two threads would mix. An error that ends one process
ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyps_client.arrays import Observer
from pyps_client.push import Plan
from pyps_client.replica.dtensor import ModelCut
from pyps_client.replica.processes import Replica
from pyps_client.torch.gradients import Minibatch, all_fit
from pyps_client.torch.layout import Layout
from pyps_client.torch.overlap import Step
from pyps_client.torch.schedule import Due, Settings
from pyps_client.torch.steps import Off, Steps
from pyps_client.transport.threads import Future
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import RunFinished


class ReplicaStep(Step):
    """overlap="step" in a replica: as its processes gather a minibatch, they find together what has ended."""

    def collect(self) -> None:
        pass

    def _wait_for(self, future: Future[Any] | None) -> None:
        if future is not None and future is self.pushing:
            future.wait()
            # The state of the run follows from the push's answers.
            self._steps.session.meet()
        super()._wait_for(future)


class ReplicaSteps(Steps):
    """One process's steps. All processes of the replica call the same methods in the same order."""

    def __init__(
        self,
        worker: Worker,
        layout: Layout,
        settings: Settings,
        *,
        replica: Replica,
        cut: ModelCut,
        takes_local_steps: bool,
        **common: Any,
    ) -> None:
        """`takes_local_steps`: False where all local rates are always 0. `common`: of Steps."""
        super().__init__(worker, layout, settings, overlap=ReplicaStep if settings.overlap == "step" else Off, **common)
        self._replica = replica
        self._cut = cut
        self._takes_local_steps = takes_local_steps
        # True where numbers have changed since copies were last sent: the same on all processes.
        self._changed = False

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the whole model's present parameters by name, as an observer: other processes need not call it."""
        launch = self.session.launch
        launch = launch.with_(run_id=self.session.run_id, start_wait_seconds=launch.loss_wait_seconds)
        with Observer(launch=launch) as observer:
            return {name: torch.from_numpy(values) for name, values in observer.snapshot().items()}

    def gather(self, gradients: Minibatch, due: Due) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        # They gather in float32.
        fits = all_fit(present, torch.float32)
        overlap = self.overlap
        busy: list[float] = []
        if isinstance(overlap, Step):
            pushed, pulled = overlap.over()
            pushing, pulling = overlap.pushing is not None and not pushed, overlap.pulling is not None and not pulled
            busy = [float(pushing), float(pulling)]
        refused, contributed, *busy = self._replica.all_reduce([float(not fits), float(bool(present)), *busy])
        if refused:
            self.finite.leave_out(gradients, for_others=fits)
        elif contributed:
            # Where only other processes have gradients too: all count the same minibatches.
            self._add(gradients, due)
        if overlap.in_parallel or refused or not (contributed and self.push_due):
            # No push may follow, with which the processes would agree on the servers' answers.
            self.session.meet()
            if self.finished:
                # Here, on all: a push that is under way learns of it on some processes sooner than on others.
                raise RunFinished("The run is over.")
        if isinstance(overlap, Step):
            overlap.end(overlap.pushing is not None and not busy[0], overlap.pulling is not None and not busy[1])

    def seal(self) -> bool:
        fits = super().seal()
        if self._replica.all_reduce([float(not fits)])[0] == 0:
            return True
        self.gradients.clear()
        return False

    def plan(self, *, pulls: bool) -> Plan:
        plan = super().plan(pulls=pulls)
        if self.overlap.in_parallel:
            # Computed here: a collective call of another thread would mix with this one's.
            plan.gradient_norm = 0.0
            if self.view.state.terms.clip_norm > 0:
                self.gradients.ready()
                plan.gradient_norm = self.session.norm(plan)
        return plan

    def take_pulled(self) -> bool:
        taken = super().take_pulled()
        self._changed = self._changed or taken
        return taken

    def _add(self, gradients: Minibatch, due: Due) -> None:
        super()._add(gradients, due)
        # A step between pulls moves the owners' numbers, not their copies.
        steps_locally = self.schedule.overlaps or not due.pull
        self._changed = self._changed or (self._takes_local_steps and steps_locally)

    def _exchange(self, *, pulls: bool, push: Callable[[], Sequence[Receipt]] | None = None) -> None:
        super()._exchange(pulls=pulls, push=push)
        if self.overlap.in_parallel:
            self.session.meet()

    def send_copies(self) -> None:
        if self._changed:
            self._changed = False
            self._replica.spread(self._cut.arrangement.copies, self._cut.claimed.local)
