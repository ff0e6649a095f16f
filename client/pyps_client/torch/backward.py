"""overlap="backward": a push that is sent, a shard at a time, while the backward pass still computes.

One backward pass is one push. It begins with the first gradient and ends within the step, which sends the shards that
were not complete before. Gradients that were sent must not have changed by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pyps_client.early_shards import EarlyShards
from pyps_client.fork import ForkGuard
from pyps_client.log import logger
from pyps_client.torch.gradients import Minibatch
from pyps_client.torch.layout import several
from pyps_client.torch.schedule import Due
from pyps_client.torch.steps import Off, Steps
from pyps_client.transport.threads import Future, Threads
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import InvalidArgument

# About how many numbers of each gradient are compared to find changes.
NUM_SAMPLES = 16


class Backward(Off):
    """The push of the present backward pass. Autograd's threads report gradients; all else happens in a step."""

    may_alias = False

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._layout = layout = steps.layout
        self._partition = partition = steps.session.partition
        self._gradients = steps.gradients
        self._guard = ForkGuard()
        self._threads = Threads()
        self._shards_of: list[list[int]] = [[] for _ in layout.parameters]
        for shard in partition.shards:
            for piece in partition.pieces(shard.shard_id):
                self._shards_of[piece.tensor_index].append(shard.shard_id)
        # Autograd has one thread per device.
        self._lock = threading.Lock()
        # Guarded by _lock: a pass has begun; its shards, unless it is pushed whole; its number of examples.
        self._has_begun = False
        self._early: EarlyShards | None = None
        self._example_count = 0
        # How many gradients each shard still lacks, and events after which a device's gradients are on the host.
        self._missing: dict[int, int] = {}
        self._events: dict[int, list[torch.cuda.Event]] = {}
        # Gradients that are ready to be sent, with torch's count of their writes and some of their numbers.
        self._taken: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._pushing: Future[Sequence[Receipt]] | None = None
        # Weakly: the model may live longer than its optimizer.
        computed = weakref.WeakMethod(self._computed)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call, computed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(layout.parameters)
            if parameter.requires_grad
        ]

    @classmethod
    def possible_with(cls, session: Worker) -> type[Off]:
        if session.view.state.terms.clip_norm > 0:
            raise InvalidArgument(
                "overlap is 'backward', but the servers clip each push by its norm (--clip-norm), which nobody knows "
                "before all of it is computed: use overlap='step' or 'off'."
            )
        if session.goes_by_calls:
            return cls
        logger.info(
            "overlap is 'backward', but a server reads this worker's gradients in shared memory and takes a push as "
            "one: each push is sent in its step, whole, as with 'off'"
        )
        return Off

    def step(self, gradients: Minibatch, due: Due) -> None:
        early, pushing = self._early, self._pushing
        try:
            if early is None or pushing is None:
                super().step(gradients, due)
            else:
                self._seal(early, pushing, gradients)
                self._steps.push_and_pull(pushing.value)
        finally:
            self._end()

    def give_up(self) -> None:
        early, pushing = self._early, self._pushing
        self._end()
        if pushing is None:
            return
        pushing.wait()
        if early is not None and early.num_answered:
            logger.warning(
                "a backward pass was broken off, or no step() followed it: %d of %d shards were sent, as overlap is "
                "'backward', and count; the rest of its push is left out",
                *(early.num_answered, self._partition.num_shards),
            )
        pushing.value()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._early is not None:
            self._early.abandon()
        self._threads.close()

    def _end(self) -> None:
        """End the pass; nothing more of its push is sent."""
        early, self._early = self._early, None
        if early is not None:
            early.abandon()
            self._gradients.clear()
        self._taken, self._events = {}, {}
        self._has_begun = False

    def _computed(self, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that the backward pass has completed."""
        if self._guard.in_child:
            return
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                self._begin()
            gradient = parameter.grad
            # The step refuses sparse ones.
            if self._early is None or gradient is None or gradient.layout != torch.strided:
                return
            if index in self._taken:
                raise InvalidArgument(
                    f"A second gradient of {self._layout.model.tensors[index].name!r} was computed before step(), but "
                    "overlap='backward' had begun to send the first: call backward() once a step (on the sum of the "
                    "losses), and step() after each; zero_grad() of this optimizer goes before one that follows a pass "
                    "that was broken off. To accumulate, or to skip steps, or for checkpoint(..., "
                    "use_reentrant=True) around shared parameters, use overlap='step' or 'off'."
                )
            self._take(index, gradient)

    def _begin(self) -> None:
        """Begin to push on a thread what the pass computes, unless this minibatch is pushed within its step."""
        if self._pushing is not None:
            # An abandoned push still reads the numbers.
            self._pushing.wait()
        steps = self._steps
        steps.schedule.follow(steps.steps)
        if not steps.schedule.sends_early or steps.finished or self._gradients.minibatch_count or steps.torn:
            return
        # Before anything is sent, as in a step.
        if (check := steps.check_before()) is not None:
            check(steps.steps == 0)
        steps.written.check(is_first=steps.is_first)
        steps.is_first = False
        early = EarlyShards(self._partition, self._gradients.present, fits=self._gradients.fits, arrive=self._arrive)
        plan, parameters, session = steps.plan(pulls=True), steps.parameters, steps.session
        plan.early, plan.minibatch_count, plan.clock = early, 1, steps.steps + 1
        plan.example_count = self._example_count = steps.examples_in_batch or 0
        plan.base_versions = plan.newest_base_versions = steps.versions

        def exchange() -> Sequence[Receipt]:
            parameters.wait_until_free()
            return session.exchange(plan)

        self._missing = {shard.shard_id: 0 for shard in self._partition.shards}
        for parameter, shards in zip(self._layout.parameters, self._shards_of, strict=True):
            # A frozen parameter's gradient from before this pass is pushed too.
            if parameter.requires_grad or parameter.grad is not None:
                for shard_id in shards:
                    self._missing[shard_id] += 1
        self._early = early
        self._pushing = self._threads.submit(exchange)

    def _take(self, index: int, gradient: torch.Tensor) -> None:
        assert self._early is not None
        event = self._gradients.lay(index, gradient)
        self._taken[index] = gradient, gradient._version, _some_of(gradient)
        for shard_id in self._shards_of[index]:
            if event is not None:
                self._events.setdefault(shard_id, []).append(event)
            self._missing[shard_id] -= 1
            if self._missing[shard_id] == 0:
                self._early.complete(shard_id)

    def _arrive(self, shard_id: int) -> None:
        for event in self._events.get(shard_id, ()):
            event.synchronize()

    def _seal(self, early: EarlyShards, pushing: Future[Any], gradients: Minibatch) -> None:
        """Send the rest of the push that the backward pass began, and wait for its end."""
        steps = self._steps
        if self._example_count != (steps.examples_in_batch or 0):
            raise InvalidArgument(
                f"examples_in_batch was set to {steps.examples_in_batch or 0} too late: with overlap='backward' "
                f"gradients are sent from the first on, as those of {self._example_count} examples. Set it before "
                "backward()."
            )
        if steps.rate_changes():
            raise InvalidArgument(
                "The learning rate or the momentum was changed between backward() and step(), but with "
                "overlap='backward' gradients were sent at the old one: change it before backward()."
            )
        if changed := self._changed(gradients):
            raise InvalidArgument(
                f"Gradients ({several(changed)}) were changed between backward() and step(), as clip_grad_norm_, "
                "GradScaler.unscale_ or zero_grad do, but overlap='backward' had begun to send them: this step was not "
                "taken whole. Change gradients no more, or use overlap='step' or 'off'."
            )
        early.seal()
        pushing.wait()
        if not early.spoiled:
            steps.finite.passed()
        else:
            if early.num_answered:
                logger.warning(
                    "%d of %d shards were sent before a gradient was found that is not finite, and count; the rest of "
                    "the push is left out",
                    *(early.num_answered, self._partition.num_shards),
                )
            steps.finite.leave_out(gradients)
        # A pull follows where nothing was sent.
        self._gradients.minibatch_count = int(pushing.error is not None or bool(early.sent))

    def _changed(self, gradients: Minibatch) -> list[str]:
        """Return the names of gradients that differ from the sent ones; take those that this pass did not compute."""
        changed = []
        for index, gradient in enumerate(gradients):
            if (taken := self._taken.get(index)) is not None:
                sent, version, numbers = taken
                same = gradient is sent and sent._version == version and torch.equal(_some_of(sent), numbers)
            else:
                # This pass did not compute it: it is an older gradient, or the script's.
                same = gradient is None or all(self._missing[shard_id] > 0 for shard_id in self._shards_of[index])
                if same and gradient is not None:
                    self._take(index, gradient)
            if not same:
                changed.append(self._layout.model.tensors[index].name)
        return changed


def _some_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return some numbers of a gradient. They show a write that torch does not count, such as GradScaler's to all."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // NUM_SAMPLES)].nan_to_num()


def _call(computed: weakref.WeakMethod[Any], index: int, parameter: torch.Tensor) -> None:
    if (method := computed()) is not None:
        method(index, parameter)
