"""Translations of torch optimizers into the servers' update rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.errors import PypsError, SettingsChanged, UnsupportedOptimizer

# Settings that change no result, or none under the rules that ignore them: dampening acts through momentum only.
_IGNORED = frozenset({"foreach", "fused", "capturable", "dampening", "decoupled_weight_decay"})
_PLAIN = {"maximize": False, "differentiable": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """One torch optimizer class and the servers' rule for it."""

    optimizer: type[torch.optim.Optimizer]
    # The servers' rule.
    rule: str
    # torch's names of the servers' hyperparameters: "lr", "betas[0]".
    hyperparameters: Mapping[str, str]
    # Settings that select this rule among those of the class; every group must have them.
    when: Mapping[str, object] = field(default_factory=dict)
    # Settings that the rule lacks, with their only possible values.
    fixed: Mapping[str, object] = field(default_factory=lambda: _PLAIN)

    @property
    def stateful(self) -> bool:
        """True where a step depends on earlier gradients, so that a worker alone cannot take it."""
        return self.rule != "sgd"

    @property
    def momentum(self) -> str:
        """The hyperparameter that schedulers cycle against the learning rate; empty without one."""
        return next((name for name in ("momentum", "beta1") if name in self.hyperparameters), "")


_SGD = {"learning_rate": "lr", "weight_decay": "weight_decay"}
_ADAM = {**_SGD, "beta1": "betas[0]", "beta2": "betas[1]", "eps": "eps"}
_ADAGRAD = {name: name for name in ("eps", "initial_accumulator_value", "lr_decay")}
_NO_AMSGRAD = {**_PLAIN, "amsgrad": False}

# The first entry that fits is used.
TRANSLATIONS: tuple[Translation, ...] = (
    Translation(optimizer=torch.optim.SGD, rule="sgd", hyperparameters=_SGD, when={"momentum": 0, "nesterov": False}),
    Translation(
        optimizer=torch.optim.SGD,
        rule="momentum",
        hyperparameters={**_SGD, "momentum": "momentum", "dampening": "dampening"},
        when={"nesterov": False},
    ),
    Translation(
        optimizer=torch.optim.SGD,
        rule="nesterov",
        hyperparameters={**_SGD, "momentum": "momentum"},
        when={"nesterov": True},
        fixed={**_PLAIN, "dampening": 0},
    ),
    Translation(optimizer=torch.optim.Adagrad, rule="adagrad", hyperparameters={**_SGD, **_ADAGRAD}),
    Translation(
        optimizer=torch.optim.RMSprop,
        rule="rmsprop",
        hyperparameters={**_SGD, "decay": "alpha", "eps": "eps"},
        fixed={**_PLAIN, "momentum": 0, "centered": False},
    ),
    Translation(
        optimizer=torch.optim.Adam,
        rule="adam",
        hyperparameters=_ADAM,
        when={"decoupled_weight_decay": False},
        fixed=_NO_AMSGRAD,
    ),
    Translation(
        optimizer=torch.optim.Adam,
        rule="adamw",
        hyperparameters=_ADAM,
        when={"decoupled_weight_decay": True},
        fixed=_NO_AMSGRAD,
    ),
    Translation(optimizer=torch.optim.AdamW, rule="adamw", hyperparameters=_ADAM, fixed=_NO_AMSGRAD),
)


class ServersRule(torch.optim.Optimizer):
    """A rule named as the servers name it, for parameters that only they update.

    An empty name leaves the rule to them. Those that have none take sgd at the learning rate of `settings`.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], rule: str, settings: Mapping[str, float]) -> None:
        # Where the rule's rate is not stated, no push states it: 0 is what an absent number is read as.
        super().__init__([dict(group) for group in groups], {"lr": settings.get("learning_rate", 0.0)})
        self.settings = OptimizerSettings(rule=rule, groups=[GroupSettings(hyperparameters=settings) for _ in groups])


def translation_of(optimizer: torch.optim.Optimizer) -> Translation:
    """Return the table's entry for an optimizer; refuse others, and subclasses, which may compute something else."""
    if isinstance(optimizer, ServersRule):
        return Translation(optimizer=ServersRule, rule=optimizer.settings.rule, hyperparameters={})
    if isinstance(optimizer, type):
        raise UnsupportedOptimizer(
            f"{_class_name(optimizer)} is a class: make an optimizer of it first, as "
            f"{optimizer.__name__}(model.parameters(), lr=...)."
        )
    of_class = [translation for translation in TRANSLATIONS if type(optimizer) is translation.optimizer]
    if not of_class:
        names = list(dict.fromkeys(f"torch.optim.{translation.optimizer.__name__}" for translation in TRANSLATIONS))
        raise UnsupportedOptimizer(
            f"The servers have no update rule for {_class_name(type(optimizer))}; they have rules for "
            f"{', '.join(names[:-1])} and {names[-1]}."
        )
    for translation in of_class:
        required = translation.when.items()
        if all(group.get(name, value) == value for group in optimizer.param_groups for name, value in required):
            return translation
    choice = next(iter(of_class[-1].when))
    values = [repr(group.get(choice)) for group in optimizer.param_groups]
    raise UnsupportedOptimizer(
        f"{_class_name(type(optimizer))} has {choice}={', '.join(values)} in its parameter groups; the servers have "
        f"one rule for all groups: give all of them the same {choice}."
    )


