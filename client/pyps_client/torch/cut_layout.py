"""Where the tensors of a model that is cut over parts lie: in the vectors of the parts that this process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pyps_client.arrangement import Arrangement
from pyps_client.learning_rates import GroupRate
from pyps_client.torch.layout import Layout, blocks_of
from pyps_client.torch.rates import RateChanges
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.partition import Model

if TYPE_CHECKING:
    from pyps_client.torch.claims import Claimed


@dataclass(frozen=True)
class Cut:
    """What a worker, or one process of a replica, trains of a model that is cut over parts."""

    arrangement: Arrangement
    claimed: Claimed


def layout_of(arrangement: Arrangement, claimed: Claimed) -> Layout:
    """The layout of what this process trains; a tensor that servers hold in several blocks is several of them."""
    model = Model(tuple(held.tensor for held in arrangement.held), arrangement.model.shard_size)
    ends = [0] * model.num_groups
    parameters: list[torch.Tensor] = []
    offsets: list[int] = []
    apart: set[int] = set()
    for index, (tensor, held) in enumerate(zip(model.tensors, arrangement.held, strict=True)):
        local = claimed.local[held.claim]
        if tensor.shape != tuple(local.shape):
            local = local.detach()[held.place]
            apart.add(index)
        elif local is not claimed.parameters[held.claim]:
            apart.add(index)
        parameters.append(local)
        offsets.append(ends[tensor.group])
        ends[tensor.group] += tensor.size
    return Layout(
        model=model,
        parameters=tuple(parameters),
        group_offsets=tuple(offsets),
        blocks=blocks_of(model.tensors, parameters, offsets),
        first_buffer=len(parameters),
        names={id(parameter): claim.name for parameter, claim in zip(claimed.parameters, claimed.claims, strict=True)},
        apart=frozenset(apart),
    )


class CutRates:
    """Learning rates of an optimizer's groups as those of the process's own vectors, which are more or fewer."""

    def __init__(self, arrangement: Arrangement) -> None:
        # Own vector -> the optimizer's group.
        self._groups = arrangement.own_param_groups

    def changes(self, of_groups: RateChanges) -> RateChanges:
        """The same changes, by own vector."""

        def changes() -> Mapping[int, GroupRate]:
            rates = of_groups()
            return {vector: rates[group] for vector, group in enumerate(self._groups) if group in rates}

        return changes

    def spread(self, rates: Sequence[float]) -> list[float]:
        """A number a vector, of one a group."""
        return [rates[group] for group in self._groups]


def settings_of(arrangement: Arrangement, settings: OptimizerSettings) -> OptimizerSettings:
    """The optimizer's settings with a group for each group of the cut model."""
    groups = [settings.groups[group] for group in arrangement.param_groups]
    return OptimizerSettings(rule=settings.rule, groups=groups)


def gradients_of(arrangement: Arrangement, claimed: Claimed) -> list[torch.Tensor | None]:
    """This minibatch's gradients, one entry a tensor of the layout. All processes of a replica call it."""
    local = claimed.gradients()
    return [None if (whole := local[held.claim]) is None else whole[held.place] for held in arrangement.held]
