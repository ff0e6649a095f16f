"""Whether pushes that were computed beside each other are opposed (a reader's review of Zhang et al. 2013)."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pyps.core.gradient import Extent, Gradient, PayloadKind
from pyps.core.receipt import Outcome
from pyps.core.recorder import Pushed
from pyps.storage.replay import ShardLog

# A push is compared with so many before it at the most, which are held in memory.
PUSHES_MAX = 64


Doubles = npt.NDArray[np.float64]


class Pairs(NamedTuple):
    """Pairs of pushes, of which the first came after the second had pulled its parameters."""

    # From so many versions between what the two were computed on, to so many.
    apart_min: int
    apart_max: int
    num_pairs: int
    # The share with a negative cosine, and the mean of the cosines.
    opposed: float
    mean_cosine: float


class _Sums:
    """Of one pair, over its shards."""

    __slots__ = ("apart", "product", "squares")

    def __init__(self) -> None:
        self.apart, self.product, self.squares = 0, 0.0, np.zeros(2)

    @property
    def cosine(self) -> float:
        length = math.sqrt(math.prod(self.squares))
        return self.product / length if length > 0 else 0.0


def pairs_of(paths: Iterable[Path]) -> list[Pairs]:
    """Return the pairs in some shards' logs, the nearest versions first. Raises UpdateLogError without gradients."""
    found: defaultdict[tuple[object, ...], _Sums] = defaultdict(_Sums)
    for path in paths:
        log = ShardLog(path)
        log.require_gradients()
        recent: deque[tuple[Gradient, int, Doubles]] = deque(maxlen=PUSHES_MAX)
        for pushed in _taken(log):
            gradient, version = pushed.gradient, pushed.receipt.version_before
            values = _values(gradient, log.num_parameters)
            for other, came_at, others in recent:
                if came_at >= gradient.base_version:
                    sums = found[log.run.run_id, log.run.epoch, *_name(gradient), *_name(other)]
                    sums.apart = max(sums.apart, abs(gradient.base_version - other.base_version))
                    sums.product += float(values @ others)
                    sums.squares += float(values @ values), float(others @ others)
            recent.append((gradient, version, values))
    by_apart = sorted(found.values(), key=lambda sums: sums.apart)
    return [_row(list(group)) for _, group in groupby(by_apart, key=lambda sums: sums.apart.bit_length())]


def _taken(log: ShardLog) -> Iterator[Pushed]:
    for event in log.events():
        if (
            isinstance(event, Pushed)
            and event.receipt.outcome != Outcome.REJECTED
            and event.gradient.kind in (PayloadKind.GRADIENT, PayloadKind.DELTA)
        ):
            yield event


def _name(gradient: Gradient) -> tuple[str, int, int]:
    return gradient.worker_id, gradient.incarnation, gradient.sequence


def _values(gradient: Gradient, num_parameters: int) -> Doubles:
    """Return the push in the whole shard's length, in float64: zeros where it has no gradient."""
    values = np.zeros(num_parameters)
    numbers, taken = gradient.codec.decode(gradient.payload, gradient.count(num_parameters)), 0
    for offset, length in gradient.extents or (Extent(0, num_parameters),):
        values[offset : offset + length] = numbers[taken : taken + length]
        taken += length
    return values


def _row(pairs: list[_Sums]) -> Pairs:
    cosines = np.array([sums.cosine for sums in pairs])
    opposed, mean = float((cosines < 0).mean()), float(cosines.mean())
    return Pairs(pairs[0].apart, pairs[-1].apart, len(pairs), opposed, mean)