def translate(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    """Return the servers' rule and settings for a fresh optimizer; refuse one that they cannot replace."""
    if isinstance(optimizer, ServersRule):
        return optimizer.settings
    translation = translation_of(optimizer)
    for state in optimizer.state.values():
        # SGD counts no steps.
        if float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None:
            raise UnsupportedOptimizer(
                f"The {_class_name(type(optimizer))} has taken steps already ({', '.join(state)}), and the servers "
                f"cannot take over its state: create a fresh optimizer for RemoteOptimizer."
            )
    _refuse_cycled_momentum(translation, optimizer.param_groups, UnsupportedOptimizer)
    _refuse_unknown(translation, optimizer)
    groups = [_group_settings(translation, index, group) for index, group in enumerate(optimizer.param_groups)]
    return OptimizerSettings(rule=translation.rule, groups=groups)


def refuse_changes(
    translation: Translation, agreed: OptimizerSettings, param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise SettingsChanged where a group's settings other than lr and momentum differ from the agreed ones."""
    _refuse_cycled_momentum(translation, param_groups, SettingsChanged)
    for index, group in enumerate(param_groups):
        settings = agreed.groups[index].hyperparameters
        for ours, torchs in translation.hyperparameters.items():
            try:
                value = value_of(group, torchs)
            except (LookupError, TypeError, ValueError):
                name = torchs.partition("[")[0]
                raise SettingsChanged(
                    f"{name} of parameter group {index} is {group.get(name)!r} now; expected it as it was, "
                    f"{torchs}={settings[ours]:g}: put it back."
                ) from None
            if ours not in ("learning_rate", translation.momentum) and value != settings[ours]:
                raise SettingsChanged(
                    f"{torchs} of parameter group {index} was changed from {settings[ours]:g} to {value:g}, "
                    f"but this run's {ours} is held by the servers, for all workers: only lr and momentum (betas[0]) "
                    f"may change while a run goes on. Remove what changes it, or start a run with {torchs}={value:g}."
                )
        for torchs, required in {**translation.when, **translation.fixed}.items():
            if torchs in group and group[torchs] != required:
                raise SettingsChanged(
                    f"{torchs} of parameter group {index} was changed to {group[torchs]!r}; the servers' "
                    f"rule {translation.rule!r} has only {torchs}={required!r}."
                )


def value_of(group: Mapping[str, Any], name: str) -> float:
    """Return a group's setting by torch's name: "lr", "betas[0]"."""
    key, _, index = name.partition("[")
    return float(group[key][int(index[:-1])] if index else group[key])


def _group_settings(translation: Translation, index: int, group: Mapping[str, Any]) -> GroupSettings:
    name = translation.optimizer.__name__
    for setting, required in translation.fixed.items():
        value = group.get(setting, required)
        if value != required:
            raise UnsupportedOptimizer(
                f"torch.optim.{name} has {setting}={value!r} in parameter group {index}; the servers' {name} "
                f"has no {setting}: use {setting}={required!r}."
            )
    settings = {ours: value_of(group, torchs) for ours, torchs in translation.hyperparameters.items()}
    # A scheduler that was made before may have moved lr and momentum, on each worker differently: agree on the start.
    settings["learning_rate"] = float(group.get("initial_lr", group["lr"]))
    if translation.momentum and "max_momentum" in group:
        settings[translation.momentum] = float(group["max_momentum"])
    return GroupSettings(hyperparameters=settings)


def _refuse_unknown(translation: Translation, optimizer: torch.optim.Optimizer) -> None:
    of_rule = {name.partition("[")[0] for name in translation.hyperparameters.values()}
    known = {*of_rule, *translation.when, *translation.fixed, *_IGNORED}
    for index, group in enumerate(optimizer.param_groups):
        for setting in optimizer.defaults.keys() - known:
            if group.get(setting):
                raise UnsupportedOptimizer(
                    f"{_class_name(type(optimizer))} has {setting}={group[setting]!r} in parameter group "
                    f"{index}, which this version of pyps does not know; leave {setting} out."
                )


def _refuse_cycled_momentum(
    translation: Translation, param_groups: Sequence[Mapping[str, Any]], error_class: type[PypsError]
) -> None:
    """Refuse a scheduler that moves a momentum where the rule has none; it has left its bounds in the groups."""
    for index, group in enumerate(param_groups):
        if "max_momentum" in group and not translation.momentum:
            raise error_class(
                f"A learning-rate scheduler moves the momentum of parameter group {index} too, which the servers' rule "
                f"{translation.rule!r} does not have: make the scheduler with cycle_momentum=False, or take SGD with "
                f"momentum, Adam or AdamW."
            )


def _class_name(kind: type) -> str:
    module = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__
    return f"{module}.{kind.__qualname__}"
