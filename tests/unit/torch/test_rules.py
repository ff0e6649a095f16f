import pytest
import torch

from pyps.core.rules import RULES
from pyps_client.torch.rules import TRANSLATIONS, refuse_changes, translate, translation_of
from pyps_wire.errors import SettingsChanged, UnsupportedOptimizer


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


MOMENTUM = {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
ADAM = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("optimizer", "rule", "settings"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.25), "sgd", {"weight_decay": 0}),
        (lambda p: torch.optim.SGD(p, lr=0.25, weight_decay=0.1), "sgd", {"weight_decay": 0.1}),
        (lambda p: torch.optim.SGD(p, lr=0.25, **MOMENTUM), "momentum", MOMENTUM),
        (
            lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.9, nesterov=True),
            "nesterov",
            {"momentum": 0.9, "weight_decay": 0},
        ),
        (
            lambda p: torch.optim.Adagrad(p, lr=0.25, lr_decay=0.1, initial_accumulator_value=0.5),
            "adagrad",
            {"eps": 1e-10, "initial_accumulator_value": 0.5, "lr_decay": 0.1, "weight_decay": 0},
        ),
        (
            lambda p: torch.optim.RMSprop(p, lr=0.25, alpha=0.9),
            "rmsprop",
            {"decay": 0.9, "eps": 1e-8, "weight_decay": 0},
        ),
        (lambda p: torch.optim.Adam(p, 0.25, (0.8, 0.99), 1e-6, 0.01), "adam", ADAM),
        (lambda p: torch.optim.Adam(p, 0.25, (0.8, 0.99), 1e-6, 0.01, decoupled_weight_decay=True), "adamw", ADAM),
        (lambda p: torch.optim.AdamW(p, 0.25, (0.8, 0.99), 1e-6, 0.01), "adamw", ADAM),
    ],
)
def test_each_optimizer_says_its_rule_and_all_its_settings(optimizer, rule, settings):
    said = translate(optimizer(parameters()))
    assert said.rule == rule
    assert dict(said.groups[0].hyperparameters) == {"learning_rate": 0.25, **settings}


def test_every_translated_rule_and_setting_is_one_of_the_servers():
    for translation in TRANSLATIONS:
        rule = RULES[translation.rule]
        assert (set(translation.hyperparameters), translation.momentum) == (set(rule.settings), rule.momentum_name)


def test_each_group_says_its_own_settings():
    groups = [{"params": parameters(), "lr": 0.5}, {"params": parameters(), "momentum": 0.5}]
    settings = translate(torch.optim.SGD(groups, lr=0.05, dampening=0.2))
    assert settings.rule == "momentum"
    assert [dict(group.hyperparameters) for group in settings.groups] == [
        {"learning_rate": 0.5, "momentum": 0, "dampening": 0.2, "weight_decay": 0},
        {"learning_rate": 0.05, "momentum": 0.5, "dampening": 0.2, "weight_decay": 0},
    ]


def test_groups_that_need_two_rules_are_refused():
    groups = [{"params": parameters()}, {"params": parameters(), "nesterov": True}]
    with pytest.raises(UnsupportedOptimizer, match="has nesterov=False, True in its parameter groups"):
        translate(torch.optim.SGD(groups, lr=0.05, momentum=0.5))


def test_how_the_arithmetic_is_done_does_not_matter_and_a_tensor_learning_rate_is_a_number():
    settings = translate(torch.optim.SGD(parameters(), lr=torch.tensor(0.25), foreach=True, dampening=0.5))
    assert (settings.rule, settings.groups[0].hyperparameters["learning_rate"]) == ("sgd", 0.25)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            lambda p: torch.optim.Adamax(p),
            ["torch.optim.Adamax;", "SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam and"],
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
            ["maximize=True", "has no maximize: use maximize=False."],
        ),
        (
            lambda p: torch.optim.Adam(p, amsgrad=True),
            ["Adam has amsgrad=True in parameter group 0; the servers' Adam has no amsgrad: use amsgrad=False."],
        ),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), ["RMSprop has momentum=0.9", "use momentum=0."]),
        (lambda p: torch.optim.RMSprop(p, centered=True), ["centered=True in parameter group 0"]),
        # A subclass may compute something else.
        (lambda p: type("MySgd", (torch.optim.SGD,), {})(p, lr=0.1), ["MySgd"]),
    ],
)
def test_what_the_servers_lack_is_refused_by_name_and_value(optimizer, words):
    with pytest.raises(UnsupportedOptimizer) as refused:
        translate(optimizer(parameters()))
    for word in words:
        assert word in str(refused.value)


def test_an_optimizer_that_took_steps_is_refused():
    for optimizer, kept in ((torch.optim.Adam, "step, exp_avg"), (torch.optim.SGD, "momentum_buffer")):
        weight = torch.nn.Parameter(torch.ones(2))
        used = optimizer([weight], lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
        translate(used)
        weight.sum().backward()
        used.step()
        with pytest.raises(UnsupportedOptimizer, match=rf"has taken steps already \({kept}"):
            translate(used)


def assert_refused(optimizer: torch.optim.Optimizer, change, words: str) -> None:
    """A change of these settings, made once the run has agreed upon them, is refused in these words."""
    translation = translation_of(optimizer)
    settings = translate(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    if isinstance(optimizer, torch.optim.Adam):
        optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    refuse_changes(translation, settings, optimizer.param_groups)
    change(optimizer)
    with pytest.raises(SettingsChanged, match=words):
        refuse_changes(translation, settings, optimizer.param_groups)


def test_only_the_learning_rate_and_a_momentum_that_the_rule_has_may_change():
    schedulers = torch.optim.lr_scheduler
    assert_refused(
        *(torch.optim.Adam(parameters(), lr=0.1), lambda its: its.param_groups[0].update(betas=(0.5, 0.9))),
        r"betas\[1\] of parameter group 0 was changed from 0\.999 to 0\.9,.* only lr and momentum",
    )
    assert_refused(
        *(torch.optim.SGD(parameters(), lr=0.1), lambda its: its.param_groups[0].update(momentum=0.9)),
        r"momentum of parameter group 0 was changed to 0\.9",
    )
    for cycle in (
        lambda its: schedulers.CyclicLR(its, 0.1, 0.2),
        lambda its: schedulers.OneCycleLR(its, 0.1, total_steps=10),
    ):
        optimizer = torch.optim.RMSprop(parameters(), lr=0.1)
        assert_refused(optimizer, cycle, "'rmsprop' does not have: make the scheduler with cycle_momentum=False")
        optimizer.param_groups[0]["momentum"] = 0
        with pytest.raises(UnsupportedOptimizer, match="make the scheduler with cycle_momentum=False"):
            translate(optimizer)


def test_a_run_is_agreed_upon_at_the_rate_where_a_scheduler_began():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert translate(optimizer).groups[0].hyperparameters["learning_rate"] == 0.1
