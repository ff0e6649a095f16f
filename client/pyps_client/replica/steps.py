"""Downpour SGD's worker where several processes of a replica are one worker (Dean et al. 2012, sections 3 and 4.1).

Each process pushes and pulls the shards of its own parts, and all take the same steps: what servers ask of a worker is
agreed upon by the worker, with each push. What is decided here, likewise by sums over the processes that all of them
make in the same order:

* A minibatch counts for all processes or for none: where one of them finds NaN, all leave it out.
* Numbers that several processes hold come to one of them, which hands them to the others before the next minibatch.
* What goes on beside the computation begins beside the same minibatch on all processes, and is over once they have
  found, between two minibatches, that it is over on all. So all push sums of the same minibatches, and the parameters
  that each brings into its part come from pulls that began and ended beside the same ones. As with one process, shards
  of one pull may be of different versions.

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
from pyps_client.torch.rates import RateChanges
from pyps_client.torch.schedule import Due, Pace
from pyps_client.torch.steps import Steps
from pyps_client.transport.threads import Future
from pyps_client.worker import Worker
from pyps_wire.errors import RunFinished


class ReplicaSteps(Steps):
    """One process's steps. All processes of the replica call the same methods in the same order."""

    def __init__(
        self,
        worker: Worker,
        layout: Layout,
        *,
        pace: Pace,
        local_rates: Callable[[], Sequence[float]],
        rate_changes: RateChanges,
        replica: Replica,
        cut: ModelCut,
        takes_local_steps: bool,
    ) -> None:
        """`takes_local_steps`: whether local rates are ever other than 0."""
        super().__init__(worker, layout, pace=pace, local_rates=local_rates, rate_changes=rate_changes)
        self._finite = Finite(layout.model, checks=False)
        self._replica = replica
        self._cut = cut
        self._takes_local_steps = takes_local_steps
        # Whether numbers have changed since copies were last handed on: so on all processes, or on none.
        self._brought = False

    def start(self) -> None:
        """Pulls the run's parameters into the model, before the first minibatch, once the replica may begin."""
        super().start()
        self._hand_on()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The servers' parameters as they are now, by name: the whole model, read as an observer.

        The other processes need not call it.
        """
        launch = self.session.launch
        launch = launch.with_(run_id=self.session.run_id, start_wait_seconds=launch.loss_wait_seconds)
        with Observer(launch=launch) as observer:
            return {name: torch.from_numpy(values) for name, values in observer.snapshot().items()}

    def _step(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        super()._step(gradients, example_count)
        self._hand_on()

    def _idle(self) -> None:
        super()._idle()
        self._hand_on()

    def _settle(self) -> None:
        super()._settle()
        self._hand_on()

    def _gather(self, gradients: Sequence[torch.Tensor | None], example_count: int, due: Due) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        # As they gather.
        fits = surely_fit(present, torch.float32) or all_fit(present, torch.float32)
        overlap = self._overlap
        busy: list[float] = []
        if overlap.is_used:
            pushed, pulled = overlap.over()
            pushing, pulling = overlap.pushing is not None and not pushed, overlap.pulling is not None and not pulled
            busy = [float(pushing), float(pulling)]
        refused, contributed, *busy = self._replica.all_reduce([float(not fits), float(bool(present)), *busy])
        if refused:
            self._finite.leave_out(gradients, for_others=fits)
        elif contributed:
            # Of a process without gradients too: the others' count for all.
            self._add(gradients, example_count, due)
        if overlap.is_used or refused or not (contributed and self._push_due):
            # No push may follow, with which the processes would agree on what they have heard.
            self.session.meet()
            if self.finished:
                # Here, on all: a push that is under way learns of it on some processes sooner than on others.
                raise RunFinished("The run is over.")
        if overlap.is_used:
            self._end(overlap.pushing is not None and not busy[0], overlap.pulling is not None and not busy[1])

    def _add(self, gradients: Sequence[torch.Tensor | None], example_count: int, due: Due) -> None:
        super()._add(gradients, example_count, due)
        # A step between pulls moves the owners' numbers, not their copies.
        steps_locally = self._schedule.overlaps or not due.pull
        self._brought = self._brought or (self._takes_local_steps and steps_locally)

    def _seal(self) -> bool:
        fits = super()._seal()
        if self._replica.all_reduce([float(not fits)])[0] == 0:
            return True
        self._gradients.clear()
        return False

    def _plan(self, *, pulls: bool) -> Plan:
        plan = super()._plan(pulls=pulls)
        if self._overlap.is_used:
            # Found here, as a thread beside this one may not: collective calls of two would mix.
            plan.gradient_norm = 0.0
            if self.session.clips:
                self._gradients.ready()
                plan.gradient_norm = self.session.norm(plan)
        return plan

    def _exchange(self, *, pulls: bool) -> None:
        super()._exchange(pulls=pulls)
        if self._overlap.is_used:
            self.session.meet()

    def _take_pulled(self) -> bool:
        taken = super()._take_pulled()
        self._brought = self._brought or taken
        return taken

    def _collect(self) -> None:
        """Nothing: what is over beside the computation the processes find together, as they gather a minibatch."""

    def _wait_for(self, future: Future[Any] | None) -> None:
        if future is not None and future is self._overlap.pushing:
            future.wait()
            # Who waits for a push goes by what was answered to it.
            self.session.meet()
        super()._wait_for(future)

    def _hand_on(self) -> None:
        """Brings the numbers that several processes hold from those that have new ones to the others."""
        if self._brought:
            self._brought = False
            self._replica.spread(self._cut.arrangement.copies, self._cut.claimed.local)
            self._written.note()
