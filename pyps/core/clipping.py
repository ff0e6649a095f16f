"""The clipping of pushes by their norm, on the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pyps.core.gradient import Gradient, PayloadKind
from pyps.core.staleness import Weighing


class NoClipping:
    """Takes pushes of any norm as they are."""

    def norm_of(self, gradient: Gradient, shard_length: int) -> float | None:
        """Return the norm that `clip` needs, found without a lock; None where it needs none."""
        return None

    def clip(self, weighing: Weighing, gradient: Gradient, norm: float | None, shard_length: int) -> Weighing:
        """Return what is left of a weighing of the gradient; a norm of None is not known yet."""
        return weighing


@dataclass(frozen=True, slots=True)
class Clipping(NoClipping):
    """Brings longer pushes down to a norm."""

    clip_norm: float

    def norm_of(self, gradient: Gradient, shard_length: int) -> float | None:
        return norm_of(gradient, shard_length)

    def clip(self, weighing: Weighing, gradient: Gradient, norm: float | None, shard_length: int) -> Weighing:
        # None: clipping has just been switched on.
        norm = norm_of(gradient, shard_length) if norm is None else norm
        if norm <= self.clip_norm:
            return weighing
        # The gradient itself is scaled, slots included, as torch.nn.utils.clip_grad_norm_ does on a worker.
        return weighing._replace(weight=weighing.weight * (self.clip_norm / norm))


def norm_of(gradient: Gradient, shard_length: int) -> float:
    """Return the Euclidean norm of the whole push, or of this shard's part where the worker reported less.

    Buffers are not clipped: their norm is 0.
    """
    if gradient.kind in (PayloadKind.BUFFER, PayloadKind.NOTHING):
        return 0.0
    return max(gradient.norm, norm_of_payload(gradient, shard_length))


def norm_of_payload(gradient: Gradient, shard_length: int) -> float:
    """Return the Euclidean norm of the payload's numbers."""
    numbers = gradient.codec.decode(gradient.payload, gradient.count(shard_length))
    # Squares of float32 fit a float64; summed pairwise in a fixed order, so that a replay gives the same bits.
    return math.sqrt(float(np.add.reduce(np.square(numbers, dtype=np.float64))))
