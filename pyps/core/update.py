"""One update of a shard: the gradients that a protocol chose, weighed, summed and applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pyps import _kernels
from pyps.core.aggregation import Contribution, Part
from pyps.core.arrays import Floats
from pyps.core.gradient import Extent, Gradient, PayloadKind
from pyps.core.plan import Reply
from pyps.core.rules import SGD, Slots, UpdateRule, WeightedGradient
from pyps.core.staleness import Weighing


class Target(NamedTuple):
    """What an update changes: a shard's parameters and slots, through one rule at one version.

    `rate` is the step size before any gradient's staleness: the learning rate after schedules.
    """

    parameters: Floats
    slots: Slots
    rule: UpdateRule
    hyperparameters: Mapping[str, float]
    rate: float
    version: int


class Update(NamedTuple):
    """An update that was made, and of what."""

    # The version that it made.
    version: int
    # The step size before staleness: the learning rate after schedules.
    rate: float
    # What the staleness of all its gradients together left of that.
    update_scale: float
    parts: tuple[Part, ...]

    def weight(self, part: Part) -> float:
        """Returns the gradient's weight among those of the update."""
        return part.contribution.weighing.weight * part.share

    def rate_scale(self, part: Part) -> float:
        """Returns what staleness left of the step size for the gradient: 1 for all."""
        return part.contribution.weighing.rate_scale * self.update_scale


def apply_update(
    target: Target, parts: Sequence[Part], *, update_scale: float = 1.0, reply: Reply | None = None
) -> int:
    """Applies the parts as one update, in place; those that carry no numbers leave no trace.

    `update_scale` shortens the update as a whole, beside what each gradient's own staleness does to it. The new
    parameters are written to `reply`, in the same pass over memory where one kernel's call makes the whole update.

    Returns how many numbers of volatile gradients were left out, because they were no longer finite.
    """
    if len(parts) == 1 and parts[0].share == 1.0:
        contribution = parts[0].contribution
        if not contribution.gradient.extents and contribution.gradient.kind in _GRADIENTS:
            return _apply_one(target, contribution, update_scale, reply)
    if _whole_gradients(parts):
        return _apply_whole(target, parts, update_scale, reply)
    passes = list(_passes(target, parts, update_scale))
    whole = len(passes) == 1 and passes[0].place == slice(0, target.parameters.size)
    left_out = sum(step.make(reply if whole else None) for step in passes)
    if reply is not None and not whole:
        _kernels.encode_into(target.parameters, reply)
    return left_out


def rate_of(contribution: Contribution, *, rate: float, update_scale: float = 1.0) -> float:
    """Returns the step size that the gradient gets of an update at `rate`; a delta's does not depend on it."""
    is_delta = contribution.gradient.kind == PayloadKind.DELTA
    return (1.0 if is_delta else rate) * contribution.weighing.rate_scale * update_scale


# 0 is read as GRADIENT.
_GRADIENTS = (PayloadKind.GRADIENT, 0)


class _Pass(NamedTuple):
    """One call of a rule: what it does to a stretch of the shard."""

    target: Target
    place: slice
    numbers: list[WeightedGradient]
    step_scale: float
    guarded: bool

    def make(self, reply: Reply | None) -> int:
        """Returns how many numbers were left out."""
        target = self.target
        return target.rule.apply(
            target.parameters[self.place],
            {name: slot[self.place] for name, slot in target.slots.items()},
            self.numbers,
            rate=target.rate * self.step_scale,
            version=target.version,
            hyperparameters=target.hyperparameters,
            reply=reply,
            guarded=self.guarded,
        )


def _whole_gradients(parts: Sequence[Part]) -> bool:
    """Whether each of the parts, one at least, is a gradient of the whole shard."""
    for part in parts:
        gradient = part.contribution.gradient
        if gradient.extents or gradient.kind not in _GRADIENTS:
            return False
    return bool(parts)


def _apply_one(target: Target, contribution: Contribution, update_scale: float, reply: Reply | None) -> int:
    """Makes the update of most pushes: one gradient's own. Equal, to the bit, to what `_apply_whole` makes of it."""
    gradient, _, weighing = contribution
    factor, rate = weighing.weight, target.rate
    if target.rule.adaptive:
        rate *= weighing.rate_scale * update_scale
    else:
        factor = factor * weighing.rate_scale * update_scale
    return target.rule.apply(
        target.parameters,
        target.slots,
        [WeightedGradient(gradient.payload, gradient.codec, factor)],
        rate=rate,
        version=target.version,
        hyperparameters=target.hyperparameters,
        reply=reply,
        guarded=gradient.volatile,
    )


def _apply_whole(target: Target, parts: Sequence[Part], update_scale: float, reply: Reply | None) -> int:
    """Makes the usual update: one call, which reads the received bytes as they are."""
    rule = target.rule
    factors, step_scale = _scaled(rule, parts, update_scale)
    gradients = [part.contribution.gradient for part in parts]
    return rule.apply(
        target.parameters,
        target.slots,
        [WeightedGradient(g.payload, g.codec, factor) for g, factor in zip(gradients, factors, strict=True)],
        rate=target.rate * step_scale,
        version=target.version,
        hyperparameters=target.hyperparameters,
        reply=reply,
        guarded=any(gradient.volatile for gradient in gradients),
    )


