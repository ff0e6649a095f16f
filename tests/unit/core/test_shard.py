"""A shard's promises: what a push changes, what a refused one does not, what is recorded and restored."""

import numpy as np
import pytest

from kernel_values import WORDS
from pyps.core.gradient import Extent, PayloadKind
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.rules import RULES
from pyps.core.store import PendingBudget
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32
from pyps_wire.errors import InvalidArgument, PypsError, WrongSize
from shards import (
    FullDisk,
    Log,
    everything,
    floats,
    gradient,
    make_behaviour,
    make_shard,
    nothing,
    pull,
    push,
    refusal,
    restored,
    roster,
    roster_of,
    run_together,
)

BUFFER = PayloadKind.BUFFER
# The sign with which a gradient is pushed as each kind.
KINDS = {PayloadKind.GRADIENT: 1, PayloadKind.DELTA: -1}


def test_a_receipt_tells_all_of_an_applied_push():
    shard = make_shard([0.0], shard_id=7, settings={"learning_rate": 0.5}, policy="divide", epoch=3, version=9)
    receipt = shard.push(gradient([1.0], sequence=5, base_version=5, epoch=3), roster=roster_of(2)).receipt
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


def test_nobody_else_can_change_the_parameters():
    first = floats(1.0, 2.0)
    shard = make_shard(first)
    first[:] = 9.0
    shard.state().parameters[:] = 9.0

    def write(version: int, parameters: np.ndarray) -> None:
        parameters[0] = 9.0

    with pytest.raises(ValueError, match="read-only"):
        shard.read(write)
    assert pull(shard)[1].tolist() == [1.0, 2.0]
    assert push(shard, [1.0, 1.0]).outcome == Outcome.APPLIED, "a failing reader leaves the shard usable"


def test_a_payload_is_read_in_its_own_codec_wherever_it_lies_in_a_message_and_clipped_by_what_it_says():
    payloads = {
        FLOAT32: floats(3.0, 4.0).tobytes(),
        FLOAT16: np.array([3.0, 4.0], np.float16).tobytes(),
        BFLOAT16: (floats(3.0, 4.0).view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    }
    assert set(payloads) == set(WORDS)
    for codec, payload in payloads.items():
        for clip_norm, expected in ((0.0, [-3.0, 0.0, 0.0, -4.0]), (2.5, [-1.5, 0.0, 0.0, -2.0])):
            shard = make_shard([0.0] * 4, behaviour=make_behaviour(clip_norm=clip_norm))
            message = memoryview(b"abc" + payload)[3:]
            push(shard, [], payload=message, codec=codec, extents=(Extent(0, 1), Extent(3, 1)))
            assert pull(shard)[1].tolist() == expected, (codec, clip_norm)


def test_a_push_that_cannot_be_is_an_error_that_names_the_numbers_and_changes_nothing():
    shard = make_shard([0.0] * 4, version=2)
    before = everything(shard)
    for fields, words in (
        ({"base_version": -1}, "version -1 of shard 0, which is at version 2"),
        ({"base_version": 3}, "version 3 of shard 0, which is at version 2"),
        ({"base_version": 1, "newest_base_version": 4}, "version 4 of shard 0, which is at version 2"),
        ({"payload": bytes(12)}, "12 bytes long; 4 parameters as float32 are 16"),
        ({"payload": bytes(20)}, "20 bytes long; 4 parameters as float32 are 16"),
        ({"kind": PayloadKind.NOTHING}, "a push of NOTHING came with a payload"),
        *(({"learning_rate": bad}, "push 0 of worker 'a': learning_rate is") for bad in (-0.1, np.nan, np.inf)),
        *(({"momentum": bad}, "push 0 of worker 'a': momentum is") for bad in (-0.1, 1.0, 1.5, np.nan)),
        ({"momentum": 0.5}, "worker 'a' sent a momentum, but sgd has none"),
        *(({"norm": bad}, "gradient_norm is") for bad in (-1.0, np.nan, np.inf)),
    ):
        assert words in refusal(push, shard, [1.0] * 4, **fields, error=PypsError)
        assert everything(shard) == before, words


def test_a_gradient_that_is_not_finite_is_refused_and_its_retry_is_decided_again():
    shard = make_shard([0.0] * 8, rule="adagrad", shard_id=5)
    push(shard, [1.0] * 8)
    before = everything(shard)
    for bad in (np.nan, np.inf, -np.inf):
        receipt = push(shard, [1.0, 1.0, bad], sequence=1, worker_id="rack-3", extents=(Extent(0, 1), Extent(4, 2)))
        assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.NOT_FINITE), bad
        assert "'rack-3'" in receipt.message and "parameter 5 of shard 5" in receipt.message
        assert everything(shard) == before, bad
    assert push(shard, [1.0] * 8, sequence=1, worker_id="rack-3").outcome == Outcome.APPLIED


