"""Update of several gradients: their shares, their staleness, what they do not cover."""

import itertools

import numpy as np
import pytest

from kernel_values import WORDS
from pyps import _kernels
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.gradient import Extent, PayloadKind, Reply
from pyps.core.protocols.base import Contribution, Part
from pyps.core.rules import RULES, validate
from pyps.core.staleness import Weighing
from pyps.core.update import apply_update
from pyps_wire.codecs import FLOAT16, FLOAT32, INT8
from shards import PAIRS, floats, gradient


def part(
    values: list[float], *, share: float = 0.5, weight: float = 1.0, rate_scale: float = 1.0, **fields: object
) -> Part:
    weighing = Weighing(weight=weight, rate_scale=rate_scale)
    return Part(Contribution(gradient(values, **fields), 0, weighing), share)


def updated(
    rule: str, length: int, *parts: Part, learning_rate: float = 1.0, update_scale: float = 1.0
) -> tuple[Floats, dict[str, Floats]]:
    settings = {"learning_rate": learning_rate} | ({"eps": 0.0} if rule == "adagrad" else {})
    settled = validate(rule, settings)
    slots = RULES[rule].make_slots(length, settled)
    parameters = aligned_zeros(length)
    bound = RULES[rule].bind(parameters, slots, settled)
    apply_update(bound, parts, rate=learning_rate, version=0, update_scale=update_scale)
    return parameters, slots


def test_the_shares_make_a_mean_and_sgd_divides_each_gradient_by_its_own_staleness():
    parameters, _ = updated("sgd", 1, part([1.0]), part([3.0]))
    assert parameters.tolist() == [-2.0]
    parameters, _ = updated("sgd", 1, part([8.0], rate_scale=1.0), part([8.0], rate_scale=0.25))
    assert parameters.tolist() == [pytest.approx(-(0.5 * 8.0 + 0.5 * 8.0 * 0.25))]
    parameters, _ = updated("sgd", 1, part([2.0], rate_scale=0.0), part([4.0], rate_scale=0.0))
    assert parameters.tolist() == [0.0]


def test_staleness_shared_by_all_gradients_shortens_an_adaptive_step_and_leaves_its_slots_alone():
    parameters, slots = updated("adagrad", 1, part([2.0], rate_scale=0.25), part([4.0], rate_scale=0.25))
    # The accumulator has the plain mean, 3, squared; the step is a quarter of 1.
    assert (slots["accumulator"][0], parameters[0]) == (9.0, -0.25)


def test_a_weight_or_a_clip_multiplies_the_gradient_itself():
    parameters, slots = updated("adagrad", 1, part([2.0], share=1.0, weight=0.5))
    assert (slots["accumulator"][0], parameters[0]) == (1.0, -1.0)
    _, slots = updated("adagrad", 1, part([2.0])._replace(clip=0.5), part([3.0]))
    assert slots["accumulator"][0] == 4.0


def test_what_no_gradient_covers_is_left_alone():
    parameters, slots = updated(
        "adagrad", 5, part([2.0, 2.0], extents=(Extent(0, 2),)), part([4.0, 4.0], extents=(Extent(1, 1), Extent(4, 1)))
    )
    assert slots["accumulator"].tolist() == [1.0, 9.0, 0.0, 0.0, 4.0]
    assert parameters.tolist() == [-1.0, -1.0, 0.0, 0.0, -1.0]


def test_gradients_are_added_in_the_order_of_the_parts():
    large, small = [2.0**25], [1.0]
    forward, _ = updated("sgd", 1, *(part(v, share=1.0) for v in (large, small, [-(2.0**25)])))
    backward, _ = updated("sgd", 1, *(part(v, share=1.0) for v in (large, [-(2.0**25)], small)))
    assert (forward.tolist(), backward.tolist()) == ([0.0], floats(-1.0).tolist())


def test_the_scale_of_an_update_shrinks_its_gradients_where_they_are_the_step():
    for rule in ("sgd", "momentum", "heavy_ball", "nesterov"):
        scaled, scaled_slots = updated(rule, 1, part([2.0]), part([4.0]), update_scale=0.25)
        smaller, smaller_slots = updated(rule, 1, part([0.5]), part([1.0]))
        assert (scaled.tolist(), scaled_slots) == (smaller.tolist(), smaller_slots), rule


