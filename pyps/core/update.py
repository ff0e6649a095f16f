"""One update of a shard: the gradients that a protocol chose, weighed, summed and applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pyps.core.aggregation import Contribution, Part
from pyps.core.gradient import Extent, Gradient, PayloadKind
from pyps.core.plan import Reply
from pyps.core.rules import BoundRule, WeightedGradient
from pyps.core.staleness import Weighing


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
    rule: BoundRule,
    parts: Sequence[Part],
    *,
    rate: float,
    version: int,
    update_scale: float = 1.0,
    reply: Reply | None = None,
) -> int:
    """Apply the parts to the rule's shard as one update; parts without numbers leave no trace.

    Args:
        rule: The shard's.
        parts: Gradients and their shares.
        rate: The step size before any staleness: the learning rate after schedules.
        version: How many updates the shard has had.
        update_scale: Shortens the update as a whole, in addition to each gradient's own staleness.
        reply: Where to write the new parameters too.

    Returns:
        How many numbers of volatile gradients were left out because they were no longer finite.
    """
    if len(parts) == 1 and parts[0].share == 1.0:
        gradient, _, weighing = parts[0].contribution
        if not gradient.extents and gradient.kind != PayloadKind.NOTHING:
            # Most pushes. Equal, to the bit, to what the general path makes of it.
            factor = rule.sign * weighing.weight
            if rule.adaptive:
                rate *= weighing.rate_scale * update_scale
            else:
                factor = factor * weighing.rate_scale * update_scale
            numbers = [(gradient.payload, gradient.codec, factor)]
            return rule.apply(numbers, rate=rate, version=version, reply=reply, guarded=gradient.volatile)
    left_out, whole = 0, False
    parts = [part for part in parts if part.contribution.gradient.kind != PayloadKind.NOTHING]
    if parts:
        factors, step_scale = (_scaled_in_the_step if rule.adaptive else _scaled_in_the_sum)(parts, update_scale)
        gradients = [part.contribution.gradient for part in parts]
        guarded = any(gradient.volatile for gradient in gradients)
        for start, stop, numbers in _stretches(gradients, [rule.sign * f for f in factors], rule.length):
            whole = stop - start == rule.length
            left_out += rule.apply(
                numbers,
                rate=rate * step_scale,
                version=version,
                reply=reply if whole else None,
                guarded=guarded,
                start=start,
                stop=stop,
            )
    if reply is not None and not whole:
        rule.write(reply)
    return left_out


def rate_of(contribution: Contribution, *, rate: float, update_scale: float = 1.0) -> float:
    """Return the step size that the gradient gets of an update at `rate`; a buffer's does not depend on it."""
    is_buffer = contribution.gradient.kind == PayloadKind.BUFFER
    return (1.0 if is_buffer else rate) * contribution.weighing.rate_scale * update_scale


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
) -> Iterator[tuple[int, int, list[WeightedGradient]]]:
    """Yield start and stop of each part of the shard that the same gradients cover, one at least, and their numbers."""
    weighted = zip(gradients, factors, strict=True)
    if all(not gradient.extents for gradient in gradients):
        yield 0, length, [(g.payload, g.codec, factor) for g, factor in weighted]
        return
    covers = [_Cover(gradient, factor, length) for gradient, factor in weighted]
    borders = {border for cover in covers for extent in cover.extents for border in (extent.offset, _end(extent))}
    for start, stop in pairwise(sorted(borders)):
        numbers = [there for cover in covers if (there := cover.between(start, stop)) is not None]
        if numbers:
            yield start, stop, numbers


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
        max_bytes = self._codec.max_bytes
        numbers = self._payload[max_bytes(first) : max_bytes(first + end - start)]
        return numbers, self._codec, self._factor


def _end(extent: Extent) -> int:
    return extent.offset + extent.length
