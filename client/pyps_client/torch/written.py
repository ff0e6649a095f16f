"""Notices parameters that somebody else wrote, or put others in place of: between steps they are the servers'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pyps_client.log import logger
from pyps_client.torch.layout import Layout, plain_name
from pyps_wire.errors import BadRequest


class Written:
    """What torch counts of writes to a model's parameters, of which servers do not hear.

    Those through `.data` are not counted; before the first step they show where parameters differ from what was pulled,
    but for parameters that lie in what is pulled into.
    """

    def __init__(self, layout: Layout, pulled: Callable[[int], torch.Tensor]) -> None:
        """`pulled`: the values that the servers sent last of a tensor, by its index."""
        self._watched = [index for index in range(layout.first_buffer) if index not in layout.shortened]
        self._names = [layout.model.tensors[index].name for index in self._watched]
        self._tensors = [layout.parameters[index] for index in self._watched]
        self._pulled = pulled
        self._told = False
        self.note()

    def note(self) -> None:
        """Takes what was written so far for the servers'."""
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self, *, is_first: bool) -> None:
        """Refuses what was written before the first step, which was meant to last; says once of what came later."""
        now = [tensor._version for tensor in self._tensors]
        if now == self._versions and not is_first:
            return
        names = [name for name, old, new in zip(self._names, self._versions, now, strict=True) if old != new]
        if is_first:
            # Other memory (`parameter.data = values`) is no write that torch counts.
            names = names or [name for index, name in enumerate(self._names) if not self._is_as_pulled(index)]
            if names:
                raise BadRequest(
                    f"Parameters ({_several(names)}) were written after RemoteOptimizer was made, and would be "
                    "overwritten with the servers': load or initialise the model before RemoteOptimizer(...), which "
                    "gives a new run the first worker's parameters. A run that has begun keeps its own (pyps serve "
                    "--resume)."
                )
        elif not self._told:
            self._told = True
            logger.warning(
                "parameters (%s) were written between two steps, by load_state_dict, clamp_ or the like: the servers "
                "do not hear of it, and what they send takes its place. Limit weights within the model "
                "(torch.nn.utils.parametrize). Values put back meanwhile, as after an evaluation, do no harm.",
                _several(names),
            )

    def _is_as_pulled(self, index: int) -> bool:
        tensor = self._tensors[index]
        return torch.equal(tensor, self._pulled(self._watched[index]).to(tensor))


class Held:
    """A model's own parameters. Others that take the place of trained ones would be trained by nobody."""

    def __init__(self, module: torch.nn.Module, trained: Iterable[torch.Tensor]) -> None:
        self._module = module
        self._known = dict(module.named_parameters())
        self._trained = {id(parameter) for parameter in trained}
        self._places = _places_in(module)

    def check(self) -> None:
        """Refuses a model in which others have taken the place of trained parameters."""
        # A walk through the module would take longer than a step of a small model.
        if all(table.get(name) is held for table, name, held in self._places):
            return
        now = {id(parameter) for parameter in self._module.parameters()}
        known = {id(parameter): plain_name(name) for name, parameter in self._known.items()}
        lost = [name for key, name in known.items() if key in self._trained - now]
        # A part that was taken off, and nothing put in its place, is the user's own affair.
        if lost and now - known.keys():
            raise BadRequest(
                f"Parameters ({_several(lost)}) are no longer the model's: others were put in their place after "
                "RemoteOptimizer was made, by load_state_dict(..., assign=True) or a new layer, and no step would "
                "train them. Load and change the model before the torch optimizer and RemoteOptimizer are made."
            )
        self._places = _places_in(self._module)


def _places_in(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """What each module of a model holds, under which name; not of torch.jit's, whose tables are made when asked for."""
    tables = (table for part in module.modules() for table in (part._parameters, part._modules))
    return [(table, name, held) for table in tables if isinstance(table, dict) for name, held in table.items()]


def _several(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
