"""Rounds of local training: what several steps of a torch optimizer changed is one gradient for the servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pyps_client.data.portions import Stepper
from pyps_client.pull import LeaseCall
from pyps_client.torch.schedule import Due
from pyps_client.torch.steps import Steps
from pyps_client.transport.threads import Future, Threads
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from pyps_wire.work_pb2 import LeaseReply

# With sync_every="auto": the steps of the slowest worker's rounds, and how many times as many another worker may take.
AUTO_STEPS = 16
FASTER_MAX = 16


class Pace:
    """How many steps a round has. With "auto" it is in proportion to the worker's speed, so that nobody waits long.

    A worker that waited for others takes half of the steps for which it waited more in its next round. The worker that
    came last takes fewer, down to AUTO_STEPS. Where nobody waits (async) all rounds have AUTO_STEPS.
    """

    def __init__(self, sync_every: int | str) -> None:
        self._adapts = sync_every == "auto"
        self.steps = sync_every if isinstance(sync_every, int) else AUTO_STEPS
        # How long an exchange took that waited for no other worker; 0 until there was one.
        self._alone_seconds = 0.0

    def note(self, *, step_seconds: float, exchange_seconds: float, came_last: bool) -> None:
        """Note a whole round: the mean time of its steps, how long its exchange took, and whether others waited."""
        if not self._adapts:
            return
        if came_last:
            self._alone_seconds = exchange_seconds
            self.steps = max(AUTO_STEPS, self.steps - max(1, self.steps // AUTO_STEPS))
        else:
            self._alone_seconds = min(self._alone_seconds, exchange_seconds)
            waited = (exchange_seconds - self._alone_seconds) / max(step_seconds, 1e-9)
            self.steps = min(FASTER_MAX * AUTO_STEPS, self.steps + math.floor(waited / 2))


class Shadow(torch.nn.Module):
    """A module with the names of another's and tensors of its own: what servers hold of that model. It never runs."""

    def __init__(
        self,
        module: torch.nn.Module,
        twins: dict[torch.Tensor, Any],
        made: dict[torch.nn.Module, torch.nn.Module],
    ) -> None:
        """`twins`: the tensors to take in place of the module's; others are shared with it."""
        super().__init__()
        made[module] = self
        # The name of the class, under which workers compare their models.
        self.original_name = getattr(module, "original_name", type(module).__name__)
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        for own, theirs in ((self._parameters, module._parameters), (self._buffers, module._buffers)):
            own.update({name: None if each is None else twins.get(each, each) for name, each in theirs.items()})
        for name, part in module._modules.items():
            self._modules[name] = part and (made.get(part) or Shadow(part, twins, made))


