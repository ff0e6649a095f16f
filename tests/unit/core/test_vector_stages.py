"""Staged sums of gradients: each portion's newest counts, and only complete ones of the present pass are folded."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pyps import _kernels
from pyps.core.vectors.program import Instruction, Operation
from pyps_wire.codecs import BFLOAT16, FLOAT16
from pyps_wire.errors import InvalidArgument, NoRoom, NotFinite, PypsError
from sandblaster import LENGTHS, PLAN, Driver, make_machine
from shards import refusal, run_together

SIZE = sum(LENGTHS)


@pytest.fixture
def driver() -> Driver:
    machine = make_machine()
    machine.execute(Instruction(Operation.BEGIN_PASS, count=1), Instruction(Operation.ALLOC, target="t"))
    return machine


def fold(driver: Driver, *stage_ids: int, count: int = 1) -> np.ndarray:
    driver.execute(Instruction(Operation.FOLD, target="t", stage_ids=stage_ids, count=count))
    return driver.held("t")


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def test_stages_are_folded_in_the_order_named_and_divided_by_the_examples(driver):
    values = {stage_id: numbers(stage_id) for stage_id in (3, 1, 2)}
    for portion_id, (stage_id, whole) in enumerate(values.items()):
        driver.stage(whole, portion_id=portion_id, stage_id=stage_id)

    total = np.zeros(SIZE)
    for stage_id in (2, 3, 1):
        total = total + values[stage_id]

    assert np.array_equal(fold(driver, 2, 3, 1, count=7), (total / 7).astype(np.float32))


def test_a_stage_may_come_in_any_codec_and_at_any_address(driver):
    whole = numbers(1)
    for stage_id, codec in enumerate((FLOAT16, BFLOAT16), start=1):
        for part in driver.parts(whole, stage_id=stage_id):
            values = np.frombuffer(part.payload, np.float32)
            payload = memoryview(b"\x00" + bytes(codec.encode(values)))[1:]
            driver.machine.stages.add(replace(part, codec=codec, payload=payload))

        rounded = np.empty(SIZE, np.float32)
        _kernels.decode(bytes(codec.encode(whole)), codec, rounded)
        assert np.array_equal(fold(driver, stage_id), rounded), codec


def test_a_stage_under_a_later_lease_replaces_the_earlier_one_which_is_ignored_from_then_on(driver):
    driver.stage(numbers(1), portion_id=4, stage_id=10)
    driver.stage(numbers(2), portion_id=4, stage_id=11)
    assert driver.stage(numbers(1), portion_id=4, stage_id=10) == [True] * 3, "no longer needed"

    assert len(driver.machine.stages._by_id) == 1
    assert driver.machine.bytes == 8 * SIZE
    assert np.array_equal(fold(driver, 11), numbers(2))
    with pytest.raises(
        InvalidArgument, match=r"instruction 1 \(FOLD\) names the stage 10, of which 0 of 3 shards are here"
    ):
        fold(driver, 10)


def test_a_stage_that_is_sent_again_changes_nothing(driver):
    driver.stage(numbers(1))

    assert driver.stage(numbers(2)) == [True] * 3

    assert driver.machine.bytes == 8 * SIZE
    assert np.array_equal(fold(driver, 1), numbers(1))


def test_a_stage_cut_off_midway_goes_on_where_it_is_sent_again(driver):
    parts = driver.parts(numbers(1))
    driver.machine.stages.add(parts[0])

    with pytest.raises(InvalidArgument, match="the stage 1, of which 1 of 3 shards are here in pass 1"):
        fold(driver, 1)

    assert [driver.machine.stages.add(part) for part in parts] == [False, False, True]
    assert np.array_equal(fold(driver, 1), numbers(1))


def test_a_new_pass_forgets_all_stages(driver):
    driver.stage(numbers(1))

    driver.execute(Instruction(Operation.BEGIN_PASS, count=2))

    assert len(driver.machine.stages._by_id) == 0 and driver.machine.bytes == 4 * SIZE
    with pytest.raises(InvalidArgument, match="in pass 2"):
        fold(driver, 1)


def test_a_stage_that_is_not_finite_is_refused_with_the_place(driver):
    for bad in (math.nan, math.inf, -math.inf):
        values = numbers(1)
        values[LENGTHS[0] + LENGTHS[1] - 1] = bad

        words = refusal(driver.stage, values, error=NotFinite)
        assert "stage 1 holds NaN or infinity for parameter 4 of shard 2" in words
        assert driver.machine.bytes == 4 * SIZE + 4 * LENGTHS[0], bad
    assert driver.stage(numbers(1)) == [False, False, True]


def test_a_part_that_does_not_fit_is_refused(driver):
    for fields, words in (
        ({"pass_": 0}, "stage 1 is of pass 0, and pass 1 is under way here"),
        ({"pass_": 2}, "stage 1 is of pass 2, and pass 1 is under way here"),
        ({"shard_id": 1}, "stage 1 has shard 1, this server holds 0, 2, 4"),
        ({"num_shards": 4}, "num_shards 4, this server holds 3 shards"),
        ({"num_shards": 0}, "num_shards 0, this server holds 3 shards"),
        ({"stage_id": 0}, "stage_id 0; expected the lease of its first portion"),
        ({"codec": FLOAT16}, "the payload is 68 bytes long; 17 parameters as float16 are 34 bytes"),
        ({"payload": b"1234"}, "the payload is 4 bytes long; 17 parameters as float32 are 68 bytes"),
    ):
        part = replace(driver.parts(numbers(1))[0], **fields)
        assert words in refusal(driver.machine.stages.add, part, error=PypsError)
        assert (driver.machine.bytes, len(driver.machine.stages._by_id)) == (4 * SIZE, 0), fields
    driver.stage(numbers(1), portion_id=4)
    with pytest.raises(InvalidArgument, match="stage 1 is of portion 5, and was of portion 4 before"):
        driver.stage(numbers(1), portion_id=5)


def test_stages_beyond_the_budget_are_refused_with_the_settings_to_change():
    driver = make_machine(bytes_max=4 * SIZE * 12)
    driver.execute(Instruction(Operation.BEGIN_PASS, count=1))
    for k in range(12):
        driver.stage(numbers(1), portion_id=k, stage_id=k + 1)

    with pytest.raises(NoRoom, match="--max-vector-bytes, or start the coordinator with fewer stages"):
        driver.stage(numbers(1), portion_id=12, stage_id=13)

    assert len(driver.machine.stages._by_id) == 12
    # A later lease of a portion needs no more room than the earlier one had.
    driver.stage(numbers(2), portion_id=3, stage_id=14)


def test_many_workers_stage_at_once_and_the_newest_of_each_portion_is_left(driver):
    def worker(seed: int):
        def stage() -> None:
            order = np.random.default_rng(seed).permutation(6)
            for portion_id in order:
                stage_id = int(10 * (seed + 1) + portion_id)
                driver.stage(np.full(SIZE, stage_id), portion_id=int(portion_id), stage_id=stage_id)

        return stage

    run_together([worker(seed) for seed in range(4)])

    assert len(driver.machine.stages._by_id) == 6
    assert driver.machine.bytes == 4 * SIZE * (1 + 6)
    newest = [40 + portion_id for portion_id in range(6)]
    assert (fold(driver, *newest) == sum(newest)).all()


def test_the_stages_of_an_earlier_coordinator_are_gone_once_another_attached(driver):
    driver.stage(numbers(1))

    driver.machine.attach(PLAN, coordinator_epoch=driver.epoch)
    assert len(driver.machine.stages._by_id) == 1
    driver.machine.attach(PLAN)

    assert len(driver.machine.stages._by_id) == 0 and driver.machine.bytes == 4 * SIZE
