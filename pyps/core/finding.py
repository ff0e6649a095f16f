"""Whether a gradient can be used at all, found out before it is decided on: it fits, and its numbers are finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pyps import _kernels
from pyps.core.gradient import Gradient, PayloadKind, require_fitting


class Finding(NamedTuple):
    """The first number of a push that is NaN or infinity; all of them are finite without a shard."""

    shard_id: int = -1
    # Its place in the shard.
    parameter: int = -1

    @property
    def finite(self) -> bool:
        """Whether there was none."""
        return self.shard_id < 0


FINITE = Finding()


def scan(gradient: Gradient, *, shard_id: int, shard_length: int) -> Finding:
    """Looks through a gradient's numbers; it takes as long as a small update, without the GIL.

    Raises BadRequest (WrongSize where sizes differ) when the gradient could never be applied to its shard.
    """
    require_fitting(gradient, shard_id=shard_id, shard_length=shard_length)
    if gradient.kind == PayloadKind.NOTHING:
        return FINITE
    index = _kernels.first_non_finite(gradient.payload, gradient.codec)
    return FINITE if index < 0 else Finding(shard_id, gradient.parameter_index(index))


def first_of(findings: Iterable[Finding]) -> Finding:
    """Returns the first that speaks against its push, FINITE where none does."""
    return next((finding for finding in findings if not finding.finite), FINITE)
