"""A shard's promises: what a push changes, what a refused one does not, what is recorded and restored."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.gradient import Codec, Extent, Gradient, PayloadKind
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps_wire.errors import BadRequest, WrongSize
from shards import Log, crew, floats, gradient, make_shard, pull, push, restored, roster


def everything(shard: Shard) -> tuple[object, ...]:
    """All that a refused push must leave alone, in comparable form."""
    state = shard.state()
    slots = {name: slot.tobytes() for name, slot in state.slots.items()}
    return state.version, state.parameters.tobytes(), slots, state.ledger, state.pending


def test_a_push_subtracts_the_learning_rate_times_the_gradient() -> None:
    shard = make_shard([1.0, 2.0], settings={"learning_rate": 0.5})
    push(shard, [2.0, -4.0])
    assert pull(shard)[1].tolist() == [0.0, 4.0]


def test_a_receipt_tells_all_of_an_applied_push() -> None:
    shard = make_shard([0.0], shard_id=7, settings={"learning_rate": 0.5}, policy="divide", epoch=3, version=9)
    receipt = shard.push(gradient([1.0], sequence=5, base_version=5, epoch=3), roster=crew(2))
    assert receipt == Receipt(
        shard_id=7,
        sequence=5,
        outcome=Outcome.APPLIED,
        version_before=9,
        version_after=10,
        staleness=4,
        rate=0.125,
        rate_scale=0.25,
        weight=1.0,
        num_workers=2,
        epoch=3,
    )


def test_each_update_raises_the_version_by_one() -> None:
    shard = make_shard([0.0])
    for sequence in range(3):
        push(shard, [1.0], sequence=sequence)
    assert shard.version == 3


def test_the_first_parameters_are_copied_so_that_nobody_else_can_change_them() -> None:
    first = floats(1.0, 2.0)
    shard = make_shard(first)
    first[:] = 9.0
    assert pull(shard)[1].tolist() == [1.0, 2.0]


def test_a_reader_cannot_write_into_the_shard() -> None:
    shard = make_shard([1.0])

    def write(version: int, parameters: np.ndarray) -> None:
        parameters[0] = 9.0

    with pytest.raises(ValueError, match="read-only"):
        shard.read(write)


def test_a_failing_reader_leaves_the_shard_usable() -> None:
    shard = make_shard([1.0])
    with pytest.raises(ZeroDivisionError):
        shard.read(lambda version, parameters: 1 // 0)
    assert push(shard, [1.0]).outcome == Outcome.APPLIED


# Partial pushes.


def test_a_partial_push_changes_only_its_stretches() -> None:
    shard = make_shard([0.0] * 6, rule="adagrad", settings={"learning_rate": 1.0, "eps": 0.0})
    push(shard, [3.0, 4.0, 5.0], extents=(Extent(1, 2), Extent(5, 1)))
    state = shard.state()
    assert state.parameters.tolist() == [0.0, -1.0, -1.0, 0.0, 0.0, -1.0]
    assert state.slots["accumulator"].tolist() == [0.0, 9.0, 16.0, 0.0, 0.0, 25.0]


@pytest.mark.parametrize("codec", list(Codec))
def test_a_partial_push_is_read_in_its_own_codec(codec: Codec) -> None:
    shard = make_shard([0.0] * 4)
    payload = {
        Codec.FLOAT32: floats(1.0, 2.0).tobytes(),
        Codec.FLOAT16: np.array([1.0, 2.0], np.float16).tobytes(),
        Codec.BFLOAT16: (floats(1.0, 2.0).view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    }[codec]
    push(shard, [], payload=payload, codec=codec, extents=(Extent(0, 1), Extent(3, 1)))
    assert pull(shard)[1].tolist() == [-1.0, 0.0, 0.0, -2.0]


def test_a_payload_may_lie_anywhere_in_a_message() -> None:
    shard = make_shard([0.0, 0.0])
    message = b"abc" + floats(1.0, 2.0).tobytes()
    push(shard, [], payload=memoryview(message)[3:])
    assert pull(shard)[1].tolist() == [-1.0, -2.0]


# Pushes that cannot be: errors.


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_version": -1}, "version -1 of shard 0, which is at version 2"),
        ({"base_version": 3}, "version 3 of shard 0, which is at version 2"),
        ({"base_version": 1, "newest_base_version": 4}, "version 4 of shard 0, which is at version 2"),
    ],
)
def test_a_version_that_never_was_is_an_error_that_names_both(fields: dict[str, int], words: str) -> None:
    shard = make_shard([0.0], version=2)
    before = everything(shard)
    with pytest.raises(BadRequest, match=words):
        shard.push(gradient([1.0], **fields), roster=roster())
    assert everything(shard) == before


def test_a_payload_of_the_wrong_size_changes_nothing() -> None:
    shard = make_shard([0.0] * 4)
    before = everything(shard)
    with pytest.raises(WrongSize, match="12 bytes long; 4 of the shard's 4 parameters as float32 are 16"):
        push(shard, [1.0, 2.0, 3.0])
    assert everything(shard) == before


# Refused pushes: receipts.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    shard = make_shard([0.0] * 3, rule="adagrad")
    push(shard, [1.0, 1.0, 1.0])
    before = everything(shard)
    receipt = push(shard, [1.0, 1.0, bad], sequence=1)
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.NOT_FINITE)
    assert everything(shard) == before


def test_a_refusal_of_nan_names_worker_shard_and_parameter() -> None:
    shard = make_shard([0.0] * 8, shard_id=5)
    receipt = push(shard, [1.0, 1.0, np.nan], worker_id="rack-3", extents=(Extent(0, 1), Extent(4, 2)))
    assert "'rack-3'" in receipt.message
    assert "parameter 5 of shard 5" in receipt.message


def test_a_refused_nan_is_judged_anew_when_it_comes_again() -> None:
    shard = make_shard([0.0])
    push(shard, [np.nan])
    assert push(shard, [1.0]).outcome == Outcome.APPLIED


def test_a_gradient_of_another_epoch_is_refused_and_told_to_pull() -> None:
    shard = make_shard([0.0], epoch=2, version=10)
    before = everything(shard)
    receipt = push(shard, [1.0], epoch=1, base_version=99)
    assert receipt.reason == Reason.EPOCH
    assert "epoch 1" in receipt.message and "epoch 2" in receipt.message and "pull again" in receipt.message
    assert everything(shard) == before


def test_a_push_refused_for_its_epoch_may_come_again_on_newly_pulled_parameters() -> None:
    shard = make_shard([0.0], epoch=2)
    push(shard, [1.0], epoch=1)
    assert push(shard, [1.0], epoch=2).outcome == Outcome.APPLIED


def test_a_finished_shard_refuses_pushes() -> None:
    shard = make_shard([0.0])
    shard.finish()
    assert push(shard, [1.0]).reason == Reason.FINISHED


def test_a_finished_shard_still_answers_what_it_answered_before() -> None:
    shard = make_shard([0.0])
    push(shard, [1.0])
    shard.finish()
    assert push(shard, [1.0], base_version=0).duplicate


# Duplicates.


def test_a_repeated_push_gets_the_original_receipt_and_is_not_applied_again() -> None:
    shard = make_shard([0.0])
    first = push(shard, [1.0])
    push(shard, [1.0], sequence=1)
    again = push(shard, [1.0], base_version=0)
    assert again.duplicate
    assert again.version_after == first.version_after == 1
    assert pull(shard)[1].tolist() == [-2.0]


def test_a_repeated_push_is_known_before_its_epoch_is_looked_at() -> None:
    shard = make_shard([0.0])
    push(shard, [1.0])
    later = restored(shard, shard.state(), epoch=1)
    assert push(later, [1.0], epoch=0, base_version=0).duplicate


def test_a_push_older_than_the_kept_receipts_is_refused_as_forgotten() -> None:
    shard = make_shard([0.0])
    for sequence in range(9):
        push(shard, [1.0], sequence=sequence)
    before = everything(shard)
    assert push(shard, [1.0], sequence=0, base_version=0).reason == Reason.FORGOTTEN
    assert everything(shard) == before


# Deltas.


def test_a_delta_is_added_whatever_the_rule_and_its_learning_rate() -> None:
    shard = make_shard([1.0, 1.0], rule="adagrad", settings={"learning_rate": 0.05})
    receipt = push(shard, [0.5, -0.25], kind=PayloadKind.DELTA)
    state = shard.state()
    assert state.parameters.tolist() == [1.5, 0.75]
    assert state.slots["accumulator"].tolist() == [0.0, 0.0]
    assert (receipt.rate, receipt.version_after) == (1.0, 1)


def test_a_stale_delta_is_scaled_by_the_policy() -> None:
    shard = make_shard([0.0], policy="divide", version=4)
    receipt = push(shard, [1.0], kind=PayloadKind.DELTA, base_version=0)
    assert pull(shard)[1].tolist() == [0.25]
    assert receipt.rate == 0.25


def test_a_repeated_delta_is_not_added_again() -> None:
    shard = make_shard([0.0])
    push(shard, [1.0], kind=PayloadKind.DELTA)
    assert push(shard, [1.0], kind=PayloadKind.DELTA).duplicate
    assert pull(shard)[1].tolist() == [1.0]


# Recording.


def test_the_recorder_hears_what_was_decided_and_nothing_else() -> None:
    log = Log()
    shard = make_shard([0.0], recorder=log)
    push(shard, [1.0])
    push(shard, [1.0])  # a duplicate
    push(shard, [np.nan], sequence=1)
    pull(shard, "a")
    pull(shard)  # an observer
    assert [type(event).__name__ for event in log.events[0]] == ["Pushed", "Pulled"]


class FullDisk(Log):
    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        raise OSError("no space left on device")


def test_a_push_that_cannot_be_recorded_changes_nothing() -> None:
    shard = make_shard([0.0], recorder=FullDisk())
    before = everything(shard)
    with pytest.raises(OSError, match="no space"):
        push(shard, [1.0])
    assert everything(shard) == before


# Checkpoints.


def test_a_restored_shard_goes_on_bit_for_bit() -> None:
    values = np.random.default_rng(0).standard_normal((20, 33)).astype(np.float32)
    settings = {"learning_rate": 0.1}
    whole = make_shard(np.ones(33), rule="adagrad", settings=settings)
    half = make_shard(np.ones(33), rule="adagrad", settings=settings)
    for sequence in range(20):
        push(whole, values[sequence], sequence=sequence)
        push(half, values[sequence], sequence=sequence)
        if sequence == 9:
            half = restored(half, half.state())
    assert everything(whole) == everything(half)


def test_a_state_is_a_copy() -> None:
    shard = make_shard([1.0], rule="adagrad")
    state = shard.state()
    push(shard, [1.0])
    assert (state.version, state.parameters.tolist(), state.slots["accumulator"].tolist()) == (
        0,
        [1.0],
        [0.0],
    )


def test_slots_of_another_rule_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"\['momentum'\].*\['accumulator'\]"):
        make_shard([0.0], rule="adagrad", slots={"momentum": floats(0.0)})


def test_slots_of_another_length_are_refused() -> None:
    with pytest.raises(WrongSize, match="2 values for 1 parameters"):
        make_shard([0.0], rule="adagrad", slots={"accumulator": floats(0.0, 0.0)})
