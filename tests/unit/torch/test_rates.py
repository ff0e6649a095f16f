"""Learning rates that schedulers move: which push carries them, and whose count."""

import logging

import pytest
import torch

from pyps_client.torch.rates import Rates
from pyps_client.torch.rules import translate, translation_of
from pyps_wire.errors import InvalidArgument, SettingsChanged


def sgd(**settings) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))]}, {"params": [torch.nn.Parameter(torch.zeros(2))]}]
    return torch.optim.SGD(groups, **({"lr": 0.5} | settings))


def rates_of(optimizer: torch.optim.Optimizer, *, owns_schedule: bool = True, **options) -> Rates:
    return Rates(
        *(translation_of(optimizer), optimizer.param_groups, translate(optimizer)),
        owns_schedule=owns_schedule,
        **options,
    )


def test_only_the_group_that_changed_is_sent_and_only_once():
    optimizer = sgd()
    rates = rates_of(optimizer)
    assert [rates.changes() for _ in range(3)] == [{}, {}, {}]
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    assert rates.changes() == {1: (0.25, None, False)}
    assert rates.changes() == {}
    optimizer.param_groups[1]["lr"] = 0.5
    assert rates.changes() == {1: (0.5, None, False)}


@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_is_claimed_with_the_first_push_and_moves_the_rates_then(before):
    optimizer = sgd()
    early = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if before else None
    rates = rates_of(optimizer)
    scheduler = early or torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    optimizer.step()
    sent = []
    for _ in range(4):
        sent.append(rates.changes())
        scheduler.step()
    assert sent == [
        {0: (0.5, None, False), 1: (0.5, None, False)},
        {},
        {0: (0.25, None, False), 1: (0.25, None, False)},
        {},
    ]


@pytest.mark.parametrize("before", [True, False])
def test_a_cycled_momentum_goes_with_the_rate_from_where_its_cycle_began(before):
    optimizer = sgd(momentum=0.5)
    early = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=2) if before else None
    settings = translate(optimizer)
    assert [group.hyperparameters["momentum"] for group in settings.groups] == [0.9 if before else 0.5] * 2
    rates = rates_of(optimizer)
    scheduler = early or torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=2)
    optimizer.step()
    for rate, momentum in ((0.1, 0.9), (0.3, 0.85), (0.5, 0.8)):
        assert rates.changes() == {group: pytest.approx((rate, momentum, False)) for group in (0, 1)}
        scheduler.step()


def test_a_scheduler_of_another_worker_sends_provisional_rates_and_the_log_says_so_once(caplog):
    for by_scheduler in (True, False):
        optimizer = sgd(momentum=0.5)
        rates = rates_of(optimizer, owns_schedule=False)
        if by_scheduler:
            optimizer.param_groups[0]["initial_lr"] = 0.5
            rates.changes()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="pyps_client"):
            for rate in (0.25, 0.125):
                optimizer.param_groups[0].update(lr=rate, momentum=rate)
                # Nobody else's need move by hand.
                assert rates.changes() == ({0: (rate, rate, True)} if by_scheduler else {})
        said = [record.getMessage() for record in caplog.records if "no effect on the servers" in record.getMessage()]
        assert len(said) == (not by_scheduler)


def test_a_rate_that_cannot_be_is_refused_with_its_group():
    for rate in (-0.1, float("nan"), float("inf")):
        optimizer = sgd()
        rates = rates_of(optimizer)
        optimizer.param_groups[1]["lr"] = rate
        with pytest.raises(
            InvalidArgument, match=r"lr of parameter group 1 is .*; expected a finite number, 0 or more"
        ):
            rates.changes()
    for momentum in (-0.1, 1.5, float("nan")):
        adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
        rates = rates_of(adam)
        adam.param_groups[0]["betas"] = (momentum, 0.999)
        with pytest.raises(
            InvalidArgument, match=r"betas\[0\] of parameter group 0 is .*; expected a number of at least 0 and"
        ):
            rates.changes()


