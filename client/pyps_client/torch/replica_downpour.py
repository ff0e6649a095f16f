"""Downpour SGD's worker where several processes of a replica are one worker (Dean et al. 2012, sections 3 and 4.1).

Each process pushes and pulls the shards of its own parts, and all take the same steps: what servers ask of a worker is
agreed upon by the session, with each push. What is decided here, likewise by sums over the processes that all of them
make in the same order:

* A minibatch counts for all processes or for none: where one of them finds NaN, all leave it out.
* Numbers that several processes hold come to one of them, which hands them to the others before the next minibatch.
* What goes on beside the computation is over for all processes, or for none.

An error that ends one process ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pyps_client.observer import Observer
from pyps_client.session import Session
from pyps_client.torch.agreed_link import AgreedLink
from pyps_client.torch.cut_layout import Cut
from pyps_client.torch.downpour import Downpour
from pyps_client.torch.gradient_buffer import GradientBuffer
from pyps_client.torch.layout import Layout
from pyps_client.torch.looks import all_fit, surely_fit
from pyps_client.torch.pace import Pace
from pyps_client.torch.rates import RateChanges
from pyps_client.torch.replica import Replica
from pyps_client.torch.screen import Screen
from pyps_wire.errors import RunFinished


class ReplicaDownpour(Downpour):
    """One process's steps. All processes of the replica call the same methods in the same order."""

    def __init__(
        self,
        session: Session,
        layout: Layout,
        *,
        pace: Pace,
        local_rates: Callable[[], Sequence[float]],
        rate_changes: RateChanges,
        replica: Replica,
        cut: Cut,
        takes_local_steps: bool,
    ) -> None:
        """`takes_local_steps`: whether local rates are ever other than 0."""
        self._session: Session = session
        super().__init__(session, layout, pace=pace, local_rates=local_rates, rate_changes=rate_changes)
        self._beside = self._link if isinstance(self._link, AgreedLink) else None
        self._screen = Screen(layout.model, looks=False)
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
        launch = self._session.launch
        with Observer(
            launch.servers,
            run_id=self._session.run_id,
            token=launch.token,
            use_proxy=launch.use_proxy,
            start_wait_seconds=launch.loss_wait_seconds,
            loss_wait_seconds=launch.loss_wait_seconds,
        ) as observer:
            return {name: torch.from_numpy(values) for name, values in observer.snapshot().items()}

    def _threaded(self, spare: GradientBuffer) -> AgreedLink:
        return AgreedLink(self._session, self._parameters, spare)

    def _step(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        super()._step(gradients, example_count)
        self._hand_on()

    def _idle(self) -> None:
        super()._idle()
        self._hand_on()

    def _settle(self) -> None:
        super()._settle()
        self._hand_on()

    def _gather(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        # As they gather.
        fits = surely_fit(present, torch.float32) or all_fit(present, torch.float32)
        busy = [] if self._beside is None else self._beside.busy
        refused, contributed, *busy = self._replica.total([float(not fits), float(bool(present)), *busy])
        if self._beside is not None:
            self._beside.agree(busy)
        if refused:
            self._screen.leave_out(gradients, for_others=fits)
        elif contributed:
            # Of a process without gradients too: the others' count for all.
            self._add(gradients, example_count)
        if self._beside is not None or refused or not (contributed and self._push_due):
            # No push may follow, with which the processes would agree on what they have heard.
            self._session.meet()
            if self.finished:
                # Here, on all: a push that is under way learns of it on some processes sooner than on others.
                raise RunFinished("The run is over.")

    def _add(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        super()._add(gradients, example_count)
        # A step between pulls moves the owners' numbers, not their copies.
        self._brought = self._brought or (self._takes_local_steps and self._steps_locally())

    def _seal(self) -> bool:
        fits = super()._seal()
        if self._replica.total([float(not fits)])[0] == 0:
            return True
        self._gradients.clear()
        return False

    def _take_pulled(self) -> bool:
        taken = super()._take_pulled()
        self._brought = self._brought or taken
        return taken

    def _hand_on(self) -> None:
        """Brings the numbers that several processes hold from those that have new ones to the others."""
        if self._brought:
            self._brought = False
            self._replica.spread(self._cut.arrangement.copies, self._cut.claimed.local)
            self._written.note()
