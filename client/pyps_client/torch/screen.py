"""What keeps NaN and infinity from the servers, between a worker's minibatches and its pushes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from pyps_client.finite import FiniteGuard
from pyps_client.torch.gradient_buffer import GradientBuffer
from pyps_client.torch.looks import all_finite, first_non_finite, refuse_sparse
from pyps_wire.common_pb2 import REASON_NOT_FINITE, Receipt
from pyps_wire.partition import Model


class Screen:
    """Leaves out minibatches, and sums of them as they travel, that are not finite; ends a worker that makes no others.

    A minibatch that the servers look through before they apply any of it passes unseen: their receipts tell.
    """

    def __init__(self, model: Model, *, looks: bool = True) -> None:
        """`looks`: whether minibatches are looked through here; else the caller knows them to be finite in float32."""
        self._model = model
        self._looks = looks
        self._minibatch_guard = FiniteGuard()
        self._payload_guard = FiniteGuard()
        # Minibatches that another process of the replica refused.
        self._left_out_with_others = 0
        # The minibatch that gathers now, where nobody has looked for NaN in it: the servers will.
        self._unchecked: Sequence[torch.Tensor | None] = ()

    @property
    def skipped(self) -> int:
        """Minibatches and sums of minibatches that were left out because they were not finite."""
        return self._minibatch_guard.skips_total + self._payload_guard.skips_total + self._left_out_with_others

    def add(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        to: GradientBuffer,
        versions: Mapping[int, int],
        example_count: int,
        servers_look: bool,
    ) -> bool:
        """Adds a minibatch to what has gathered; False where it is not finite, and left out.

        `versions` of the parameters that it was computed on. `servers_look`: it goes alone, to a server that looks.
        """
        refuse_sparse(self._model, gradients)
        self._unchecked = gradients if servers_look else ()
        if not self._looks:
            to.add(gradients, versions=versions, example_count=example_count)
            self._minibatch_guard.passed()
            return True
        is_first = to.minibatch_count == 0
        # A sum cannot be undone. The first minibatch is looked at where it then lies, in one piece.
        if is_first or all_finite([gradient for gradient in gradients if gradient is not None]):
            to.add(gradients, versions=versions, example_count=example_count)
            if self._unchecked:
                return True
            if not is_first or to.are_finite():
                self._minibatch_guard.passed()
                return True
            to.clear()
        self._skip(gradients)
        return False

    def leave_out(self, gradients: Sequence[torch.Tensor | None], *, for_others: bool) -> None:
        """Counts a minibatch that is left out: for its own numbers, or for those of another process of the replica."""
        if for_others:
            self._left_out_with_others += 1
        else:
            self._skip(gradients)

    def seal(self, gathered: GradientBuffer) -> bool:
        """True when what has gathered may go on its way; else it is left out."""
        if gathered.seal(checked=not self._unchecked):
            self._payload_guard.passed()
            return True
        count = gathered.minibatch_count
        gathered.clear()
        self._payload_guard.skipped(f"{count} minibatches, summed and converted for the wire,", (), math.inf)
        return False

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Takes a push that nobody had looked through, and that was refused for its NaN, for one that was skipped."""
        gradients, self._unchecked = self._unchecked, ()
        if not gradients:
            return
        if any(receipt.reason == REASON_NOT_FINITE for receipt in receipts):
            self._skip(gradients)
        else:
            self._minibatch_guard.passed()

    def _skip(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Counts a minibatch as skipped, and says where it is not finite, if not in the wire's type only."""
        found = first_non_finite(self._model, gradients)
        if found is not None:
            self._minibatch_guard.skipped(*found)
        else:
            self._payload_guard.skipped("1 minibatch, converted for the wire,", (), math.inf)