class Rounds(Stepper):
    """One worker's rounds. A round's delta, held minus present, is pushed as a gradient by the steps of a Shadow.

    "Held" are the servers' parameters as last pulled, in the Shadow; "present" are the model's. Where rounds overlap,
    the exchange goes on beside the next steps: when the new parameters come, the model moves by their distance from
    what was sent, so that its delta since stays as it is. The model changes inside the methods only.
    """

    def __init__(self, pace: Pace, *, overlaps: bool) -> None:
        self.pace = pace
        self.examples_in_batch: int | None = None
        # Steps to the end of the round.
        self.steps_left = pace.steps
        self._steps_taken = self._steps_answered = 0
        # Steps and examples of the delta.
        self._taken = self._examples = 0
        self._threads = Threads() if overlaps else None
        self._exchange: Future[None] | None = None
        # The present values of the exchange under way, and the worker's steps when it began.
        self._sent: list[torch.Tensor] = []
        self._sent_steps = 0
        self._began = 0.0

    def begin(self, steps: Steps, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        """Begin with the servers' parameters. `twins`: the Shadow's tensors by the model's."""
        self._steps = steps
        present = {twin: tensor for tensor, twin in twins.items()}
        self._held = list(steps.layout.parameters)
        self._present = [present[twin] for twin in self._held]
        self._take()
        self._began = time.monotonic()

    @property
    def session(self) -> Worker:
        return self._steps.session

    @property
    def steps(self) -> int:
        return self._steps_taken

    @property
    def steps_answered(self) -> int:
        return self._steps_answered

    @property
    def finished(self) -> bool:
        return self._steps.finished

    @property
    def is_over(self) -> bool:
        """True once the model has the last parameters of a run that is over."""
        return self._steps.settled

    def stepped(self) -> None:
        """Count a step that the worker's optimizer has taken, and end the round where it is due."""
        self._steps_taken += 1
        self._taken += 1
        self._examples += self.examples_in_batch or 0
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.sync()
        elif self._exchange is not None and self._exchange.done():
            self.wait()

    def sync(self) -> None:
        """End the round now: push its delta, if there is one, and pull."""
        is_whole = self.steps_left <= 0
        began = time.monotonic()
        step_seconds = (began - self._began) / max(1, self._taken)
        self.wait()
        self.steps_left = self.pace.steps
        if self._taken:
            self._sent_steps = self._steps_taken
            delta = self._delta()
            if self._threads is not None:
                self._sent = [tensor.detach().clone() for tensor in self._present]
                self._exchange = self._threads.submit(partial(self._steps.step, delta))
            else:
                try:
                    self._steps.step(delta)
                finally:
                    self._take()
        self._began = time.monotonic()
        if is_whole:
            came_last = all(receipt.outcome == OUTCOME_APPLIED for receipt in self._steps.receipts)
            self.pace.note(step_seconds=step_seconds, exchange_seconds=self._began - began, came_last=came_last)
            self.steps_left = self.pace.steps

    def wait(self) -> None:
        """Take over the exchange that is under way, if any; raise its error."""
        if (exchange := self._exchange) is not None:
            # Ctrl-C may interrupt the wait, and the exchange goes on.
            exchange.wait()
            self._exchange = None
            try:
                exchange.value()
            finally:
                self._take()

    def leave(self, delivers: bool) -> None:
        """End, and leave the delta to the worker's last push, if there is one."""
        try:
            if delivers:
                self.wait()
                if self._taken and not self.finished:
                    self._steps.gather(self._delta(), Due(push=True, pull=True, ends_portion=False))
        finally:
            if self._threads is not None:
                self._threads.close()

    def tell_examples(self, count: int) -> None:
        self.examples_in_batch = count

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        return ask(None)

    def flush(self) -> None:
        self.sync()
        self.wait()

    def idle(self) -> None:
        self.flush()
        self._steps.idle()
        self._take()

    def finish(self) -> None:
        self.wait()
        self._taken = self._examples = 0
        self._steps.finish()
        self._take()

    def tell_over(self) -> None:
        self._steps.tell_over()

    @torch.no_grad()
    def _delta(self) -> Sequence[torch.Tensor]:
        """Return held minus present by parameter, and bring the model's shared buffers into the shadow."""
        steps, first_buffer = self._steps, self._steps.layout.first_buffer
        steps.local_steps, steps.examples_in_batch = self._taken, self._examples or None
        self._taken = self._examples = 0
        if buffers := self._held[first_buffer:]:
            torch._foreach_copy_(buffers, self._present[first_buffer:])
        return torch._foreach_sub(self._held[:first_buffer], self._present[:first_buffer])

    @torch.no_grad()
    def _take(self) -> None:
        """Bring the servers' parameters, as last pulled, into the model."""
        sent, self._sent = self._sent, []
        self._steps_answered = self._sent_steps
        if sent and not self._steps.settled:
            torch._foreach_add_(self._present, torch._foreach_sub(self._held, sent))
            for present, held in zip(self._present, self._held, strict=True):
                # The delta with such a number was left out, and no sum would ever make it finite.
                if present.is_floating_point():
                    torch.where(present.isfinite(), present, held, out=present)
        else:
            torch._foreach_copy_(self._present, self._held)
