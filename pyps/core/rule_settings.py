"""The update rule of a run and its settings by parameter group, from the server's flags and the first worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyps.core import rules
from pyps.core.gradient import PayloadKind
from pyps_wire.errors import InvalidArgument, OptimizerMismatch


@dataclass(frozen=True)
class RuleSettings:
    """An update rule's name and, for each parameter group, its settings, defaults filled in.

    The name is empty where a worker leaves the rule to the servers. Where they have none, it is sgd, if the worker
    states a learning rate.
    """

    rule: str
    groups: tuple[Mapping[str, float], ...]
    # The kind of each group's pushes; () where the run's first worker decides.
    kinds: tuple[PayloadKind, ...] = ()

    @classmethod
    def make(
        cls, rule: str, groups: tuple[Mapping[str, float], ...], kinds: tuple[PayloadKind, ...] = ()
    ) -> RuleSettings:
        """Check settings and fill in defaults; raise UnsupportedOptimizer for any that the server does not have."""
        return cls(rule, tuple(rules.validate(rule, dict(group)) for group in groups), kinds)

    @classmethod
    def parse(cls, text: str) -> RuleSettings:
        """Return the settings of adagrad:learning_rate=0.05,eps=1e-10, for every group; ValueError if malformed."""
        name_of_rule, _, rest = text.partition(":")
        rule = rules.find(name_of_rule.strip())
        group: dict[str, float] = {}
        for item in filter(None, rest.split(",")):
            name, separator, number = item.partition("=")
            if not separator:
                raise ValueError(f"{item!r} is no setting: write name=number")
            name = name.strip()
            # Before its number: an unknown name is the more useful error.
            rules.require_known(rule, [name])
            if name in group:
                raise ValueError(f"{name} is given twice: {group[name]:g} and {number}")
            try:
                group[name] = float(number)
            except ValueError:
                raise ValueError(f"{name} is {number!r}, but must be a number") from None
        return cls.make(rule.name, (group,))

    def kind(self, group: int) -> PayloadKind:
        return self.kinds[group] if self.kinds else PayloadKind.GRADIENT

    def for_groups(self, num_groups: int) -> RuleSettings:
        """Return the settings for each of a model's groups, from those of one group or of all."""
        if len(self.groups) == num_groups:
            return self
        if len(self.groups) != 1:
            raise InvalidArgument(
                f"the optimizer has settings for {len(self.groups)} parameter groups, the model has {num_groups}"
            )
        return RuleSettings(self.rule, self.groups * num_groups, self.kinds * num_groups)

    def differences(self, other: RuleSettings) -> list[str]:
        """Return a line for each setting that differs, with both values."""
        if self.rule == "heavy_ball" and other.rule == "momentum":
            other = other.as_heavy_ball()
        if other.rule and self.rule != other.rule:
            return [f"rule: {self.rule} here, {other.rule} there"]
        lines = []
        for index, (mine, theirs) in enumerate(zip(self.groups, other.groups, strict=True) if other.rule else ()):
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    values = f"{_number(mine.get(name))} here, {_number(theirs.get(name))} there"
                    lines.append(f"{name} of group {index}: {values}")
        for index, (kind, their_kind) in enumerate(zip(self.kinds, other.kinds, strict=False)):
            if kind != their_kind:
                lines.append(f"pushes of group {index}: {kind.name} here, {their_kind.name} there")
        return lines

    def as_heavy_ball(self) -> RuleSettings:
        """Return momentum's settings as those of heavy_ball, which has the rate in its velocity; self if dampened."""
        if any(group["dampening"] for group in self.groups):
            return self
        kept = tuple({name: value for name, value in group.items() if name != "dampening"} for group in self.groups)
        return RuleSettings("heavy_ball", kept, self.kinds)

    def __str__(self) -> str:
        groups = self.groups if len({tuple(group.items()) for group in self.groups}) > 1 else self.groups[:1]
        texts = [",".join(f"{name}={value:g}" for name, value in group.items()) for group in groups]
        return f"{self.rule}:{' | '.join(texts)}"


def settle(
    configured: RuleSettings | None,
    requested: RuleSettings | None,
    *,
    num_groups: int,
    source: str,
    requester: str = "the worker",
) -> RuleSettings:
    """Return the settings in force, from those fixed already (`configured`, by `source`) and a worker's (`requested`).

    Raise OptimizerMismatch where both are given and differ.
    """
    if configured is None and (requested is None or not requested.rule):
        if requested is None or not all("learning_rate" in group for group in requested.groups):
            raise InvalidArgument("no optimizer was given: neither the server (--optimizer) nor the worker names one")
        requested = RuleSettings.make(rules.SGD.name, requested.groups, requested.kinds)
    if requested is not None:
        requested = requested.for_groups(num_groups)
    kinds = requested.kinds if requested is not None and requested.kinds else (PayloadKind.GRADIENT,) * num_groups
    if configured is None:
        assert requested is not None
        return replace(requested, kinds=kinds)
    configured = configured.for_groups(num_groups)
    lines = configured.differences(requested) if requested is not None else []
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise OptimizerMismatch(
            f"{requester}'s optimizer differs from {source} (here: the server, there: {requester}):\n{listed}"
        )
    return replace(configured, kinds=configured.kinds or kinds)


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.12g}"
