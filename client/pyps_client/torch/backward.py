"""overlap="backward": a push that is sent, a shard at a time, while the backward pass still computes.

A step is one push. It begins with the first gradient of the step's last backward pass and ends within the step, which
sends the shards that were not complete before. How many passes a step has is learned, tensor by tensor.

By then gradients may have been clipped or unscaled. So servers hold the shards until the step tells the one factor by
which all gradients have changed; after any other change the step sends them whole, as with "off". In a loop that leaves
gradients alone shards are applied as they arrive, and gradients that were sent must not change.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pyps_client.early_shards import EarlyShards
from pyps_client.fork import ForkGuard
from pyps_client.log import logger
from pyps_client.torch.gradients import Minibatch, all_fit
from pyps_client.torch.schedule import Due, Settings
from pyps_client.torch.steps import Off, Steps
from pyps_client.transport.threads import Future, Threads
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import InvalidArgument

# Held gradients of few bits are scaled up by no more than this: residuals would grow from step to step.
SCALE_MAX = 1.5

# About how many numbers of each gradient are compared to find changes.
NUM_SAMPLES = 16
# So much of a gradient's norm float32 loses in the product with a factor, at most.
ROUNDING = 2.0**-22
# A sum of squares of less says little in float32.
TINY = 1e-30
# So many numbers are compared at a time, within a processor's cache.
PART = 1 << 17
# A factor as of GradScaler, by which gradients are multiplied before they are sent: float16 could not hold them.
LARGE_FACTOR = 64.0
# A loop that leaves gradients alone for so many steps is expected to go on so.
TRIALS = 3


class Backward(Off):
    """The push of the present step. Autograd's threads report gradients; all else happens in a step."""

    may_alias = False

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._layout = layout = steps.layout
        self._partition = partition = steps.session.partition
        self._gradients = steps.gradients
        # Whether servers hold shards until the step.
        self._holds = steps.rescales_gradients is not False
        # In how many further steps gradients must be left alone until they do not, and whether they were changed.
        self._trials = TRIALS if steps.rescales_gradients is None else 0
        self._touched = self._touched_now = False
        self.may_hand_out = not self._holds
        self._guard = ForkGuard()
        self._threads = Threads()
        self._shards_of: list[list[int]] = [[] for _ in layout.parameters]
        for shard in partition.shards:
            for piece in partition.pieces(shard.shard_id):
                self._shards_of[piece.tensor_index].append(shard.shard_id)
        # Autograd has one thread per device.
        self._lock = threading.Lock()
        # Guarded by _lock: how many gradients of each tensor were computed since the last step, and how many will be.
        self._computed_of = [0] * len(layout.parameters)
        self._expected_of = [1] * len(layout.parameters)
        # Whether the last step had fewer of one than expected.
        self._had_fewer = False
        # The last pass has begun; its shards, unless it is pushed whole; its number of examples.
        self._has_begun = False
        self._early: EarlyShards | None = None
        self._example_count = 0
        # How many gradients each shard still lacks, and events after which a device's gradients are on the host.
        self._missing: dict[int, int] = {}
        self._events: dict[int, list[torch.cuda.Event]] = {}
        # Gradients that are ready to be sent, with torch's count of their writes and some of their numbers.
        self._taken: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._pushing: Future[Sequence[Receipt]] | None = None
        # What gradients are multiplied by before they are sent: a power of two, as far as known the factor of the step.
        self._factor = 1.0
        # Reasons for pushes as with "off" that were logged.
        self._told: set[str] = set()
        # Weakly: the model may live longer than its optimizer.
        computed = weakref.WeakMethod(self._computed)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call, computed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(layout.parameters)
            if parameter.requires_grad
        ]

    @classmethod
    def possible_with(cls, session: Worker, settings: Settings) -> type[Off]:
        if session.view.state.terms.clip_norm > 0 and settings.rescales_gradients is False:
            raise InvalidArgument(
                "overlap is 'backward' and rescales_gradients is False, but the servers clip each push by its norm "
                "(--clip-norm), which nobody knows before all of it is computed: pass rescales_gradients=True."
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
            if early is not None and pushing is not None:
                if self._seal(early, gradients):
                    pushing.wait()
                    self._check_finite(early, gradients)
                    # A pull follows where nothing was sent.
                    self._gradients.minibatch_count = int(pushing.error is not None or bool(early.sent))
                    return self._steps.push_and_pull(pushing.value)
                # Nothing of it counts.
                early.abandon()
            if pushing is not None:
                # Its thread reads the numbers that are written now.
                pushing.wait()
            if early is not None:
                self._gradients.clear()
            super().step(gradients, due)
        finally:
            self._learn()
            self._end()

    def give_up(self) -> None:
        early, pushing = self._early, self._pushing
        self._end()
        if pushing is None:
            return
        pushing.wait()
        if early is not None and early.num_answered and not self._holds:
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
        self._computed_of = [0] * len(self._computed_of)

    def _learn(self) -> None:
        """Learn from this step how many gradients each tensor has in a step, and whether the loop changes them.

        A larger number is believed at once, a smaller one when it comes in two steps in a row.
        """
        pairs = [
            (had or expected, expected) for had, expected in zip(self._computed_of, self._expected_of, strict=True)
        ]
        has_fewer = any(had < expected for had, expected in pairs)
        if self._holds and (self._had_fewer or any(had > expected for had, expected in pairs)):
            self._expected_of = [had for had, _ in pairs]
            has_fewer = False
        self._had_fewer = has_fewer
        if self._trials:
            self._touched = self._touched_now or self._steps.view.state.terms.clip_norm > 0
            self._trials = 0 if self._touched else self._trials - 1
            self._holds = self._touched or self._trials > 0
            self.may_hand_out = not self._holds
        self._touched_now = False

    def _computed(self, index: int, parameter: torch.Tensor) -> None:
        """Take a gradient that the backward pass has completed."""
        if self._guard.in_child:
            return
        with self._lock:
            gradient = parameter.grad
            if self._holds and index in self._taken and self._taken[index][0] is not gradient:
                # The gradients were cleared without a step: a new one begins.
                self._end()
            self._computed_of[index] += 1
            if self._computed_of[index] < self._expected_of[index]:
                return
            if not self._has_begun:
                self._has_begun = True
                self._begin()
            # The step refuses sparse ones.
            if self._early is None or gradient is None or gradient.layout != torch.strided:
                return
            if self._holds and self._early.is_over:
                return
            if index in self._taken and self._holds:
                # The step sends the sum.
                self._touched_now = True
                self._early.abandon()
            elif index in self._taken:
                raise InvalidArgument(
                    f"A second gradient of {self._layout.model.tensors[index].name!r} was computed before step(), but "
                    "overlap='backward' had begun to send the first: call backward() once a step (on the sum of the "
                    "losses), and step() after each; zero_grad() of this optimizer goes before one that follows a pass "
                    "that was broken off. To accumulate, or to skip steps, or for checkpoint(..., "
                    "use_reentrant=True) around shared parameters, pass rescales_gradients=True."
                )
            else:
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
        terms = steps.view.state.terms
        if terms.clip_norm > 0 and not self._holds:
            return
        # Elsewhere a push in the step takes no longer: its parameters come while it goes.
        if self._touched and not terms.current_version_only:
            return
        if self._holds and not steps.session.holds_pushes:
            self._tell("a server's software is too old for it")
            return
        # Before anything is sent, as in a step.
        if (check := steps.check_before()) is not None:
            check(steps.steps == 0)
        steps.written.check(is_first=steps.is_first)
        steps.is_first = False
        gathered = self._gradients
        early = EarlyShards(
            self._partition, gathered.present, fits=gathered.fits, arrive=self._arrive, held=self._holds
        )
        self._plan = plan = steps.plan(pulls=True)
        parameters, session = steps.parameters, steps.session
        plan.early, plan.minibatch_count, plan.clock = early, 1, steps.steps + 1
        plan.example_count = self._example_count = steps.examples_in_batch or 0
        plan.base_versions = plan.newest_base_versions = steps.versions

        def exchange() -> Sequence[Receipt]:
            parameters.wait_until_free()
            try:
                return session.exchange(plan)
            finally:
                if early.held and not early.is_sealed:
                    session.discard(plan)

        self._missing = {shard.shard_id: 0 for shard in self._partition.shards}
        for parameter, shards in zip(self._layout.parameters, self._shards_of, strict=True):
            # A frozen parameter's gradient from before this pass is pushed too.
            if parameter.requires_grad or parameter.grad is not None:
                for shard_id in shards:
                    self._missing[shard_id] += 1
        self._pushing = Future(exchange)
        try:
            self._threads.start(self._pushing)
            self._early = early
        except BaseException:
            # Ctrl-C: it may run already, and would wait for gradients.
            early.abandon()
            raise

    def _take(self, index: int, gradient: torch.Tensor, *, factor: float | None = None) -> None:
        assert self._early is not None
        event = self._gradients.lay(index, gradient, factor=self._factor if factor is None else factor)
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

    def _seal(self, early: EarlyShards, gradients: Minibatch) -> bool:
        """Send the rest of the push, and its scale where servers hold it; return False where all must be sent anew."""
        steps = self._steps
        if steps.rate_changes():
            raise InvalidArgument(
                "The learning rate or the momentum was changed between backward() and step(), but with "
                "overlap='backward' gradients were sent at the old one: change it before backward()."
            )
        if early.held and early.is_over and not early.spoiled:
            # A second gradient was added to one that was sent.
            return False
        scale, reason = self._scale_of(gradients), ""
        if early.held and early.spoiled:
            # A number was too large at the last factor, or is not finite: the step that sends all anew finds out which.
            return False
        if self._example_count != (steps.examples_in_batch or 0):
            reason = "examples_in_batch was set after backward()"
        elif scale is None:
            reason = "gradients were changed between backward() and step()"
            reason += ", and not all by one factor" if early.held else ""
        elif scale > SCALE_MAX and steps.session.carries_residuals:
            # The residual was encoded with them, and would be applied that many times.
            reason = "gradients grew before step(), and with them what earlier encodings had left out"
        if reason and not early.held:
            raise InvalidArgument(
                f"overlap='backward' had begun to send gradients, but {reason}: this step was not taken whole. Do so "
                "before backward(), or pass rescales_gradients=True, as for clip_grad_norm_ or GradScaler.unscale_."
            )
        if reason or scale is None:
            self._tell(reason)
            return False
        if not early.held:
            early.seal()
            return True
        unsent = [shard.shard_id for shard in self._partition.shards if shard.shard_id not in early.sent]
        rest = {piece.tensor_index for shard_id in unsent for piece in self._partition.pieces(shard_id)}
        sums = self._gradients.sums()
        if not all_fit([each for index in rest if (each := sums[index]) is not None], self._gradients.wire_dtype):
            return False
        clips = steps.view.state.terms.clip_norm > 0
        early.seal(scale=scale, norm=scale * steps.session.norm(self._plan) if clips else 0.0)
        return True

    def _check_finite(self, early: EarlyShards, gradients: Minibatch) -> None:
        if not early.spoiled:
            self._steps.finite.passed()
            return
        if early.num_answered:
            logger.warning(
                "%d of %d shards were sent before a gradient was found that is not finite, and count; the rest of the "
                "push is left out",
                *(early.num_answered, self._partition.num_shards),
            )
        self._steps.finite.leave_out(gradients)

    def _scale_of(self, gradients: Minibatch) -> float | None:
        """Return the factor from the gradients that were sent to these; None where there is none, or servers hold none.

        Take the gradients that this pass did not compute.
        """
        then, now, rest, same = [], [], [], True
        for index, gradient in enumerate(gradients):
            if (taken := self._taken.get(index)) is not None:
                if gradient is None or gradient.shape != taken[0].shape:
                    return None
                then.append(taken[2])
                now.append(_some_of(gradient))
                same = (
                    same and gradient is taken[0] and gradient._version == taken[1] and torch.equal(now[-1], then[-1])
                )
            elif gradient is not None:
                if gradient.layout != torch.strided or any(self._missing[each] <= 0 for each in self._shards_of[index]):
                    return None
                rest.append((index, gradient))
        self._touched_now = self._touched_now or not same
        factor = 1.0 if same else _ratio(now, then)
        if factor is None or not (same or self._holds):
            return None
        scale, self._factor = factor / self._factor, _power_of_two(factor)
        sums = self._gradients.sums()
        if not (same and scale == 1.0) and not all(
            _is_product(gradient, sent, scale)
            for index, gradient in enumerate(gradients)
            if index in self._taken and gradient is not None and (sent := sums[index]) is not None
        ):
            return None
        for index, gradient in rest:
            self._take(index, gradient, factor=1.0 / scale)
        return scale

    def _tell(self, reason: str) -> None:
        """Log, once for each reason, that a push goes as with "off"."""
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(
                "overlap is 'backward', but %s: such a step sends its gradients anew, whole, as with 'off'", reason
            )


def _some_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return some numbers of a gradient. They show a write that torch does not count, such as GradScaler's to all."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // NUM_SAMPLES)].nan_to_num()


def _ratio(now: Sequence[torch.Tensor], then: Sequence[torch.Tensor]) -> float | None:
    """Return the factor from some numbers of gradients to the same later; None where they tell none.

    The largest numbers weigh most. A power of two comes out exactly.
    """
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(now, then, strict=True)]
    squares = math.fsum(float(b @ b) for _, b in pairs)
    factor = math.fsum(float(a @ b) for a, b in pairs) / squares if 0 < squares < math.inf else 0.0
    return factor if 0 < factor < math.inf else None


