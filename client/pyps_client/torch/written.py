"""Notices parameters that somebody else wrote: between steps they are the servers', who do not hear of it."""

from __future__ import annotations

from pyps_client.log import logger
from pyps_client.torch.layout import Layout
from pyps_wire.errors import BadRequest


class Written:
    """What torch counts of writes to a model's parameters. Writes through `.data` are not among them."""

    def __init__(self, layout: Layout) -> None:
        watched = [index for index in range(layout.first_buffer) if index not in layout.shortened]
        self._names = [layout.model.tensors[index].name for index in watched]
        self._tensors = [layout.parameters[index] for index in watched]
        self._told = False
        self.note()

    def note(self) -> None:
        """Takes what was written so far for the servers'."""
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self, *, is_first: bool) -> None:
        """Refuses what was written before the first step, which was meant to last; says once of what came later."""
        now = [tensor._version for tensor in self._tensors]
        if now == self._versions:
            return
        names = [name for name, old, new in zip(self._names, self._versions, now, strict=True) if old != new]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        if is_first:
            raise BadRequest(
                f"Parameters ({names[0]}{others}) were written after RemoteOptimizer was made, and would be "
                "overwritten with the servers': load or initialise the model before RemoteOptimizer(...), which gives "
                "a new run the first worker's parameters. A run that has begun keeps its own (pyps serve --resume)."
            )
        if not self._told:
            self._told = True
            logger.warning(
                "parameters (%s%s) were written between two steps, by load_state_dict, clamp_ or the like: the servers "
                "do not hear of it, and what they send takes its place. Limit weights within the model "
                "(torch.nn.utils.parametrize). Values put back meanwhile, as after an evaluation, do no harm.",
                *(names[0], others),
            )
