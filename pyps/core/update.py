"""One update of a shard: the gradients that a protocol chose, weighed, summed and applied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median_low
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pyps.core.gradient import Extent, Gradient, PayloadKind, Reply, made_native, norm_of_payload
from pyps.core.protocols.base import Part
from pyps.core.rules import BoundRule, WeightedGradient
from pyps_wire.codecs import FLOAT32


class Update(NamedTuple):
    """An update and its gradients."""

    # The version that it made.
    version: int
    # The step size before staleness: the learning rate after schedules.
    rate: float
    # The factor by which the staleness of all its gradients shortens the step.
    update_scale: float
    parts: tuple[Part, ...]

    def weight(self, part: Part) -> float:
        """Return the gradient's weight among those of the update."""
        return part.contribution.weighing.weight * part.share * part.clip

    def rate_scale(self, part: Part) -> float:
        """Return the factor by which staleness shortens the gradient's step: 1 for not at all."""
        return part.contribution.weighing.rate_scale * self.update_scale


class SignedRule(Protocol):
    """What the factors of gradients depend on; see `BoundRule`."""

    sign: float
    adaptive: bool


def clipped(parts: Sequence[Part], length: int) -> tuple[Part, ...]:
    """Return the parts with each gradient's norm, in this shard, clipped to the median of all: of two, to the lesser.

    One worker whose gradients are far too large then moves the parameters no more than the others do.
    """
    norms = [_norm_of_part(part, length) for part in parts]
    counted = [norm for norm, part in zip(norms, parts, strict=True) if has_numbers(part)]
    bound = median_low(counted) if counted else 0.0
    return tuple(
        part._replace(clip=bound / norm) if norm > bound else part for norm, part in zip(norms, parts, strict=True)
    )


def apply_update(
    rule: BoundRule,
    parts: Sequence[Part],
    *,
    rate: float,
    version: int,
    update_scale: float = 1.0,
    reply: Reply | None = None,
    merge: str = "",
) -> int:
    """Apply the parts to the rule's shard as one update, and write the new parameters to `reply` too.

    `rate` is the learning rate after schedules and before any staleness; `update_scale` shortens the update as a whole,
    in addition to each gradient's own staleness; `version` is the number of updates before this one; `merge` is the
    protocol's way to merge sparse gradients. Return how many numbers of volatile gradients were left out because they
    were no longer finite.
    """
    if len(parts) == 1 and parts[0].share == 1.0:
        gradient, _, weighing = parts[0].contribution
        if not gradient.extents and gradient.kind != PayloadKind.NOTHING and not gradient.codec.sparse:
            # Most pushes. The general path below gives the same bits.
            factor = rule.sign * weighing.weight
            if rule.adaptive:
                rate *= weighing.rate_scale * update_scale
            else:
                factor = factor * weighing.rate_scale * update_scale
            numbers = [(gradient.payload, gradient.codec, factor)]
            return rule.apply(numbers, rate=rate, version=version, reply=reply, guarded=gradient.volatile)
    left_out, whole = 0, False
    parts = [part for part in parts if has_numbers(part)]
    if parts:
        factors, step_scale = factors_of(rule, parts, update_scale)
        gradients = [part.contribution.gradient for part in parts]
        in_part, sparse = any(each.extents for each in gradients), any(each.codec.sparse for each in gradients)
        guarded = any(gradient.volatile for gradient in gradients)
        if sparse and merge == "senders":
            gradients, factors = [_mean_of_senders(gradients, factors, parts, rule.length)], [1.0]
        elif sparse or in_part:
            gradients = [
                made_native(gradient, shard_id=-1, shard_length=rule.length, divided=in_part) for gradient in gradients
            ]
        for start, stop, numbers in _covered(gradients, factors, rule.length):
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


def has_numbers(part: Part) -> bool:
    return part.contribution.gradient.kind != PayloadKind.NOTHING


def _norm_of_part(part: Part, length: int) -> float:
    return norm_of_payload(part.contribution.gradient, length) if has_numbers(part) else 0.0


