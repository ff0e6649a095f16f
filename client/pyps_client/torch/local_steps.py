"""Steps of the worker's own between pulls: plain SGD on the model, until pulled parameters overwrite it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyps_client.torch.gradient_buffer import GradientBuffer
from pyps_client.torch.layout import Layout
from pyps_client.torch.parameter_buffer import ParameterBuffer

_HALF = (torch.float16, torch.bfloat16)


class LocalSteps:
    """Moves the model by gradients.

    Half-precision parameters are moved in float32 copies, as on the servers: in their own type a small step
    would vanish. The copies exist from the first local step on.
    """

    def __init__(self, layout: Layout, parameters: ParameterBuffer) -> None:
        self._layout = layout
        self._parameters = parameters
        # Tensor index -> its float32 values, local steps included.
        self._masters: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def reset(self) -> None:
        """Begins again from the parameters that were just written into the model."""
        for index, master in self._masters.items():
            master.copy_(self._parameters.value_of(index))

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], rates: Sequence[float]) -> None:
        """Takes a step of these rates, at least one a group: parameters -= rate * gradient."""
        for block in self._layout.blocks:
            rate = rates[block.group]
            if rate != 0.0 and min(block.offsets) < self._layout.first_buffer:
                # What was pulled must stay as it is: a shard without a newer version does not come again.
                self._parameters.separate()
            for batch in block.batches if rate != 0.0 else ():
                indices = [index for index in batch if gradients[index] is not None]
                targets = [self._target(index) for index in indices]
                given = [gradient for index in indices if (gradient := gradients[index]) is not None]
                if given:
                    torch._foreach_add_(targets, given, alpha=-rate)
                for index in indices:
                    if index in self._masters:
                        self._layout.parameters[index].copy_(self._masters[index])

    def reapply(self, gathered: GradientBuffer, rates: Sequence[float]) -> None:
        """Takes the steps of what was gathered once more, on parameters that do not hold them."""
        self.step(gathered.sums(), rates)

    def _target(self, index: int) -> torch.Tensor:
        parameter = self._layout.parameters[index]
        if parameter.dtype not in _HALF:
            return parameter
        if index not in self._masters:
            self._masters[index] = parameter.detach().float()
        return self._masters[index]
