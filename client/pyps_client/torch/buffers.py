"""Buffers that workers share, such as batch norm's statistics: workers push their moves and pull the values.

Servers add the moves, weighed as gradients: under hardsync they average them, so that the servers' buffers are the
mean of the workers'.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from pyps_client.torch.layout import Layout, shareable_buffers
from pyps_wire.errors import InvalidArgument

BUFFER_MODES = ("local", "average", "first")


class SharedBuffers:
    """The moves of a model's buffers since the servers' values, each a gradient.

    "average": every worker pushes its moves and goes on from the servers' values. "first": one worker keeps its own
    statistics and moves the servers' towards them; the others follow. Each push then corrects the one before, however
    that was weighed.
    """

    def __init__(self, module: torch.nn.Module, layout: Layout, mode: str, *, is_first: bool, overlaps: bool) -> None:
        # Weakly: it may hold the optimizer, whose end holds this.
        self._module: Any = weakref.proxy(module)
        self._buffers = layout.parameters[layout.first_buffer :]
        self._names = list(shareable_buffers(module))
        self._pushes = mode == "average" or is_first
        self._keeps_own = mode == "first" and is_first
        # With overlap a pull may lack the newest push, whose move is then pushed twice: half of it each time settles,
        # all of it would oscillate.
        self._gain = 0.5 if self._keeps_own and overlaps else 1.0
        # The servers' last known values, plus this worker's pushes since; None before the first pull.
        self._base: list[torch.Tensor] | None = None
        # This worker's own values after the newest minibatch that was accepted.
        self._own = self._copies()

    @torch.no_grad()
    def moves(self) -> list[torch.Tensor | None]:
        """Return each buffer's distance from the servers' value; None for each where this worker pushes none."""
        if not self._pushes or self._base is None:
            return [None] * len(self._buffers)
        for name, buffer in zip(self._names, self._buffers, strict=True):
            if self._module.get_buffer(name) is not buffer:
                raise InvalidArgument(
                    f"The buffer {name!r} was replaced by another tensor, so that it cannot be shared: change it "
                    f"in place (copy_), or pass buffers='local'."
                )
        pairs = zip(self._buffers, self._base, strict=True)
        return [(buffer.float() - base) * self._gain for buffer, base in pairs]

    @torch.no_grad()
    def accepted(self, moves: Sequence[torch.Tensor | None]) -> None:
        self._own = self._copies()
        for base, move in zip(self._base or (), moves, strict=False):
            if move is not None:
                base += move

    @torch.no_grad()
    def skipped(self) -> None:
        """Undo a minibatch whose gradient is not used: its NaN may have spread into the buffers."""
        for buffer, own in zip(self._buffers, self._own, strict=True):
            buffer.copy_(own)

    @torch.no_grad()
    def pulled(self) -> None:
        """Note that the servers' values, plus moves that are under way, were written into the model."""
        is_first = self._base is None
        self._base = self._copies()
        if self._keeps_own and not is_first:
            self.skipped()
        else:
            self._own = self._copies()

    def _copies(self) -> list[torch.Tensor]:
        # In float32: a move in half precision would vanish.
        return [buffer.detach().to(torch.float32, copy=True) for buffer in self._buffers]