def test_a_gradient_of_another_epoch_is_refused_and_may_be_sent_again():
    shard = make_shard([0.0], epoch=2, version=10)
    before = everything(shard)
    receipt = push(shard, [1.0], epoch=1, base_version=99)
    assert receipt.reason == Reason.EPOCH
    assert "epoch 1" in receipt.message and "epoch 2" in receipt.message and "pull again" in receipt.message
    assert everything(shard) == before
    assert push(shard, [1.0], epoch=2).outcome == Outcome.APPLIED


def test_a_finished_shard_refuses_pushes_and_still_answers_what_it_answered_before():
    shard = make_shard([0.0])
    push(shard, [1.0])
    shard.finish()
    assert push(shard, [1.0], sequence=1).reason == Reason.FINISHED
    assert push(shard, [1.0], base_version=0).duplicate


def test_a_repeated_push_is_known_before_its_epoch_is_looked_at():
    shard = make_shard([0.0])
    push(shard, [1.0])
    later = restored(shard, shard.state(), epoch=1)
    assert push(later, [1.0], epoch=0, base_version=0).duplicate


def test_a_delta_is_a_gradient_of_the_runs_own_rule_with_the_other_sign():
    behaviour = make_behaviour("hardsync", rate_schedule="step:every=1,factor=0.5", clip_norm=0.4)
    for rule in RULES:
        both = {kind: make_shard([1.0, 2.0], rule=rule, behaviour=behaviour, kind=kind) for kind in KINDS}
        for worker_id, values in (("a", np.array([0.5, -0.25])), ("b", np.array([0.125, 1.0]))):
            for kind, sign in KINDS.items():
                fields = {"worker_id": worker_id, "kind": kind, "base_version": 0}
                receipt = push(both[kind], sign * values, workers=roster("a", "b"), **fields)
        gradients, deltas = (shard.state() for shard in both.values())
        assert receipt.version_after == 1
        assert deltas.parameters.tolist() == gradients.parameters.tolist() != [1.0, 2.0], rule
        for name, slot in gradients.slots.items():
            assert deltas.slots[name].tolist() == slot.tolist(), (rule, name)
            assert slot.any() or name == "gradient_sum", (rule, name)


def test_a_push_of_another_kind_than_the_runs_is_refused():
    for kind, others in ((PayloadKind.GRADIENT, "DELTA BUFFER"), (PayloadKind.DELTA, "GRADIENT BUFFER")):
        shard = make_shard([0.0], kind=kind)
        for other in (*map(PayloadKind.__getitem__, others.split()), 9):
            said = refusal(push, shard, [1.0], worker_id="w", kind=other)
            words = f"worker 'w' pushed kind {int(other)} to shard 0; this run's first worker declared {kind.name}"
            assert words in said
        assert (shard.version, shard.num_receipts) == (0, 0)
        assert shard.push(nothing(), roster=roster("a")).receipt.outcome is Outcome.APPLIED


def test_a_buffers_move_is_scaled_by_the_policy_alone_whatever_rule_rate_schedule_and_clipping():
    behaviour = make_behaviour(policy="divide", rate_schedule="step:every=1,factor=0.5", clip_norm=0.1)
    settings = {"learning_rate": 0.05}
    shard = make_shard([1.0, 1.0], rule="adagrad", settings=settings, behaviour=behaviour, kind=BUFFER, version=3)
    receipt = push(shard, [0.5, -0.25], kind=BUFFER, base_version=1)
    state = shard.state()
    assert state.parameters.tolist() == [1.25, 0.875]
    assert state.slots["accumulator"].tolist() == [0.0, 0.0]
    assert (receipt.rate, receipt.version_after) == (0.5, 4)


