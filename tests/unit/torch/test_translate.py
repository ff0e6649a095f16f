"""Torch optimizers in the servers' words."""

import pytest
import torch

from pyps_client.torch.translate import refuse_changes, settings_of, translate, translation_of
from pyps_wire.errors import SettingsChanged, UnsupportedOptimizer


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


def test_sgd_says_its_learning_rate() -> None:
    settings = translate(torch.optim.SGD(parameters(), lr=0.25))
    assert settings.rule == "sgd"
    assert dict(settings.groups[0].hyperparameters) == {"learning_rate": 0.25}


def test_adagrad_says_all_three_settings_for_each_group() -> None:
    groups = [{"params": parameters(), "lr": 0.5}, {"params": parameters(), "eps": 1e-6}]
    settings = translate(torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1))
    assert settings.rule == "adagrad"
    assert [dict(group.hyperparameters) for group in settings.groups] == [
        {"learning_rate": 0.5, "eps": 1e-10, "initial_accumulator_value": 0.1},
        {"learning_rate": 0.05, "eps": 1e-6, "initial_accumulator_value": 0.1},
    ]


def test_a_tensor_learning_rate_is_a_number() -> None:
    settings = translate(torch.optim.SGD(parameters(), lr=torch.tensor(0.25)))
    assert settings.groups[0].hyperparameters["learning_rate"] == 0.25


def test_how_the_arithmetic_is_done_does_not_matter() -> None:
    assert translate(torch.optim.SGD(parameters(), lr=0.1, foreach=True, dampening=0.5)).rule == "sgd"


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda p: torch.optim.Adam(p), ["torch.optim.Adam;", "torch.optim.SGD and torch.optim.Adagrad"]),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            ["SGD has momentum=0.9", "has no momentum: use momentum=0, or Adagrad."],
        ),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-4), ["weight_decay=0.0001"]),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), ["momentum=0.9"]),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
            ["maximize=True", "has no maximize: use maximize=False."],
        ),
        (
            lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
            ["Adagrad has lr_decay=0.1", "the servers' Adagrad has no lr_decay: use lr_decay=0."],
        ),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), ["weight_decay=0.1 in parameter group 0"]),
    ],
)
def test_what_the_servers_lack_is_refused_by_name_and_value(optimizer, words) -> None:
    with pytest.raises(UnsupportedOptimizer) as refused:
        translate(optimizer(parameters()))
    for word in words:
        assert word in str(refused.value)


def test_a_subclass_is_refused_because_it_may_compute_something_else() -> None:
    class MySgd(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedOptimizer, match="MySgd"):
        translate(MySgd(parameters(), lr=0.1))


def test_an_optimizer_that_took_steps_is_refused() -> None:
    mine = parameters()
    optimizer = torch.optim.Adagrad(mine)
    mine[0].grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(UnsupportedOptimizer, match="has taken 1 steps"):
        translate(optimizer)


def test_a_changed_learning_rate_is_refused_with_both_values() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    translation = translation_of(optimizer)
    settings = settings_of(translation, optimizer.param_groups)
    refuse_changes(translation, settings, optimizer.param_groups)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(SettingsChanged, match=r"from 0\.1 to 0\.05.*held by the servers"):
        refuse_changes(translation, settings, optimizer.param_groups)


def test_a_setting_that_was_switched_on_later_is_refused() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    translation = translation_of(optimizer)
    settings = settings_of(translation, optimizer.param_groups)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(SettingsChanged, match=r"momentum of parameter group 0 was changed to 0\.9"):
        refuse_changes(translation, settings, optimizer.param_groups)