def factors_of(rule: SignedRule, parts: Sequence[Part], update_scale: float) -> tuple[list[float], float]:
    """Return the factor of each gradient, and that of the step.

    Staleness scales the gradients, so that a velocity holds them with their weights at arrival. An adaptive rule would
    cancel a factor that all gradients share. So the mean of their rate scales multiplies the step, and only the ratio
    of each to the mean enters the sum and the slots.
    """
    weighed = [(part.share, part.clip, part.contribution.weighing) for part in parts]
    if not rule.adaptive:
        scaled = [
            share * clip * weighing.weight * weighing.rate_scale * update_scale for share, clip, weighing in weighed
        ]
        return [rule.sign * factor for factor in scaled], 1.0
    mean = sum([share * weighing.rate_scale for share, _, weighing in weighed]) / sum([part.share for part in parts])
    ratios = [weighing.rate_scale / mean if mean else 1.0 for _, _, weighing in weighed]
    factors = [rule.sign * share * clip * weighing.weight for share, clip, weighing in weighed]
    return [factor * ratio for factor, ratio in zip(factors, ratios, strict=True)], mean * update_scale


def _mean_of_senders(
    gradients: Sequence[Gradient], factors: Sequence[float], parts: Sequence[Part], length: int
) -> Gradient:
    """Return the sum of the gradients with each number divided by the shares of the workers that sent it.

    A number that is 0, or outside a gradient's extents, was not sent. Divided by all workers, a number that one of
    eight sends would lose 7/8 of its size, which no feedback returns.
    """
    total, senders, covered = np.zeros(length, np.float32), np.zeros(length, np.float32), np.zeros(length, np.bool_)
    for gradient, factor, part in zip(gradients, factors, parts, strict=True):
        values = gradient.codec.decode(gradient.payload, gradient.count(length))
        places = _places(gradient, length)
        total[places] += np.float32(factor) * values
        senders[places] += np.float32(part.share) * (values != 0.0)
        covered[places] = True
    np.divide(total, senders, out=total, where=senders > 0.0)
    borders = np.flatnonzero(np.diff(covered, prepend=False, append=False)).tolist()
    extents = tuple(Extent(start, stop - start) for start, stop in zip(borders[::2], borders[1::2], strict=True))
    return gradients[0]._replace(codec=FLOAT32, payload=FLOAT32.encode(total[covered]), extents=extents)


def _places(gradient: Gradient, length: int) -> slice | npt.NDArray[np.bool_]:
    """Return an index of the shard's numbers that the gradient covers."""
    if not gradient.extents:
        return slice(None)
    places = np.zeros(length, np.bool_)
    for start, count in gradient.extents:
        places[start : start + count] = True
    return places


def _covered(
    gradients: Sequence[Gradient], factors: Sequence[float], length: int
) -> Iterator[tuple[int, int, list[WeightedGradient]]]:
    """Yield start and stop of each part of the shard that one or more gradients cover whole, with their numbers."""
    weighted = zip(gradients, factors, strict=True)
    if all(not gradient.extents for gradient in gradients):
        yield 0, length, [(g.payload, g.codec, factor) for g, factor in weighted]
        return
    covers = [_Cover(gradient, factor, length) for gradient, factor in weighted]
    borders = {border for cover in covers for borders in (cover.starts, cover.stops) for border in borders}
    for start, stop in pairwise(sorted(borders)):
        numbers = [there for cover in covers if (there := cover.between(start, stop)) is not None]
        if numbers:
            yield start, stop, numbers


class _Cover:
    """The extents of a gradient and its numbers there."""

    def __init__(self, gradient: Gradient, factor: float, length: int) -> None:
        extents = gradient.extents or (Extent(0, length),)
        self.starts = [offset for offset, _ in extents]
        self.stops = [offset + length for offset, length in extents]
        # How many numbers of the payload come before each extent's.
        self._before = [0, *accumulate([length for _, length in extents])]
        self._payload = memoryview(gradient.payload).cast("B")
        self._codec, self._factor = gradient.codec, factor

    def between(self, start: int, stop: int) -> WeightedGradient | None:
        """Return the numbers from start to stop, which no border divides; None if the gradient has none there."""
        index = bisect_right(self.starts, start) - 1
        if index < 0 or start >= self.stops[index]:
            return None
        first = self._before[index] + start - self.starts[index]
        max_bytes = self._codec.max_bytes
        return self._payload[max_bytes(first) : max_bytes(first + stop - start)], self._codec, self._factor