def test_the_recorder_hears_what_was_decided_and_nothing_else():
    log = Log()
    shard = make_shard([0.0], recorder=log)
    push(shard, [1.0])
    push(shard, [1.0])  # a duplicate
    push(shard, [np.nan], sequence=1)
    pull(shard, "a")
    pull(shard)  # an observer
    assert [type(event).__name__ for event in log.events[0]] == ["Pushed", "Pulled"]


def test_a_call_that_cannot_be_recorded_changes_nothing():
    two = roster("a", "b")
    for what in (
        lambda shard: push(shard, [3.0], sequence=1, worker_id="b", workers=two),
        lambda shard: push(shard, [3.0], sequence=1, worker_id="b", workers=roster("a", "b", "c")),
        lambda shard: shard.complete(roster("a")),
        lambda shard: shard.configure(behaviour=make_behaviour("async"), learning_rate=5.0, roster=two),
    ):
        budget = PendingBudget()
        shard = make_shard([0.0], protocol="hardsync", recorder=FullDisk(room=1), budget=budget)
        push(shard, [1.0], workers=roster("a", "b", "c"))
        before = everything(shard)
        with pytest.raises(OSError, match="no space"):
            what(shard)
        assert (everything(shard), budget.bytes_held) == (before, 4)


def test_a_restored_shard_goes_on_bit_for_bit_with_its_base_rate_and_examples():
    values = np.random.default_rng(0).standard_normal((20, 33)).astype(np.float32)
    whole, half = (make_shard(np.ones(33), rule="adam", settings={"learning_rate": 0.1}) for _ in range(2))
    for sequence in range(20):
        rate = {"learning_rate": 0.3, "momentum": 0.5} if sequence == 5 else {}
        for shard in (whole, half):
            push(shard, values[sequence], sequence=sequence, example_count=32, **rate)
        if sequence == 9:
            half = restored(half, half.state())
    assert everything(whole) == everything(half)
    assert (half.learning_rate, half.state().momentum, half.examples) == (0.3, 0.5, 640)


def test_slots_of_another_rule_or_length_are_refused():
    with pytest.raises(InvalidArgument, match=r"\['momentum'\].*\['accumulator'\]"):
        make_shard([0.0], rule="adagrad", slots={"momentum": floats(0.0)})
    with pytest.raises(WrongSize, match="2 values for 1 parameters"):
        make_shard([0.0], rule="adagrad", slots={"accumulator": floats(0.0, 0.0)})


# A call that waits for a version is woken once, and never under the lock.


def test_a_waiter_is_called_once_when_the_version_is_reached_or_at_once_where_it_is_there():
    shard = make_shard([0.0])
    calls: list[int] = []
    # Not under the lock: the call may read the shard.
    shard.when_version(2, lambda: calls.append(pull(shard)[0]))
    for sequence in range(3):
        push(shard, [1.0], sequence=sequence)
    assert calls == [2]
    cancel = shard.when_version(2, lambda: calls.append(9))
    assert (calls, cancel()) == ([2, 9], False)


def test_a_cancelled_waiter_is_never_called_and_another_goes_on_waiting():
    shard = make_shard([0.0])
    calls: list[int] = []
    shard.when_version(1, lambda: calls.append(1))
    cancel = shard.when_version(1, lambda: calls.append(2))
    assert (cancel(), cancel()) == (True, False)
    push(shard, [1.0])
    assert calls == [1]


def test_each_of_many_waiters_is_called_once_while_many_push():
    shard = make_shard([0.0])
    workers, pushes = 4, 50
    calls = [0] * (workers * pushes)

    def count(version: int) -> None:
        calls[version - 1] += 1

    def worker(index: int) -> None:
        for sequence in range(pushes):
            shard.when_version(index * pushes + sequence + 1, lambda v=index * pushes + sequence + 1: count(v))
            shard.push(gradient([1.0], worker_id=str(index), sequence=sequence), roster=roster_of(workers))

    run_together([lambda index=index: worker(index) for index in range(workers)])
    assert calls == [1] * (workers * pushes)
