"""Downpour SGD's worker (Dean et al. 2012, section 4.1, appendix algorithm 1.1): when to push, pull, step locally.

The appendix's pseudo-code lets its threads race; what is done about it:

* A push begins after every `push_every` minibatches, each carrying so many; with compat="paper" the literal
  test `step % push_every == 0` pushes the first minibatch alone.
* Gradients are swapped out with their buffer, and gathering goes on in the other while a push is under way:
  the sum of all pushed payloads is the sum of all computed gradients.
* Pulled parameters land in a buffer of their own and enter the model between minibatches only.
* They may lack this worker's own gradients that are still under way, as in the paper.
* The first pull is over before the first minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pyps_client.finite import FiniteGuard
from pyps_client.torch.flat_buffers import GradientBuffer, ParameterBuffer, all_finite
from pyps_client.torch.layout import Layout
from pyps_client.torch.overlap import BlockingLink, Link, SessionLike, ThreadedLink
from pyps_wire.common_pb2 import REASON_FINISHED, Receipt
from pyps_wire.errors import BadRequest, RunFinished

# With overlap, how many pushes' worth of minibatches may gather, and how many pulls may be missed, before the
# worker waits for the one under way. A worker that ran on without bound would at last push a sum that no rate
# was meant for.
BEHIND_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """After which minibatches to push and before which to pull."""

    # Minibatches summed in a push (the paper's n_push), and minibatches between pulls (n_fetch).
    push_every: int = 1
    pull_every: int = 1
    # "off": the worker waits for each. "step": both go on beside the computation, on threads.
    overlap: str = "off"
    # "paper": the appendix's literal timing. None: every push carries push_every minibatches.
    compat: str | None = None

    def __post_init__(self) -> None:
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name} is {value!r}; expected a whole number of minibatches, 1 or more.")
        if self.overlap not in ("off", "step"):
            raise BadRequest(f"overlap is {self.overlap!r}; expected 'off' or 'step'.")
        if self.compat not in (None, "paper"):
            raise BadRequest(f"compat is {self.compat!r}; expected None or 'paper'.")

    def push_after(self, step: int) -> bool:
        """True when minibatch number `step`, from 0, is to be followed by a push."""
        return (step if self.compat == "paper" else step + 1) % self.push_every == 0

    def pull_before(self, step: int) -> bool:
        """True when minibatch number `step` is to be preceded by a pull."""
        return step % self.pull_every == 0


class Downpour:
    """One worker's steps: gathers gradients, pushes, pulls, and steps locally in between. Used by one thread."""

    def __init__(
        self,
        session: SessionLike,
        layout: Layout,
        *,
        schedule: Schedule,
        codec: str = "float32",
        local_learning_rates: Sequence[float],
    ) -> None:
        self._session = session
        self._layout = layout
        self._schedule = schedule
        # The size of a local step, one a parameter group; zero for none.
        self._rates = tuple(local_learning_rates)
        self._gradients = GradientBuffer(layout, codec)
        self.parameters = ParameterBuffer(layout)
        self._link: Link = BlockingLink(session, self.parameters)
        if schedule.overlap == "step":
            self._link = ThreadedLink(session, self.parameters, GradientBuffer(layout, codec))
        # Versions of the parameters in the model.
        self._versions: Mapping[int, int] = {}
        self._push_due = False
        self._pull_due = False
        self._steps_since_pull = 0
        self._minibatch_guard = FiniteGuard()
        self._payload_guard = FiniteGuard()
        self._finished = False
        self._settled = False
        # Minibatches so far.
        self.steps = 0

    @property
    def finished(self) -> bool:
        """True when the run is over and takes no more gradients."""
        return self._finished or self._session.finished

    @property
    def receipts(self) -> Sequence[Receipt]:
        """The servers' answers to the newest push that was answered."""
        return self._link.receipts

    @property
    def skipped(self) -> int:
        """Minibatches and sums of minibatches that were left out because they were not finite."""
        return self._minibatch_guard.skips_total + self._payload_guard.skips_total

    def start(self) -> None:
        """Pulls the run's parameters into the model, before the first minibatch."""
        self._link.pull()
        self._link.wait_for_pull()
        self._take_pulled()

    def step(self, gradients: Sequence[torch.Tensor | None], *, example_count: int = 0) -> None:
        """Takes one minibatch's gradients, one entry a parameter; None where there is none."""
        try:
            self._step(gradients, example_count)
        except RunFinished:
            self._finished = True
        if self.finished and not self._settled:
            self._settle()

    def flush(self) -> None:
        """Pushes what has gathered and waits for the answer."""
        try:
            self._link.wait_for_push()
            if self._gradients.minibatch_count and not self.finished:
                self._push()
                self._link.wait_for_push()
        except RunFinished:
            self._finished = True

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The servers' parameters as they are now, by name. The model keeps its own until the next pull."""
        self._link.wait_for_pull()
        self._link.refresh()
        return self.parameters.tensors()

    def close(self) -> None:
        """Ends the link's threads."""
        self._link.close()

    def _settle(self) -> None:
        """Brings the finished run's parameters into the model."""
        self._settled = True
        self.flush()
        self._link.wait_for_pull()
        self._link.take_pulled()
        self._link.pull()
        self._link.wait_for_pull()
        self._take_pulled()

    def _step(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        self._link.raise_error()
        step = self.steps
        self.steps = self._session.clock = step + 1
        if self._accepts(gradients):
            self._gradients.add(gradients, versions=self._versions, example_count=example_count)
            self._step_locally(gradients)
        self._push_due = self._push_due or self._schedule.push_after(step)
        self._push_if_due()
        self._pull_due = self._pull_due or self._schedule.pull_before(step + 1) or self._session.pull_needed
        self._steps_since_pull += 1
        self._pull_if_due()
        self._finished = self._finished or any(receipt.reason == REASON_FINISHED for receipt in self.receipts)

    def _push_if_due(self) -> None:
        if self._gradients.minibatch_count >= BEHIND_MAX * self._schedule.push_every:
            self._link.wait_for_push()
        if self._push_due and self._link.can_push():
            self._push_due = False
            if self._gradients.minibatch_count:
                self._push()

    def _push(self) -> None:
        if self._gradients.seal():
            self._payload_guard.passed()
            self._gradients = self._link.push(self._gradients)
            return
        count = self._gradients.minibatch_count
        self._gradients.clear(overflowed=True)
        self._payload_guard.skipped(f"{count} minibatches, summed and converted for the wire,", (), math.inf)

    def _pull_if_due(self) -> None:
        if self._steps_since_pull >= BEHIND_MAX * self._schedule.pull_every:
            self._link.wait_for_pull()
        self._take_pulled()
        if self._pull_due and self._link.can_pull():
            self._pull_due = False
            self._link.pull()
            # A blocking pull is there already.
            self._take_pulled()

    def _take_pulled(self) -> None:
        versions = self._link.take_pulled()
        if versions is not None:
            self.parameters.write()
            self._versions = versions
            self._steps_since_pull = 0

    def _accepts(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """True when there is a gradient and all of it is finite."""
        given = [gradient for gradient in gradients if gradient is not None]
        for tensor, gradient in zip(self._layout.model.tensors, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise BadRequest(
                    f"The gradient of {tensor.name!r} has layout {gradient.layout}; servers take dense "
                    f"gradients only: make the layer with sparse=False."
                )
        if not given:
            return False
        if all_finite(given):
            self._minibatch_guard.passed()
            return True
        self._minibatch_guard.skipped(*self._first_non_finite(gradients))
        return False

    def _first_non_finite(self, gradients: Sequence[torch.Tensor | None]) -> tuple[str, tuple[int, ...], float]:
        """Where the first NaN or infinity is: tensor, index, value."""
        for tensor, gradient in zip(self._layout.model.tensors, gradients, strict=True):
            if gradient is not None and not all_finite([gradient]):
                index = tuple(gradient.isfinite().logical_not().nonzero()[0].tolist())
                return tensor.name, index, float(gradient[index])
        raise AssertionError("all gradients are finite")

    @torch.no_grad()
    def _step_locally(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Moves the model by the worker's own gradient, until the next pull overwrites it."""
        if self._schedule.overlap == "off" and self._schedule.pull_before(self.steps):
            # The pull that follows overwrites it.
            return
        for block in self._layout.blocks:
            rate = self._rates[block.group]
            if rate == 0.0:
                continue
            for batch in block.batches:
                given = [(self._layout.parameters[index], gradients[index]) for index in batch]
                moved = [(parameter, gradient) for parameter, gradient in given if gradient is not None]
                if moved:
                    torch._foreach_add_(
                        [parameter for parameter, _ in moved],
                        [gradient for _, gradient in moved],
                        alpha=-rate,
                    )
