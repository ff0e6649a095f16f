"""What a staleness policy does to an update: pitfalls 11 to 13, invariant S5 and section 2.14 of the algorithm notes.

Modulation is that of Zhang, Gupta, Lian, Liu (IJCAI 2016), the constant rate and the mean staleness of an update
those of Gupta, Zhang, Wang (ICDM 2016), exponential decay that of Chan and Lane (2014), the polynomial and the hinge
those of Xie et al. (FedAsync, 2019); dropping is Rudra's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyps.core.arrays import Floats
from pyps.core.receipt import Outcome, Reason
from pyps.core.rules import RULES
from pyps.core.shard import Shard
from pyps.core.staleness import POLICIES, StalenessPolicy, Weighing
from shards import make_shard, pull, push, roster_of

VERSION = 5000
ADAPTIVE = sorted(name for name, rule in RULES.items() if rule.adaptive)
PLAIN = sorted(name for name, rule in RULES.items() if not rule.adaptive)
# What each policy makes of a gradient that is 10 updates old, where the protocol's split is 4.
AT_10 = {
    "none": 1.0,
    "divide": 1 / 10,
    "divide_plus_one": 1 / 11,
    "constant": 1 / 4,
    "per_update": 1 / 10,
    "exponential": math.exp(-1),
    "polynomial": 1 / math.sqrt(11),
    "hinge": 1 / 61,
    "drop": 1.0,
}


def train(shard: Shard, stalenesses: Sequence[int], *, steps: int = 1, seed: int = 3) -> Floats:
    """Push gradients of these stalenesses in each step, and return how far the parameters moved.

    Each comes from another worker of four; the gradients are the same for every shard of that length.
    """
    random = np.random.default_rng(seed)
    begin = pull(shard)[1]
    for sequence in range(steps):
        version = shard.version
        for index, staleness in enumerate(stalenesses):
            values = random.standard_normal(shard.length)
            push(
                shard,
                values,
                workers=roster_of(4),
                worker_id=f"w{index:02d}",
                sequence=sequence,
                base_version=version - staleness,
            )
    return pull(shard)[1] - begin


def shard_of(policy: str | StalenessPolicy, *, rule: str = "sgd", protocol: str = "async", **fields: Any) -> Shard:
    settings: Mapping[str, float] = {"learning_rate": 0.125, **fields.pop("settings", {})}
    return make_shard(
        np.zeros(16), rule=rule, settings=settings, protocol=protocol, policy=policy, version=VERSION, **fields
    )


def test_s5_an_update_of_equally_stale_gradients_moves_by_the_policys_share():
    """S5, whatever the rule and the policy; with four workers each update of softsync:n=4 is made of one gradient."""
    assert AT_10.keys() == POLICIES.keys()
    for rule in (*PLAIN, *ADAPTIVE):
        moved = {policy: train(shard_of(policy, rule=rule, protocol="softsync:n=4"), [10]) for policy in AT_10}
        for policy, share in AT_10.items():
            np.testing.assert_allclose(moved[policy], moved["none"] * share, rtol=1e-5, err_msg=f"{rule} {policy}")


def test_s5_a_mean_is_divided_as_a_whole_where_all_are_equally_stale():
    """Exactly alpha0 / max(1, tau): these divisors round nothing. Dividing by the sum of weights would cancel them."""
    for tau in (0, 1, 2, 4, 16):
        moved = {policy: train(shard_of(policy, protocol="softsync:n=1"), [tau] * 4) for policy in ("none", "divide")}
        assert (moved["divide"] == moved["none"] / max(1, tau)).all(), tau


def test_pitfall_11_a_fresh_gradient_keeps_its_rate_under_every_policy_but_the_constant_one():
    scales = {policy: push(shard_of(policy), np.ones(16)).rate_scale for policy in AT_10}
    assert scales == dict.fromkeys(AT_10, 1.0)
    assert push(shard_of("constant"), np.ones(16), workers=roster_of(4)).rate_scale == 1 / 4


def test_pitfall_12_each_gradient_is_modulated_then_all_are_divided_by_their_number_then_comes_momentum():
    """g_i = (1/c) sum alpha(tau_l) G_l; v = m v + g_i; theta -= v (softsync's form: the rate is inside g_i)."""
    shard = shard_of("divide", rule="heavy_ball", protocol="softsync:n=1", settings={"momentum": 0.5})
    stalenesses = [0, 2, 4, 8]
    moved = train(shard, stalenesses, steps=3)

    random = np.random.default_rng(3)
    velocity = theta = np.zeros(16)
    for _ in range(3):
        mean = sum(0.125 / max(1, tau) * random.standard_normal(16) for tau in stalenesses) / 4
        velocity = 0.5 * velocity + mean
        theta = theta - velocity
    np.testing.assert_allclose(moved, theta, rtol=1e-5)


def test_per_update_divides_the_mean_by_the_mean_staleness():
    """alpha0 / <sigma^i>, where `divide` gives each gradient its own rate."""
    mean_staleness = (0 + 2 + 4 + 8) / 4
    moved = {
        policy: train(shard_of(policy, protocol="softsync:n=1"), [0, 2, 4, 8])
        for policy in ("none", "per_update", "divide")
    }
    np.testing.assert_allclose(moved["per_update"], moved["none"] / mean_staleness, rtol=1e-5)
    assert not np.allclose(moved["divide"], moved["per_update"], rtol=1e-2)


def test_pitfall_13_at_a_constant_staleness_of_ten_the_displacement_is_a_tenth_and_the_slots_are_the_same():
    """2.14, for Adam and the other adaptive rules, over many steps; a decay depends on where the parameters are."""
    for rule in ADAPTIVE:
        moved, slots = [], []
        for policy in ("none", "divide"):
            shard = shard_of(policy, rule=rule, settings={"weight_decay": 0.0})
            moved.append(train(shard, [10], steps=50))
            slots.append({name: slot.tobytes() for name, slot in shard.state().slots.items()})
        np.testing.assert_allclose(moved[1], moved[0] / 10, rtol=1e-4, atol=1e-7, err_msg=rule)
        assert slots[0] == slots[1] != {}, rule


@dataclass(frozen=True, slots=True)
class ScalesTheGradient(StalenessPolicy):
    """What an adaptive rule undoes: the gradient itself, not the step."""

    name: ClassVar[str] = "scales_the_gradient"

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(weight=1.0 / max(1, staleness))


def test_pitfall_13_scaling_the_gradient_itself_would_do_nothing():
    """Why a policy has two numbers."""
    for rule in ("adagrad", "adam", "rmsprop"):
        whole = train(shard_of("none", rule=rule, settings={"eps": 0.0}), [10], steps=20)
        scaled = train(shard_of(ScalesTheGradient(), rule=rule, settings={"eps": 0.0}), [10], steps=20)
        np.testing.assert_allclose(scaled, whole, rtol=1e-3, err_msg=rule)


def test_2_14_an_adaptive_mean_keeps_the_ratio_of_its_gradients_and_scales_the_step_by_their_mean():
    """Relative weights w / mean(w) in the mean, the step times mean(w); Adam's first step is the sign of the mean."""
    shard = shard_of("divide", rule="adam", protocol="softsync:n=1", settings={"eps": 0.0})
    moved = train(shard, [1, 2, 5, 10])
    scales = np.array([1, 1 / 2, 1 / 5, 1 / 10])
    random = np.random.default_rng(3)
    gradients = np.array([random.standard_normal(16) for _ in range(4)])
    mean = (scales / scales.mean()) @ gradients / 4
    # Adam's t is the shard's count of updates, so that its first moments are hardly corrected this late.
    expected = -0.125 * scales.mean() * (0.1 * mean) / np.sqrt(0.001 * mean**2)
    np.testing.assert_allclose(moved, expected * correction(VERSION + 1), rtol=1e-3)


def correction(step: int) -> float:
    """Return the product of Adam's two corrections for the slots' first values."""
    return float(np.sqrt(1 - 0.999**step) / (1 - 0.9**step))


def test_drop_refuses_what_is_more_than_its_spread_old():
    """Rudra: dropped where ts + spread < T. A gradient that is refused leaves no trace."""
    for tau, taken in ((10, True), (11, False)):
        shard = shard_of("drop")
        receipt = push(shard, np.ones(16), base_version=VERSION - tau)
        assert receipt.staleness == tau
        assert (receipt.outcome == Outcome.APPLIED) == taken == pull(shard)[1].any()
        assert (receipt.reason == Reason.STALE) == (not taken)
        assert shard.version == VERSION + taken


def test_a_rate_that_vanishes_leaves_finite_numbers_where_they_were():
    """exp(-beta tau) is 0 in floating point once beta tau is large."""
    for rule in (*PLAIN, *ADAPTIVE):
        shard = shard_of("exponential:beta=1", rule=rule)
        moved = train(shard, [4000], steps=3)
        assert not moved.any(), rule
        assert shard.version == VERSION + 3
        assert all(np.isfinite(slot).all() for slot in shard.state().slots.values()), rule