def _passes(target: Target, parts: Sequence[Part], update_scale: float) -> Iterator[_Pass]:
    """Yields the calls that make the update, in order: gradients first, then deltas."""
    gradients = [part for part in parts if part.contribution.gradient.kind in _GRADIENTS]
    if gradients:
        yield from _passes_of(target, gradients, update_scale)
    if len(gradients) == len(parts):
        return
    deltas = [part for part in parts if part.contribution.gradient.kind == PayloadKind.DELTA]
    if deltas:
        # Deltas of locally trained parameters are added whatever the run's rule: the worker's own optimizer has set the
        # size of the step already, so no learning rate enters and no slot changes.
        adding = target._replace(rule=SGD, rate=-1.0, hyperparameters={"weight_decay": 0.0})
        yield from _passes_of(adding, deltas, update_scale)


def _passes_of(target: Target, parts: Sequence[Part], update_scale: float) -> Iterator[_Pass]:
    factors, step_scale = _scaled(target.rule, parts, update_scale)
    gradients = [part.contribution.gradient for part in parts]
    guarded = any(gradient.volatile for gradient in gradients)
    for place, numbers in _stretches(gradients, factors, target.parameters.size):
        yield _Pass(target, place, numbers, step_scale, guarded)


def _scaled(rule: UpdateRule, parts: Sequence[Part], update_scale: float) -> tuple[list[float], float]:
    """Returns the factor of each gradient and of the step."""
    return (_scaled_in_the_step if rule.adaptive else _scaled_in_the_sum)(parts, update_scale)


def _scaled_in_the_sum(parts: Sequence[Part], update_scale: float) -> tuple[list[float], float]:
    """Returns the factor of each gradient and of the step where a smaller gradient is a smaller step.

    A velocity then keeps what its gradients were worth when they came.
    """
    return [share * weighing.weight * weighing.rate_scale * update_scale for share, weighing in _weighed(parts)], 1.0


def _scaled_in_the_step(parts: Sequence[Part], update_scale: float) -> tuple[list[float], float]:
    """Returns the factor of each gradient and of the step for a rule that divides by the gradients' size.

    Such a rule would cancel a factor common to all gradients. So their mean rate scale multiplies the step,
    and only its ratio to each one's own enters the sum and the slots.
    """
    weighed = _weighed(parts)
    mean = sum([share * weighing.rate_scale for share, weighing in weighed]) / sum([share for share, _ in weighed])
    if mean == 0.0:
        return [share * weighing.weight for share, weighing in weighed], 0.0
    factors = [share * weighing.weight * (weighing.rate_scale / mean) for share, weighing in weighed]
    return factors, mean * update_scale


def _weighed(parts: Sequence[Part]) -> list[tuple[float, Weighing]]:
    return [(part.share, part.contribution.weighing) for part in parts]


def _stretches(
    gradients: Sequence[Gradient], factors: Sequence[float], length: int
) -> Iterator[tuple[slice, list[WeightedGradient]]]:
    """Yields each stretch that is covered by the same gradients, at least one, with their numbers there."""
    weighted = zip(gradients, factors, strict=True)
    if all(not gradient.extents for gradient in gradients):
        yield slice(0, length), [WeightedGradient(g.payload, g.codec, factor) for g, factor in weighted]
        return
    covers = [_Cover(gradient, factor, length) for gradient, factor in weighted]
    borders = {border for cover in covers for extent in cover.extents for border in (extent.offset, _end(extent))}
    for start, end in pairwise(sorted(borders)):
        numbers = [there for cover in covers if (there := cover.between(start, end)) is not None]
        if numbers:
            yield slice(start, end), numbers


class _Cover:
    """A gradient's extents and its numbers, asked for in ascending stretches that no border divides."""

    def __init__(self, gradient: Gradient, factor: float, length: int) -> None:
        self.extents = gradient.stretches(length)
        self._codec = gradient.codec
        self._factor = factor
        self._payload = memoryview(gradient.payload).cast("B")
        self._codec.require_divisible()
        # The extent at hand, and how many numbers of the payload come before it.
        self._index = 0
        self._before = 0

    def between(self, start: int, end: int) -> WeightedGradient | None:
        """Returns the numbers from `start` to `end`, None where the gradient has none."""
        while self._index < len(self.extents) and _end(self.extents[self._index]) <= start:
            self._before += self.extents[self._index].length
            self._index += 1
        if self._index == len(self.extents) or start < self.extents[self._index].offset:
            return None
        first = self._before + start - self.extents[self._index].offset
        bytes_of = self._codec.bytes_of
        numbers = self._payload[bytes_of(first) : bytes_of(first + end - start)]
        return WeightedGradient(numbers, self._codec, self._factor)


def _end(extent: Extent) -> int:
    return extent.offset + extent.length