def _power_of_two(factor: float) -> float:
    """Return the power of two next to a large or small factor; 1 for others, as of clip_grad_norm_."""
    if 1 / LARGE_FACTOR <= factor <= LARGE_FACTOR:
        return 1.0
    return 2.0 ** round(math.log2(factor))


def _is_product(gradient: torch.Tensor, sent: torch.Tensor, scale: float) -> bool:
    """Return whether a gradient is what was sent, times the scale, up to the rounding of float32."""
    gradient, sent = gradient.detach().reshape(-1), sent.reshape(-1)
    if scale == 1.0:
        return torch.equal(gradient.float(), sent)
    lost = size = 0.0
    for part, of_sent in zip(torch.split(gradient, PART), torch.split(sent, PART), strict=True):
        difference = torch.sub(part.float(), of_sent, alpha=scale)
        lost += torch.dot(difference, difference).item()
        size += torch.dot(part.float(), part.float()).item()
    if not TINY < size < math.inf:
        return torch.equal(gradient.float(), sent * scale)
    return lost <= (ROUNDING**2 if gradient.dtype.itemsize >= 4 else 0.0) * size


def _call(computed: weakref.WeakMethod[Any], index: int, parameter: torch.Tensor) -> None:
    if (method := computed()) is not None:
        method(index, parameter)
