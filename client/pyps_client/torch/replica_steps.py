"""Downpour SGD's worker where several processes of a replica are one worker (Dean et al. 2012, sections 3 and 4.1).

Each process pushes and pulls the shards of its own parts, and all take the same steps. With each push the worker
agrees upon what servers want. The rest is decided here, by sums over the processes, in one order on all of them:

* A minibatch counts for all processes or for none: where one of them finds NaN, all leave it out.
* Numbers that several processes hold come to one of them, which hands them to the others before the next minibatch.
* With overlap a push or pull begins at the same minibatch on all processes, and is over once they have found, between
  two minibatches, that it is over on all. So all push sums of the same minibatches, and pull at the same ones. As with
  one process, shards of one pull may be of different versions.

Collective calls are made by the threads that train and by no other, or those of two threads would mix. An error that
ends one process ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyps_client.arrays import Observer
from pyps_client.push import Plan
from pyps_client.replica.dtensor import ModelCut
from pyps_client.replica.processes import Replica
from pyps_client.torch.gradients import Finite, all_fit, surely_fit
from pyps_client.torch.layout import Layout
from pyps_client.torch.overlap import Step
from pyps_client.torch.schedule import Due, Pace
from pyps_client.torch.steps import Minibatch, Off, Steps
from pyps_client.transport.threads import Future
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import RunFinished


class ReplicaStep(Step):
    """overlap="step" in a replica: its processes find together, as they gather a minibatch, what is over."""

    def collect(self) -> None:
        pass

    def _wait_for(self, future: Future[Any] | None) -> None:
        if future is not None and future is self.pushing:
            future.wait()
            # Who waits for a push goes by its answers.
            self._steps.session.meet()
        super()._wait_for(future)


class ReplicaSteps(Steps):
    """One process's steps. All processes of the replica call the same methods in the same order."""

    def __init__(
        self,
        worker: Worker,
        layout: Layout,
        *,
        pace: Pace,
        replica: Replica,
        cut: ModelCut,
        takes_local_steps: bool,
        **common: Any,
    ) -> None:
        """`takes_local_steps`: whether local rates are ever other than 0. `common`: of Steps."""
        super().__init__(worker, layout, pace=pace, overlap=ReplicaStep if pace.overlap == "step" else Off, **common)
        self.finite = Finite(layout.model, checks=False)
        self._replica = replica
        self._cut = cut
        self._takes_local_steps = takes_local_steps
        # Whether numbers have changed since copies were last handed on: so on all processes, or on none.
        self._brought = False

    def start(self) -> None:
        super().start()
        self._hand_on()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the whole model's present parameters by name, as an observer: other processes need not call it."""
        launch = self.session.launch
        launch = launch.with_(run_id=self.session.run_id, start_wait_seconds=launch.loss_wait_seconds)
        with Observer(launch=launch) as observer:
            return {name: torch.from_numpy(values) for name, values in observer.snapshot().items()}

    def gather(self, gradients: Minibatch, due: Due) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        # As they gather.
        fits = surely_fit(present, torch.float32) or all_fit(present, torch.float32)
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
            # Of a process without gradients too: the others' count for all.
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
            # Found here: a collective call of another thread would mix with this one's.
            plan.gradient_norm = 0.0
            if self.view.state.terms.clip_norm > 0:
                self.gradients.ready()
                plan.gradient_norm = self.session.norm(plan)
        return plan

    def take_pulled(self) -> bool:
        taken = super().take_pulled()
        self._brought = self._brought or taken
        return taken

    def _step(self, gradients: Minibatch) -> None:
        super()._step(gradients)
        self._hand_on()

    def _idle(self) -> None:
        super()._idle()
        self._hand_on()

    def _settle(self) -> None:
        super()._settle()
        self._hand_on()

    def _add(self, gradients: Minibatch, due: Due) -> None:
        super()._add(gradients, due)
        # A step between pulls moves the owners' numbers, not their copies.
        steps_locally = self.schedule.overlaps or not due.pull
        self._brought = self._brought or (self._takes_local_steps and steps_locally)

    def _exchange(self, *, pulls: bool, push: Callable[[], Sequence[Receipt]] | None = None) -> None:
        super()._exchange(pulls=pulls, push=push)
        if self.overlap.in_parallel:
            self.session.meet()

    def _hand_on(self) -> None:
        if self._brought:
            self._brought = False
            self._replica.spread(self._cut.arrangement.copies, self._cut.claimed.local)
            self.written.note()
