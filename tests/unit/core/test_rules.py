"""The rules' settings and slots, and each against torch's optimizer: 100 steps of one worker, on its own parameters.

Their arithmetic by hand is in tests/paper and tests/unit/test_kernel_rules.py.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.gradient import Reply
from pyps.core.rules import RULES, find, validate
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import UnsupportedOptimizer
from shards import gradient, make_shard, nothing, pull, push, refusal, restored, roster

LENGTH = 1000
STEPS = 100

# Each rule with torch's optimizer for it, and settings that differ from all defaults. With a constant rate the two
# forms of the heavy ball are one.
CASES: tuple[tuple[str, type[torch.optim.Optimizer], dict[str, float]], ...] = (
    ("sgd", torch.optim.SGD, {}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.01}),
    ("momentum", torch.optim.SGD, {"momentum": 0.9}),
    ("momentum", torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    ("heavy_ball", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    ("nesterov", torch.optim.SGD, {"momentum": 0.9}),
    ("nesterov", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    ("delayed_nesterov", torch.optim.SGD, {"momentum": 0.9, "n": 1.0, "weight_decay": 0.01}),
    ("adagrad", torch.optim.Adagrad, {}),
    (
        "adagrad",
        torch.optim.Adagrad,
        {"eps": 1e-6, "initial_accumulator_value": 0.1, "lr_decay": 0.02, "weight_decay": 0.01},
    ),
    ("rmsprop", torch.optim.RMSprop, {}),
    ("rmsprop", torch.optim.RMSprop, {"decay": 0.9, "eps": 1e-6, "weight_decay": 0.01}),
    ("adam", torch.optim.Adam, {}),
    ("adam", torch.optim.Adam, {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.01}),
    ("adamw", torch.optim.AdamW, {}),
    ("adamw", torch.optim.AdamW, {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}),
)
TORCHS = {"learning_rate": "lr", "decay": "alpha"}


def make_torchs(
    rule: str, kind: type[torch.optim.Optimizer], settings: dict[str, float], parameters: torch.Tensor
) -> torch.optim.Optimizer:
    """Return torch's optimizer with the rule's settings under torch's names."""
    theirs: dict[str, Any] = {TORCHS.get(name, name): value for name, value in settings.items() if name != "n"}
    if "beta1" in theirs:
        theirs["betas"] = (theirs.pop("beta1"), theirs.pop("beta2"))
    return kind([parameters], **theirs, **({"nesterov": True} if "nesterov" in rule else {}))