def test_a_local_step_is_of_the_present_rate_where_the_worker_can_take_it():
    cases = (({}, None, [0.125, 0.5]), ({}, 0.75, [0.75, 0.75]), ({"momentum": 0.9}, None, []), ({}, 0.0, []))
    for settings, asked, expected in cases:
        optimizer = sgd(**settings)
        rates = rates_of(optimizer, local_rate=asked)
        optimizer.param_groups[0]["lr"] = 0.125
        assert list(rates.sizes({})) == expected
        assert rates.takes_local_steps == bool(expected)
        # Another worker's changes, and the servers' own schedule.
        theirs = rates_of(optimizer, owns_schedule=False, local_rate=asked)
        assert list(theirs.sizes({0: 0.25})) == [0.25 if rate == 0.125 else rate for rate in expected]


def test_a_split_model_sends_a_rate_for_each_vector():
    optimizer = sgd()
    rates = rates_of(optimizer)
    rates.groups_of_vectors = [1, 0, 1]
    optimizer.param_groups[1]["lr"] = 0.25
    assert rates.sizes({}) == [0.25, 0.5, 0.25]
    assert rates.changes() == {0: (0.25, None, False), 2: (0.25, None, False)}


def test_changed_settings_are_checked_again():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    rates = rates_of(optimizer)
    group = optimizer.param_groups[0]
    group["betas"] = [0.9, 0.999]
    rates.check([group])
    group["lr"], group["betas"][0] = 0.25, 0.8
    rates.check([group])
    # In its place.
    group["betas"][1] = 0.5
    with pytest.raises(SettingsChanged, match=r"betas\[1\] of parameter group 0 was changed from 0.999 to 0.5"):
        rates.check([group])
    group["betas"][1] = 0.999
    rates.check([group])
    group["max_momentum"] = 0.9
    rates.check([group])
    group["weight_decay"] = 0.5
    with pytest.raises(SettingsChanged, match="weight_decay of parameter group 0"):
        rates.check([group])


def test_groups_that_hold_others_or_no_numbers_are_refused():
    def other() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.zeros(3))

    for change in (
        lambda groups: groups.append({"params": [other()], "lr": 0.1}),
        lambda groups: groups.pop(),
        lambda groups: groups.clear(),
        lambda groups: groups[0].update(params=[other()]),
        lambda groups: groups[0].pop("params"),
        lambda groups: groups[1]["params"].append(other()),
        lambda groups: groups[1]["params"].__setitem__(0, other()),
    ):
        for is_later in (False, True):
            optimizer = sgd()
            rates = rates_of(optimizer)
            if is_later:
                rates.check(optimizer.param_groups)
            change(optimizer.param_groups)
            with pytest.raises(SettingsChanged, match=r"hold other parameters .* than those .* \(\[1, 1\]\): "):
                rates.check(optimizer.param_groups)
    for name in ("weight_decay", "lr"):
        optimizer = sgd()
        rates = rates_of(optimizer)
        del optimizer.param_groups[1][name]
        with pytest.raises(SettingsChanged, match=f"{name} of parameter group 1 is None now; expected .* put it back"):
            rates.check(optimizer.param_groups)
    optimizer = sgd()
    rates = rates_of(optimizer)
    optimizer.param_groups[1]["lr"] = "fast"
    with pytest.raises(InvalidArgument, match=r"lr is 0\.5, 'fast' in the parameter groups; expected finite numbers"):
        rates.changes()


def test_rates_are_those_of_the_optimizers_present_list_and_not_of_one_that_is_only_checked():
    optimizer = sgd()
    rates = rates_of(optimizer)
    others = [dict(group, lr=0.25) for group in optimizer.param_groups]
    rates.check(others)
    with pytest.raises(SettingsChanged):
        rates.check([dict(group, lr=9.0, weight_decay=1.0) for group in optimizer.param_groups])
    assert rates.changes() == {}
    rates.check(others, follow=True)
    assert rates.changes() == {0: (0.25, None, False), 1: (0.25, None, False)}
