"""The settings in an optimizer's parameter groups: rate and momentum may change while a run goes on, others may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from pyps_client.log import logger
from pyps_client.push import GroupRate
from pyps_client.torch.rules import Translation, refuse_changes, value_of
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import InvalidArgument, SettingsChanged

# Returns, by group, the learning rate and momentum that the next push must carry.
RateChanges = Callable[[], Mapping[int, GroupRate]]

_learning_rate = itemgetter("lr")
_NO_CHANGES: Mapping[int, GroupRate] = {}
# Settings that workers do not agree on; which parameters a group holds is fixed otherwise.
_FREE = frozenset({"lr", "params"})


class Rates:
    """The groups' learning rates and momenta, which schedulers move.

    One worker owns the schedule; its changes apply from the push that carries them. Another worker's changes apply only
    until the owner has pushed, which is logged once.
    """

    def __init__(
        self,
        translation: Translation,
        param_groups: Sequence[Mapping[str, Any]],
        agreed: OptimizerSettings,
        *,
        owns_schedule: bool,
        local_rate: float | None = None,
    ) -> None:
        """`agreed`: the settings that the run is joined with. `local_rate`: the configured size of local steps."""
        self._translation = translation
        # The optimizer's own list.
        self._param_groups = param_groups
        self._agreed = agreed
        self._owns_schedule = owns_schedule
        self._local_rate = local_rate
        # The group of each of the worker's vectors, where a model in parts has more or fewer of them.
        self.groups_of_vectors: Sequence[int] | None = None
        # torch's name of the rule's momentum; empty without one.
        self._momentum = translation.hyperparameters.get(translation.momentum, "")
        # Rate and momentum of each group that were last sent to the servers.
        settings = [group.hyperparameters for group in agreed.groups]
        self._sent = [(group.get("learning_rate", 0.0), group.get(translation.momentum)) for group in settings]
        # True once a change was sent.
        self._moved = False
        # Each group's parameters; the model holds them, so that an id stays its own.
        self._parameters = [_ids(group) for group in param_groups]
        # The groups when they were last found correct.
        self._checked: list[Mapping[str, Any]] = [{}] * len(param_groups)

    @property
    def takes_local_steps(self) -> bool:
        """True where the worker takes local steps between pulls: by default under plain SGD only."""
        return not self._translation.stateful if self._local_rate is None else self._local_rate > 0

    def check(self, param_groups: Sequence[Mapping[str, Any]], *, follow: bool = False) -> None:
        """Raise SettingsChanged where a group differs in more than rate and momentum from those of the start.

        `follow`: take rates from these groups from now on; a program may replace the optimizer's list.
        """
        if follow:
            self._param_groups = param_groups
        if len(param_groups) != len(self._checked):
            return self._check_in_full(param_groups)
        for group, checked, parameters in zip(param_groups, self._checked, self._parameters, strict=True):
            if len(group) != len(checked) or list(map(id, group.get("params") or ())) != parameters:
                return self._check_in_full(param_groups)
            for name, value in group.items():
                if name not in _FREE and checked.get(name) != value:
                    return self._check_in_full(param_groups)
        return None

    def changes(self) -> Mapping[int, GroupRate]:
        """Return the rates to send with the next push, by vector; none where nothing changed."""
        now = self._now()
        has_scheduler = False
        for group in self._param_groups:
            has_scheduler = has_scheduler or "initial_lr" in group
        claims = has_scheduler and not self._moved
        if now == self._sent and not claims:
            return _NO_CHANGES
        if not self._owns_schedule and not self._moved:
            logger.info(
                "the servers take the learning rate and momentum from another worker, by default worker 0%s. "
                "This worker's changes have no effect on the servers, unless it alone has owns_schedule=True.",
                " as soon as its scheduler has moved them" if has_scheduler else "",
            )
        # A scheduler claims the schedule before its first change, so that a second owner is refused at once. A change
        # by hand, or by a plateau, on a worker that does not own the schedule stays on that worker.
        changes = {
            index: GroupRate(*rate, provisional=not self._owns_schedule)
            for index, (rate, sent) in enumerate(zip(now, self._sent, strict=True))
            if (claims or rate != sent) and (self._owns_schedule or has_scheduler)
        }
        self._moved = True
        self._sent = now
        if self.groups_of_vectors is None:
            return changes
        return {vector: changes[group] for vector, group in enumerate(self.groups_of_vectors) if group in changes}

    def sizes(self, servers_rates: Mapping[int, float]) -> Sequence[float]:
        """Return the sizes of a local step now, one per vector; none where there are no local steps.

        By default they are the servers' rates, as far as the worker knows them by vector.
        """
        if not self.takes_local_steps:
            return ()
        now = self._now()
        own = [now[group][0] for group in (self.groups_of_vectors or range(len(now)))]
        if self._local_rate is not None:
            return [self._local_rate] * len(own)
        if self._owns_schedule and (self._moved or now != self._sent):
            # The servers use them from the next push on.
            return own
        return [servers_rates.get(vector, rate) for vector, rate in enumerate(own)]

    def _check_in_full(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        if [_ids(group) for group in param_groups] != self._parameters:
            sizes = [len(_ids(group)) for group in param_groups]
            raise SettingsChanged(
                f"The parameter groups hold other parameters ({sizes} of them) than those that the run was joined with "
                f"({list(map(len, self._parameters))}): its workers agree on them when it starts. Give the torch "
                "optimizer all groups before RemoteOptimizer is made, and leave param_groups as they are but for lr "
                "and momentum."
            )
        refuse_changes(self._translation, self._agreed, param_groups)
        # A list may be changed in place, and would equal itself.
        values = [value for group in param_groups for name, value in group.items() if name not in _FREE]
        changeable = any(isinstance(value, list) for value in values)
        self._checked = [{} if changeable else dict(group) for group in param_groups]

    def _now(self) -> list[tuple[float, float | None]]:
        """Return each group's learning rate and momentum; refuse values that no server takes."""
        name = self._momentum
        try:
            rates = list(map(float, map(_learning_rate, self._param_groups)))
            momenta = [value_of(group, name) for group in self._param_groups] if name else [None] * len(rates)
        except (TypeError, ValueError):
            given = ", ".join(repr(group["lr"]) for group in self._param_groups)
            raise InvalidArgument(
                f"lr is {given} in the parameter groups; expected finite numbers, 0 or more."
            ) from None
        now: list[tuple[float, float | None]] = list(zip(rates, momenta, strict=True))
        if now != self._sent:
            for index, (rate, momentum) in enumerate(now):
                if not 0 <= rate < math.inf:
                    raise InvalidArgument(
                        f"lr of parameter group {index} is {rate!r}; expected a finite number, 0 or more."
                    )
                if momentum is not None and not 0 <= momentum < 1:
                    raise InvalidArgument(
                        f"{name} of parameter group {index} is {momentum!r}; expected a number of at least 0 and less "
                        "than 1."
                    )
        return now


def _ids(group: Mapping[str, Any]) -> list[int]:
    return list(map(id, group.get("params") or ()))
