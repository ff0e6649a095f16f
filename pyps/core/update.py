"""One update of a shard: the gradients that a protocol chose, weighed, summed and applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyps import _kernels
from pyps.core.aggregation import Contribution, Part
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.gradient import Codec, Extent, PayloadKind, item_bytes
from pyps.core.update_rules import AddDelta, Slots, UpdateRule


@dataclass(frozen=True, slots=True)
class Target:
    """What an update changes: a shard's parameters and slots, through one rule at one version."""

    parameters: Floats
    slots: Slots
    rule: UpdateRule
    hyperparameters: Mapping[str, float]
    version: int


def apply_update(target: Target, parts: Sequence[Part]) -> None:
    """Applies the parts as one update, in place."""
    deltas = [part for part in parts if part.contribution.gradient.kind == PayloadKind.DELTA]
    gradients = [part for part in parts if part.contribution.gradient.kind != PayloadKind.DELTA]
    if gradients:
        _apply_parts(target, gradients, target.rule, target.hyperparameters["learning_rate"])
    if deltas:
        _apply_parts(target, deltas, _ADD_DELTA, 1.0)


def rate_of(contribution: Contribution, hyperparameters: Mapping[str, float]) -> float:
    """Returns the step size that the gradient gets; a delta's is its rate_scale alone."""
    is_delta = contribution.gradient.kind == PayloadKind.DELTA
    return (1.0 if is_delta else hyperparameters["learning_rate"]) * contribution.weighing.rate_scale


_ADD_DELTA = AddDelta()


def _apply_parts(target: Target, parts: Sequence[Part], rule: UpdateRule, learning_rate: float) -> None:
    rate_scale = _mean_rate_scale(parts)
    factors = [_factor(part, rate_scale) for part in parts]
    only = parts[0].contribution.gradient
    if len(parts) == 1 and factors[0] == 1.0:
        # The usual case: the kernel reads the received bytes, and nothing is copied.
        payload, codec, extents = only.payload, only.codec, only.extents
        _apply_stretches(target, rule, payload, codec, extents, rate=learning_rate * rate_scale)
        return
    total = _weighted_sum(parts, factors, length=target.parameters.size)
    extents = _union(part.contribution.gradient.stretches(total.size) for part in parts)
    present = memoryview(b"".join(total[e.offset : e.offset + e.length].tobytes() for e in extents))
    _apply_stretches(target, rule, present, Codec.FLOAT32, extents, rate=learning_rate * rate_scale)


def _mean_rate_scale(parts: Sequence[Part]) -> float:
    shares = sum(part.share for part in parts)
    return sum(part.share * part.contribution.weighing.rate_scale for part in parts) / shares


def _factor(part: Part, mean_rate_scale: float) -> float:
    """Returns what the gradient is multiplied by in the update's sum.

    Only the ratio of the rate scales enters the sum, their mean multiplies the step: an adaptive rule would
    cancel a factor common to all gradients. For SGD the two ways are the same number.
    """
    weighing = part.contribution.weighing
    if mean_rate_scale == 0.0:
        return part.share * weighing.weight
    return part.share * weighing.weight * (weighing.rate_scale / mean_rate_scale)


def _weighted_sum(parts: Sequence[Part], factors: Sequence[float], *, length: int) -> Floats:
    """Returns the sum of factor times gradient, added in the given order."""
    total = aligned_zeros(length)
    for part, factor in zip(parts, factors, strict=True):
        gradient = part.contribution.gradient
        for extent, payload in _stretches(gradient.payload, gradient.codec, gradient.stretches(length)):
            stretch = total[extent.offset : extent.offset + extent.length]
            _kernels.sgd(stretch, payload, gradient.codec, rate=-factor)
    return total


def _apply_stretches(
    target: Target,
    rule: UpdateRule,
    payload: bytes | memoryview,
    codec: int,
    extents: tuple[Extent, ...],
    *,
    rate: float,
) -> None:
    apply = partial(rule.apply, rate=rate, version=target.version, hyperparameters=target.hyperparameters)
    if not extents:
        apply(target.parameters, target.slots, payload, codec)
    for extent, numbers in _stretches(payload, codec, extents):
        place = slice(extent.offset, extent.offset + extent.length)
        apply(
            target.parameters[place],
            {name: slot[place] for name, slot in target.slots.items()},
            numbers,
            codec,
        )


def _stretches(
    payload: bytes | memoryview, codec: int, extents: Iterable[Extent]
) -> Iterator[tuple[Extent, memoryview]]:
    """Yields each extent with its part of the payload."""
    view = memoryview(payload).cast("B")
    start = 0
    for extent in extents:
        end = start + extent.length * item_bytes(codec)
        yield extent, view[start:end]
        start = end


def _union(extents: Iterable[Iterable[Extent]]) -> tuple[Extent, ...]:
    """Returns the stretches that at least one gradient covers, ascending and disjoint."""
    merged: list[Extent] = []
    for extent in sorted(extent for some in extents for extent in some):
        if merged and extent.offset <= merged[-1].offset + merged[-1].length:
            last = merged.pop()
            end = max(last.offset + last.length, extent.offset + extent.length)
            merged.append(Extent(last.offset, end - last.offset))
        else:
            merged.append(extent)
    return tuple(merged)