def test_the_scale_of_an_update_or_gradient_shrinks_the_step_alone_under_an_adaptive_rule():
    for rule in ("adagrad", "rmsprop", "adam", "adamw"):
        whole, slots = updated(rule, 1, part([2.0]), part([4.0]))
        scaled, scaled_slots = updated(rule, 1, part([2.0]), part([4.0]), update_scale=0.25)
        assert scaled.tolist() == [pytest.approx(whole[0] / 4, rel=1e-6)], rule
        assert scaled_slots == slots, rule
        fresh, _ = updated(rule, 1, part([2.0], share=1.0))
        stale, _ = updated(rule, 1, part([2.0], share=1.0, rate_scale=0.1))
        assert stale[0] == pytest.approx(fresh[0] / 10, rel=1e-6), rule


def test_an_update_of_nothing_leaves_no_trace():
    nothing = part([], kind=PayloadKind.NOTHING)
    parameters, slots = updated("momentum", 2, nothing, nothing)
    assert (parameters.tolist(), slots["velocity"].tolist()) == ([0.0, 0.0], [0.0, 0.0])
    parameters, _ = updated("sgd", 2, nothing, part([2.0, 4.0]))
    assert parameters.tolist() == [-1.0, -2.0]


def test_gradients_are_cut_at_each_others_borders():
    random = np.random.default_rng(0)
    for _ in range(50):
        parts, expected = [], np.zeros(40)
        for codec, dtype in ((FLOAT32, np.float32), (FLOAT16, np.float16), (FLOAT32, np.float32)):
            borders = np.sort(random.choice(41, 2 * random.integers(1, 5), replace=False)).reshape(-1, 2)
            extents = tuple(Extent(int(start), int(end - start)) for start, end in borders)
            values = random.integers(-8, 8, sum(length for _, length in extents)).astype(dtype)
            parts.append(part([], share=1.0, codec=codec, payload=values.tobytes(), extents=extents))
            expected[np.concatenate([np.arange(start, end) for start, end in borders])] -= values
        parts.append(part(list(range(40)), share=1.0))
        # Of few bits, and whole where others are not.
        parts.append(part([], share=1.0, codec=INT8, payload=INT8.encode(np.full(40, 2.0, np.float32))))

        parameters, _ = updated("sgd", 40, *parts)

        assert parameters.tolist() == (expected - np.arange(40) - 2.0).tolist()


def test_weight_decay_acts_once_in_an_update_and_only_where_a_gradient_is():
    settled = validate("sgd", {"learning_rate": 1.0, "weight_decay": 0.5})
    parameters = floats(4.0, 4.0)
    first, second = part([1.0], extents=(Extent(0, 1),)), part([3.0], extents=(Extent(0, 1),))
    apply_update(RULES["sgd"].bind(parameters, {}, settled), [first, second], rate=1.0, version=0)
    assert parameters.tolist() == [4.0 - (2.0 + 0.5 * 4.0), 4.0]


def test_a_number_that_is_finite_no_more_is_left_out_where_sparse_gradients_are_merged():
    parameters = floats(7.0)
    rule = RULES["sgd"].bind(parameters, {}, validate("sgd", {"learning_rate": 1.0}))
    small = part([], codec=PAIRS, payload=PAIRS.encode(floats(1.0)))
    left_out = apply_update(rule, [small, part([np.nan], volatile=True)], rate=1.0, version=0, merge="senders")
    assert (left_out, parameters.tolist()) == (1, [7.0])


FRONT = (Extent(0, 2),)


def test_a_reply_holds_what_the_whole_update_made():
    cases = {
        "one": [part([1.0, 2.0, 3.0])],
        "two": [part([1.0, 2.0, 3.0]), part([4.0, 5.0, 6.0], volatile=True)],
        "extents": [part([1.0, 2.0], extents=FRONT)],
        "an extent of all": [part([1.0, 2.0, 3.0], extents=(Extent(0, 3),))],
        "mixed": [part([1.0, 2.0, 3.0]), part([1.0, 1.0], extents=FRONT)],
        "nothing": [part([], kind=PayloadKind.NOTHING)],
    }
    settled = validate("sgd", {"learning_rate": 1.0})
    for (name, parts), codec in itertools.product(cases.items(), WORDS):
        parameters = floats(7.0, 8.0, 9.0)
        rule = RULES["sgd"].bind(parameters, {}, settled)
        buffer = bytearray(3 + 4 * 3)
        left_out = apply_update(rule, parts, rate=1.0, version=0, reply=Reply(buffer, 3, codec))
        expected = _kernels.encode(parameters, codec)
        assert (left_out, buffer[3 : 3 + len(expected)]) == (0, expected), (name, codec)