class Bowl:
    """A noisy quadratic bowl of unequal steepness; the noise of a step is the same for all."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.start = random.standard_normal(LENGTH).astype(np.float32)
        self._steepness = np.exp(random.uniform(-3, 0, LENGTH)).astype(np.float32)
        self._noise = random.standard_normal((STEPS, LENGTH)).astype(np.float32) / 10

    def gradient(self, parameters: Floats, step: int) -> Floats:
        gradient: Floats = self._steepness * parameters + self._noise[step]
        return gradient


def trained_by_torch(rule: str, kind: type[torch.optim.Optimizer], settings: dict[str, float], bowl: Bowl) -> Floats:
    parameters = torch.from_numpy(bowl.start.copy()).requires_grad_()
    optimizer = make_torchs(rule, kind, settings, parameters)
    for step in range(STEPS):
        parameters.grad = torch.from_numpy(bowl.gradient(parameters.detach().numpy(), step))
        optimizer.step()
    found: Floats = parameters.detach().numpy()
    return found


def trained_here(rule: str, settings: dict[str, float], bowl: Bowl) -> Floats:
    shard = make_shard(bowl.start, rule=rule, settings=settings)
    for step in range(STEPS):
        push(shard, bowl.gradient(pull(shard)[1], step), sequence=step)
    return pull(shard)[1]


def test_every_rule_follows_torch():
    assert {rule for rule, _, _ in CASES} == set(RULES)
    bowl = Bowl()
    for (rule, kind, others), rate in itertools.product(CASES, (0.1, 0.003)):
        settings = others | {"learning_rate": rate}
        expected = trained_by_torch(rule, kind, settings, bowl)
        found = trained_here(rule, settings, bowl)
        assert np.linalg.norm(expected - bowl.start) > 0.01 * np.linalg.norm(bowl.start), (rule, settings)
        assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected), (rule, settings)


# Of eighths, so that no sum rounds.
EIGHTHS = np.random.default_rng(1).integers(-64, 64, (16, LENGTH)).astype(np.float32) / 8


def pushed(rule: str, n: float, gradients: Floats, *, base_versions: int) -> tuple[Floats, Floats]:
    """Return parameters and velocity after these pushes of one worker, so many from each version."""
    settings = {"learning_rate": 0.25, "momentum": 0.5} | ({"n": n} if n else {})
    shard = make_shard(np.zeros(LENGTH), rule=rule, settings=settings)
    for sequence, values in enumerate(gradients):
        push(shard, values, sequence=sequence, base_version=sequence // base_versions * base_versions)
    state = shard.state()
    return state.parameters, state.slots["velocity"]


def test_delayed_nesterov_with_n_of_1_is_nesterov_bit_for_bit():
    for gradients in (EIGHTHS, EIGHTHS / 3):
        expected = pushed("nesterov", 0, gradients, base_versions=1)
        found = pushed("delayed_nesterov", 1, gradients, base_versions=1)
        assert all(map(np.array_equal, found, expected))


def test_as_many_pushes_from_one_version_as_n_are_one_step_of_nesterov_on_their_mean():
    means = EIGHTHS[:12].reshape(3, 4, LENGTH).mean(axis=1)
    expected = pushed("nesterov", 0, means, base_versions=1)
    found = pushed("delayed_nesterov", 4, EIGHTHS[:12], base_versions=4)
    assert all(map(np.array_equal, found, expected))
    assert not np.array_equal(pushed("delayed_nesterov", 4, EIGHTHS[:11], base_versions=4)[0], expected[0])


def test_with_lookahead_workers_get_the_parameters_as_momentum_will_move_them_and_checkpoints_do_not(monkeypatch):
    settings = {"learning_rate": 0.25, "momentum": 0.5, "n": 2.0}
    plain, ahead = (
        make_shard(np.zeros(LENGTH), rule="delayed_nesterov", settings=settings | {"lookahead": lookahead})
        for lookahead in (0.0, 1.0)
    )
    # Shards are bound once, not for each answer.
    monkeypatch.delattr(_kernels, "ShardKernel")
    for sequence, (values, rate) in enumerate(zip(EIGHTHS, (0.25, 0.25, 0.5, 0.5, 0.125), strict=False)):
        push(plain, values, sequence=sequence, learning_rate=rate)
        written = np.zeros(LENGTH, np.float32)
        reply = Reply(written.view(np.uint8).data, 0, FLOAT32)
        plan = gradient(values, sequence=sequence, base_version=sequence, learning_rate=rate)
        ahead.push(plan, roster=roster(), reply=reply)
        state = ahead.state()
        assert np.array_equal(state.parameters, plain.state().parameters)
        expected = state.parameters - np.float32(rate * 0.5) * state.slots["velocity"]
        assert np.array_equal(written, expected) and np.array_equal(pull(ahead)[1], expected)
    assert not np.array_equal(expected, state.parameters)
    monkeypatch.undo()
    assert np.array_equal(pull(restored(ahead, state))[1], expected)
    ahead.push(nothing(momentum=0.25, sequence=5), roster=roster())
    assert np.array_equal(pull(ahead)[1], state.parameters - np.float32(0.125 * 0.25) * state.slots["velocity"])
    words = refusal(validate, "delayed_nesterov", {"lookahead": 2.0}, error=UnsupportedOptimizer)
    assert "expected a whole number of at least 0 and less than 2" in words


def test_delayed_nesterov_wants_a_whole_n():
    for n in (0.0, 1.5, math.nan):
        words = refusal(validate, "delayed_nesterov", {"n": n}, error=UnsupportedOptimizer)
        assert f"n is {n}; expected a whole number of at least 1" in words


def test_settings_default_to_those_of_torch():
    """Of the rules that torch has under their own names."""
    for rule, kind, others in CASES:
        if others:
            continue
        defaults: dict[str, Any] = kind([torch.zeros(1)]).defaults
        defaults["beta1"], defaults["beta2"] = defaults.get("betas", (None, None))
        assert validate(rule, {}) == {name: defaults[TORCHS.get(name, name)] for name in RULES[rule].settings}


def test_settings_that_a_rule_does_not_have_or_that_cannot_be_are_refused_with_those_there_are():
    def refused(*arguments: Any) -> str:
        return refusal(validate, *arguments, error=UnsupportedOptimizer)

    known = refusal(find, "lamb", error=UnsupportedOptimizer)
    assert "'lamb' is unknown; this server has adagrad, adam, " in known and "sgd" in known
    words = "sgd has no setting 'momentum'; it has learning_rate, weight_decay"
    assert words in refused("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    for rate in (-0.1, math.nan, math.inf, 1e39):
        assert f"learning_rate is {rate}; expected a finite float32" in refused("sgd", {"learning_rate": rate})
    with pytest.raises(UnsupportedOptimizer, match="'eps'"):
        make_shard([0.0], settings={"eps": 1.0})


def test_each_rule_makes_the_slots_that_it_names_at_their_first_values():
    for rule in RULES.values():
        slots = rule.make_slots(3, validate(rule, {}))
        assert tuple(slots) == rule.slot_names
        assert [slot.ctypes.data % 64 for slot in slots.values()] == [0] * len(slots)
    settings = {"learning_rate": 1.0, "eps": 0.0, "initial_accumulator_value": 9.0}
    shard = make_shard([0.0], rule="adagrad", settings=settings)
    push(shard, [4.0])
    state = shard.state()
    assert (state.slots["accumulator"][0], state.parameters[0]) == (25.0, pytest.approx(-0.8))
