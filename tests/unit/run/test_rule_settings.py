from dataclasses import replace

import pytest

from pyps.core.gradient import PayloadKind
from pyps.core.rule_settings import RuleSettings, settle
from pyps_wire.errors import OptimizerMismatch, UnsupportedOptimizer
from shards import refusal


def settled(told: str, asked: str) -> RuleSettings:
    told_settings, asked_settings = RuleSettings.parse(told), RuleSettings.parse(asked)
    return settle(told_settings, asked_settings, num_groups=2, source="--optimizer")


def test_torchs_momentum_joins_a_heavy_ball_of_the_same_settings():
    rule = settled("heavy_ball:learning_rate=0.1,momentum=0.9", "momentum:learning_rate=0.1,momentum=0.9")
    expected = RuleSettings.parse("heavy_ball:learning_rate=0.1,momentum=0.9").for_groups(2)
    assert rule == replace(expected, kinds=(PayloadKind.GRADIENT,) * 2)


def test_other_settings_than_the_heavy_balls_are_refused_with_the_difference():
    told = "heavy_ball:learning_rate=0.1,momentum=0.9"
    for asked, difference in {
        "momentum:learning_rate=0.1,momentum=0.8": "momentum of group 0: 0.9 here, 0.8 there",
        "momentum:learning_rate=0.1,momentum=0.9,dampening=0.5": "rule: heavy_ball here, momentum there",
        "nesterov:learning_rate=0.1,momentum=0.9": "rule: heavy_ball here, nesterov there",
    }.items():
        assert difference in refusal(settled, told, asked, error=OptimizerMismatch)
    # Nor does a heavy ball join momentum.
    refusal(settled, "momentum:learning_rate=0.1,momentum=0.9", told, error=OptimizerMismatch)


def test_what_is_pushed_is_settled_by_the_first_worker_and_the_same_for_all():
    server = RuleSettings.parse("sgd:learning_rate=1")
    deltas = replace(server.for_groups(2), kinds=(PayloadKind.DELTA, PayloadKind.BUFFER))
    gradients = replace(server.for_groups(2), kinds=(PayloadKind.GRADIENT, PayloadKind.BUFFER))
    at_the_start = settle(server, deltas, num_groups=2, source="--optimizer")
    assert at_the_start == deltas == settle(None, deltas, num_groups=2, source="")
    said = refusal(lambda: settle(at_the_start, gradients, num_groups=2, source="the run's"), error=OptimizerMismatch)
    assert said.endswith("(here: the server, there: the worker):\n  pushes of group 0: DELTA here, GRADIENT there")


def test_a_worker_may_leave_the_rule_to_the_servers_and_state_what_it_pushes_alone():
    kinds = (PayloadKind.GRADIENT, PayloadKind.BUFFER)
    server, kinds_alone = RuleSettings.parse("sgd:learning_rate=1"), RuleSettings("", ({}, {}), kinds)
    at_the_start = settle(server, kinds_alone, num_groups=2, source="--optimizer")
    assert at_the_start == replace(server.for_groups(2), kinds=kinds)
    assert settle(at_the_start, kinds_alone, num_groups=2, source="the run's") == at_the_start
    others = RuleSettings("", ({}, {}), kinds[::-1])
    said = refusal(lambda: settle(at_the_start, others, num_groups=2, source="the run's"), error=OptimizerMismatch)
    assert said.count("pushes of group") == 2
    assert "neither the server" in refusal(lambda: settle(None, kinds_alone, num_groups=2, source=""))


def test_an_unknown_setting_is_said_before_its_value_is_read():
    with pytest.raises(UnsupportedOptimizer, match="adam has no setting 'amsgrad'"):
        RuleSettings.parse("adam:amsgrad=true")
    with pytest.raises(ValueError, match="learning_rate is 'fast', but must be a number"):
        RuleSettings.parse("adam:learning_rate=fast")
