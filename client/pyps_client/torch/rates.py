"""What an optimizer's parameter groups say while a run goes on: what may change and who hears of it, what may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

from pyps_client.log import logger
from pyps_client.push import GroupRate
from pyps_client.torch.rules import TorchName, Translation, refuse_changes, text_of
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import InvalidArgument, SettingsChanged

# Group -> the learning rate and momentum that the push which begins now must carry.
RateChanges = Callable[[], Mapping[int, GroupRate]]

_NO_CHANGES: Mapping[int, GroupRate] = {}
_learning_rate = itemgetter("lr")
# Settings that do not belong to what workers agree on: which parameters a group holds is fixed otherwise.
_FREE = frozenset({"lr", "params"})


class Rates:
    """The groups' learning rates, and momenta where the rule has one, which schedulers move; all else must stay.

    One worker owns the schedule; what it sends is in force for the push that carries it. Another worker's changes
    count only until that one has pushed, which is said once.
    """

    def __init__(
        self,
        translation: Translation,
        param_groups: Sequence[Mapping[str, Any]],
        joined_with: OptimizerSettings,
        *,
        owns_schedule: bool,
        local_rate: float | None = None,
    ) -> None:
        """`local_rate`: the configured size of the worker's own steps between pulls."""
        self._translation = translation
        # The optimizer's own list, so that its groups always hold the present rates.
        self._param_groups = param_groups
        self._joined_with = joined_with
        self._owns_schedule = owns_schedule
        self._local_rate = local_rate
        # The group of each of the worker's vectors, where a model in parts has more or fewer of them.
        self.groups_of_vectors: Sequence[int] | None = None
        self._torch_momentum: TorchName = translation.hyperparameters.get(translation.momentum, "")
        names = (self._torch_momentum,) if isinstance(self._torch_momentum, str) else self._torch_momentum
        # How a group's momentum is reached, if the rule has one.
        self._momentum = [itemgetter(name) for name in names if name != ""]
        # Rate and momentum that the servers were last told of each group.
        settings = [group.hyperparameters for group in joined_with.groups]
        self._told = [(group["learning_rate"], group.get(translation.momentum)) for group in settings]
        # True once the first change was sent.
        self._moved = False
        # Each group's parameters; the model holds them, so that an id stays its own.
        self._parameters = [_ids(group) for group in param_groups]
        # The groups as they were found in order, which are looked at again only where they are others.
        self._checked: list[Mapping[str, Any]] = [{}] * len(param_groups)

    @property
    def takes_local_steps(self) -> bool:
        """Whether the worker takes steps of its own between pulls: by default under plain SGD only."""
        return not self._translation.stateful if self._local_rate is None else self._local_rate > 0

    def check(self, param_groups: Sequence[Mapping[str, Any]], *, follow: bool = False) -> None:
        """Raise SettingsChanged where a group differs from what the run was joined with, but for rate and momentum.

        `follow`: take rates from these groups from now on, which may be another list than before.
        """
        if follow:
            self._param_groups = param_groups
        if len(param_groups) != len(self._checked):
            return self._check_anew(param_groups)
        for group, checked, parameters in zip(param_groups, self._checked, self._parameters, strict=True):
            if len(group) != len(checked) or list(map(id, group.get("params") or ())) != parameters:
                return self._check_anew(param_groups)
            for name, value in group.items():
                if name not in _FREE and checked.get(name) != value:
                    return self._check_anew(param_groups)
        return None

    def changes(self) -> Mapping[int, GroupRate]:
        """Own vector -> rate, for the push that begins now; empty where the servers have been told all."""
        now = self._now()
        has_scheduler = False
        for group in self._param_groups:
            has_scheduler = has_scheduler or "initial_lr" in group
        claims = has_scheduler and not self._moved
        if now == self._told and not claims:
            return _NO_CHANGES
        if not self._owns_schedule and not self._moved:
            logger.info(
                "the servers take the learning rate and momentum from another worker, by default worker 0%s. "
                "This worker's changes have no effect on the servers; owns_schedule=True here alone makes them count.",
                " as soon as its scheduler has moved them" if has_scheduler else "",
            )
        # A scheduler claims the schedule before it first moves, so that a second owner is refused at once. What is
        # moved by hand, or by a plateau, on a worker that does not own it is that worker's alone: nobody else's need
        # move at all.
        changes = {
            index: GroupRate(*rate, provisional=not self._owns_schedule)
            for index, (rate, told) in enumerate(zip(now, self._told, strict=True))
            if (claims or rate != told) and (self._owns_schedule or has_scheduler)
        }
        self._moved = True
        self._told = now
        if self.groups_of_vectors is None:
            return changes
        return {vector: changes[group] for vector, group in enumerate(self.groups_of_vectors) if group in changes}

    def sizes(self, told: Mapping[int, float]) -> Sequence[float]:
        """The sizes of the worker's own step now, one a vector; none where it takes no such steps.

        By default the servers' present learning rates; `told`: those by vector, as far as they are known.
        """
        if not self.takes_local_steps:
            return ()
        now = self._now()
        own = [now[group][0] for group in (self.groups_of_vectors or range(len(now)))]
        if self._local_rate is not None:
            return [self._local_rate] * len(own)
        if self._owns_schedule and (self._moved or now != self._told):
            # The servers go by them, or will from the next push on.
            return own
        return [told.get(vector, rate) for vector, rate in enumerate(own)]

    def _check_anew(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        if [_ids(group) for group in param_groups] != self._parameters:
            sizes = [len(_ids(group)) for group in param_groups]
            raise SettingsChanged(
                f"The parameter groups hold other parameters ({sizes} of them) than those that the run was joined with "
                f"({list(map(len, self._parameters))}): its workers agree on them when it starts. Give the torch "
                "optimizer all groups before RemoteOptimizer is made, and leave param_groups as they are but for lr "
                "and momentum."
            )
        refuse_changes(self._translation, self._joined_with, param_groups)
        # A list may be changed in its place, and would be compared with itself.
        values = [value for group in param_groups for name, value in group.items() if name not in _FREE]
        changeable = any(isinstance(value, list) for value in values)
        self._checked = [{} if changeable else dict(group) for group in param_groups]

    def _now(self) -> list[tuple[float, float | None]]:
        """Rate and momentum of each group."""
        momenta: Iterable[Any] = self._param_groups
        for item in self._momentum:
            momenta = map(item, momenta)
        rates = map(float, map(_learning_rate, self._param_groups))
        try:
            now: list[tuple[float, float | None]] = list(
                zip(rates, map(float, momenta) if self._momentum else repeat(None), strict=False)
            )
        except (TypeError, ValueError):
            said = ", ".join(repr(group["lr"]) for group in self._param_groups)
            raise InvalidArgument(
                f"lr is {said} in the parameter groups; expected finite numbers, 0 or more."
            ) from None
        if now != self._told:
            for index, (rate, momentum) in enumerate(now):
                if not 0 <= rate < math.inf:
                    raise InvalidArgument(
                        f"lr of parameter group {index} is {rate!r}; expected a finite number, 0 or more."
                    )
                if momentum is not None and not 0 <= momentum < 1:
                    raise InvalidArgument(
                        f"{text_of(self._torch_momentum)} of parameter group {index} is {momentum!r}; expected a "
                        "number of at least 0 and less than 1."
                    )
        return now


def _ids(group: Mapping[str, Any]) -> list[int]:
    return list(map(id, group.get("params") or ()))
