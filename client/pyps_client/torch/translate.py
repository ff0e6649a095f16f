"""What a torch optimizer says, in the servers' words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.errors import PypsError, SettingsChanged, UnsupportedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """How one torch optimizer class is said in the servers' words."""

    optimizer: type[torch.optim.Optimizer]
    # The servers' rule.
    rule: str
    # True where the size of a step depends on earlier gradients, so that no worker can take the step by
    # itself.
    adaptive: bool
    # The servers' hyperparameter -> torch's name for it.
    hyperparameters: Mapping[str, str]
    # Torch settings that the rule lacks -> the only value that is the rule.
    fixed: Mapping[str, object]
    # Torch settings that do not change what is computed.
    ignored: frozenset[str]
    # A setting of `fixed` -> another optimizer that serves who wants it.
    alternatives: Mapping[str, str] = field(default_factory=dict)


# How the arithmetic is carried out, not what it is.
_EXECUTION = frozenset({"foreach", "fused", "capturable"})

# A rule that the servers learn is one more entry here.
TRANSLATIONS: tuple[Translation, ...] = (
    Translation(
        optimizer=torch.optim.SGD,
        rule="sgd",
        adaptive=False,
        hyperparameters={"learning_rate": "lr"},
        fixed={
            "momentum": 0,
            "weight_decay": 0,
            "nesterov": False,
            "maximize": False,
            "differentiable": False,
        },
        # Dampening only acts through momentum.
        ignored=_EXECUTION | {"dampening"},
        alternatives={"momentum": "Adagrad"},
    ),
    Translation(
        optimizer=torch.optim.Adagrad,
        rule="adagrad",
        adaptive=True,
        hyperparameters={
            "learning_rate": "lr",
            "eps": "eps",
            "initial_accumulator_value": "initial_accumulator_value",
        },
        fixed={"lr_decay": 0, "weight_decay": 0, "maximize": False, "differentiable": False},
        ignored=_EXECUTION,
    ),
)


def translation_of(optimizer: torch.optim.Optimizer) -> Translation:
    """The table's entry for an optimizer; a class that is not there is refused by name.

    A subclass is refused too: it may compute something else.
    """
    for translation in TRANSLATIONS:
        if type(optimizer) is translation.optimizer:
            return translation
    names = " and ".join(f"torch.optim.{translation.optimizer.__name__}" for translation in TRANSLATIONS)
    raise UnsupportedOptimizer(
        f"The servers have no update rule for {_class_name(type(optimizer))}; they have rules for {names}."
    )


def translate(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    """The servers' settings for a torch optimizer, one entry a parameter group."""
    translation = translation_of(optimizer)
    _refuse_used(optimizer)
    _refuse_scheduler(optimizer.param_groups, UnsupportedOptimizer)
    _refuse_unknown(translation, optimizer)
    return settings_of(translation, optimizer.param_groups)


def settings_of(translation: Translation, param_groups: Sequence[Mapping[str, Any]]) -> OptimizerSettings:
    """The servers' settings for torch parameter groups; a setting that the rule lacks is refused by name."""
    groups = [_group_settings(translation, index, group) for index, group in enumerate(param_groups)]
    return OptimizerSettings(rule=translation.rule, groups=groups)


def refuse_changes(
    translation: Translation, asked: OptimizerSettings, param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raises SettingsChanged where a parameter group no longer says what the run was joined with, or soon will not."""
    _refuse_scheduler(param_groups, SettingsChanged)
    for index, group in enumerate(param_groups):
        settings = asked.groups[index].hyperparameters
        for ours, torchs in translation.hyperparameters.items():
            value = float(group[torchs])
            if value != settings[ours]:
                raise SettingsChanged(
                    f"{torchs} of parameter group {index} was changed from {settings[ours]:g} to {value:g}, "
                    f"but this run's {ours} is held by the servers, for all workers, and a worker's change does "
                    f"not reach them. Remove what changes it, or start a run with {torchs}={value:g}."
                )
        for torchs, required in translation.fixed.items():
            if torchs in group and group[torchs] != required:
                raise SettingsChanged(
                    f"{torchs} of parameter group {index} was changed to {group[torchs]!r}; the servers' "
                    f"rule {translation.rule!r} has only {torchs}={required!r}."
                )


def _group_settings(translation: Translation, index: int, group: Mapping[str, Any]) -> GroupSettings:
    name = translation.optimizer.__name__
    for setting, required in translation.fixed.items():
        value = group.get(setting, required)
        if value != required:
            alternative = translation.alternatives.get(setting)
            raise UnsupportedOptimizer(
                f"torch.optim.{name} has {setting}={value!r} in parameter group {index}; the servers' {name} "
                f"has no {setting}: use {setting}={required!r}{f', or {alternative}' if alternative else ''}."
            )
    return GroupSettings(
        hyperparameters={ours: float(group[torchs]) for ours, torchs in translation.hyperparameters.items()}
    )


def _refuse_unknown(translation: Translation, optimizer: torch.optim.Optimizer) -> None:
    """Refuses settings of a newer torch that were unknown here, unless they are off."""
    known = {*translation.hyperparameters.values(), *translation.fixed, *translation.ignored}
    for index, group in enumerate(optimizer.param_groups):
        for setting in optimizer.defaults.keys() - known:
            if group.get(setting):
                raise UnsupportedOptimizer(
                    f"{_class_name(type(optimizer))} has {setting}={group[setting]!r} in parameter group "
                    f"{index}, which this version of pyps does not know; leave {setting} out."
                )


def _refuse_scheduler(param_groups: Sequence[Mapping[str, Any]], error_class: type[PypsError]) -> None:
    """Refuses groups that a learning-rate scheduler was made for: it leaves its first rate in them."""
    for index, group in enumerate(param_groups):
        if "initial_lr" in group:
            raise error_class(
                f"A learning-rate scheduler was made for this optimizer (it left initial_lr in parameter group "
                f"{index}), but the learning rate is held by the servers, for all workers, and schedulers do not "
                f"reach them: remove the scheduler."
            )


def _refuse_used(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that has taken steps: the servers start with fresh slots."""
    for state in optimizer.state.values():
        steps = float(state.get("step", 0)) if isinstance(state, Mapping) else 0.0
        if steps > 0:
            raise UnsupportedOptimizer(
                f"The {_class_name(type(optimizer))} has taken {steps:g} steps already, and the servers "
                f"cannot take over what it gathered: create a fresh optimizer for RemoteOptimizer."
            )


def _class_name(kind: type) -> str:
    module = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__
    return f"{module}.{kind.__qualname__}"
