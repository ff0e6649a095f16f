"""Exchange between the parts of an image: border rows in one direction, gradients in the other, each counted.

Each part is a process of torch.distributed and holds a band of the image's rows, part 0 the uppermost. A node is one
number of a layer: a channel at a place. Other parts need a part's nodes along its borders alone, and such a node goes
to a neighbour once, however many nodes there read it (Dean et al. 2012, section 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# A node reads a square of so many rows and columns.
KERNEL = 3


class Band:
    """The rows of an image that this process holds, its neighbours, and a log of what it sent them."""

    def __init__(self, height: int, *, index: int, count: int) -> None:
        self.index, self.count, self.height = index, count, height
        self.rows = slice(index * height // count, (index + 1) * height // count)
        self.log = Log()

    def with_halo(self, states: torch.Tensor, layer: str, *, readers: int) -> torch.Tensor:
        """States (examples, channels, rows, columns) between a neighbour's row and another's, zeros beyond the image.

        `readers` is how many nodes at each place the layer has that reads them.
        """
        return _Halo.apply(states, self, layer, readers)

    def sum_of_parts(self, partial: torch.Tensor, layer: str) -> torch.Tensor:
        """Return the sum of all parts' nodes (examples, nodes), the same in all parts."""
        return _SumOfParts.apply(partial, self, layer)

    def swap(
        self, direction: str, layer: str, rows: Sequence[tuple[int, torch.Tensor]], *, readers: int
    ) -> tuple[torch.Tensor, ...]:
        """Send a row up and one down, by their places in the image; return the neighbours' rows, or zeros."""
        received, operations = [], []
        for part, (row, states) in zip((self.index - 1, self.index + 1), rows, strict=True):
            received.append(torch.zeros_like(states, memory_format=torch.contiguous_format))
            if 0 <= part < self.count:
                operations.append(dist.P2POp(dist.isend, states.contiguous(), part))
                operations.append(dist.P2POp(dist.irecv, received[-1], part))
                self.log.add_row(direction, layer, row, states, part, readers=readers)
        for request in dist.batch_isend_irecv(operations) if operations else []:
            request.wait()
        return tuple(received)


class Log:
    """The messages of this process in a minibatch, node by node."""

    def __init__(self) -> None:
        # How often each (direction, layer, node, destination) was sent.
        self.times: Counter[tuple[Any, ...]] = Counter()
        # How often it would have been with a message for each edge between nodes of two parts.
        self.edges = 0

    def add(self, direction: str, layer: str, nodes: list[tuple[int, ...]], part: int, *, edges: int) -> None:
        self.times.update((direction, layer, node, part) for node in nodes)
        self.edges += edges

    def add_row(self, direction: str, layer: str, row: int, states: torch.Tensor, part: int, *, readers: int) -> None:
        """A row of the image, whose states have the shape (examples, channels, 1, columns)."""
        _, channels, _, columns = states.shape
        nodes = [(row, column, channel) for column in range(columns) for channel in range(channels)]
        # The first and the last column have a neighbour less.
        self.add(direction, layer, nodes, part, edges=channels * (KERNEL * columns - 2) * readers)

    def clear(self) -> None:
        """Begin the next minibatch."""
        self.times.clear()
        self.edges = 0


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, band: Band, layer: str, readers: int) -> torch.Tensor:
        ctx.band, ctx.layer, ctx.readers = band, layer, readers
        rows = [(band.rows.start, states[:, :, :1]), (band.rows.stop - 1, states[:, :, -1:])]
        above, below = band.swap("forward", layer, rows, readers=readers)
        return torch.cat([above, states, below], dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        band = ctx.band
        # Gradients of the neighbours' nodes are sent back, and those of this part's nodes are received.
        rows = [(band.rows.start - 1, gradient[:, :, :1]), (band.rows.stop, gradient[:, :, -1:])]
        above, below = band.swap("backward", ctx.layer, rows, readers=ctx.readers)
        own = gradient[:, :, 1:-1].clone()
        own[:, :, :1] += above
        own[:, :, -1:] += below
        return own, None, None, None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, band: Band, layer: str) -> torch.Tensor:
        if band.count == 1:
            return partial.clone()
        partial = partial.contiguous()
        partials = [torch.empty_like(partial) for _ in range(band.count)]
        dist.all_gather(partials, partial)
        nodes = [(node,) for node in range(partial.shape[1])]
        for part in set(range(band.count)) - {band.index}:
            # Sums are sent, so a message for each edge would cost no more here.
            band.log.add("forward", layer, nodes, part, edges=len(nodes))
        # One order on all processes, for the same bits.
        return torch.stack(partials).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # All processes compute the same loss from the sum, so each has its whole gradient already.
        return gradient, None, None
