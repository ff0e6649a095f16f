"""What a push brings back: the parameters, written by the update that it makes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernel_values import WORDS
from pyps import _kernels
from pyps.core import shard as shard_module
from pyps.core.arrays import Floats
from pyps.core.gradient import Extent, Finding, Gradient, Reply, scan
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.recorder import Event, Pulled, Pushed
from pyps.core.shard import Shard
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.errors import InvalidArgument
from shards import Log, floats, gradient, make_behaviour, make_shard, nothing, pull, push, roster

MARGIN = 8


@dataclass
class Exchanged:
    """What became of a push that wanted the parameters, and the memory around them."""

    pushed: shard_module.Pushed
    memory: bytearray
    codec: Codec

    @property
    def receipt(self) -> Receipt:
        return self.pushed.receipt

    @property
    def came(self) -> bool:
        return self.pushed.version is not None

    @property
    def parameters(self) -> Floats:
        assert self.came
        assert self.memory[:MARGIN] + self.memory[-MARGIN:] == b"\xaa" * 2 * MARGIN
        numbers = memoryview(self.memory)[MARGIN:-MARGIN]
        values = np.zeros(len(numbers) // self.codec.max_bytes(1), np.float32)
        _kernels.decode(numbers, self.codec, values)
        return values


def exchange(
    shard: Shard, pushed: Gradient, *workers: str, held_version: int = -1, codec: Codec = FLOAT32, **others: Any
) -> Exchanged:
    memory = bytearray(b"\xaa" * (codec.max_bytes(shard.length) + 2 * MARGIN))
    reply = Reply(memory, MARGIN, codec)
    made = shard.push(pushed, roster=roster(*workers), reply=reply, held_version=held_version, **others)
    return Exchanged(made, memory, codec)


def volatile(values: npt.ArrayLike, **fields: object) -> tuple[Gradient, Floats]:
    """Return a gradient in memory that its worker can still write, and that memory."""
    memory = np.array(values, np.float32)
    return gradient(memory, **{"payload": memory.view(np.uint8).data, "volatile": True, **fields}), memory


class Meddling(Log):
    """A worker that writes to its gradient when it is about to be applied."""

    def __init__(self, write: Callable[[], None]):
        super().__init__()
        self._write = write

    def record(self, event: Event) -> None:
        if isinstance(event, Pushed):
            self._write()
        super().record(event)


def test_a_push_that_is_an_update_brings_back_what_it_made_and_makes_what_it_would_without_an_answer():
    for rule, codec in itertools.product(("sgd", "adagrad", "adam"), WORDS):
        alone, shard = (make_shard(np.linspace(-1, 1, 777), rule=rule) for _ in range(2))
        for sequence in range(2):
            pushed = gradient(np.linspace(0.1, 2, 777), sequence=sequence, base_version=sequence)
            answer = exchange(shard, pushed, codec=codec, held_version=sequence)
            assert answer.receipt == alone.push(pushed, roster=roster()).receipt
            version, parameters = pull(shard)
            assert (answer.receipt.version_after, answer.pushed.version) == (version, version), (rule, codec)
            expected = np.zeros(777, np.float32)
            _kernels.decode(_kernels.encode(parameters, codec), codec, expected)
            np.testing.assert_array_equal(answer.parameters, expected)
            np.testing.assert_array_equal(parameters, pull(alone)[1])


def test_a_push_of_nothing_brings_back_newer_parameters():
    shard = make_shard([1, 2])
    assert not exchange(shard, nothing(), held_version=0).came
    push(shard, [1, 1], worker_id="b")
    answer = exchange(shard, nothing(sequence=1), "a", "b", held_version=0)
    assert (answer.receipt.outcome, answer.receipt.version_after) == (Outcome.APPLIED, 1)
    np.testing.assert_array_equal(answer.parameters, floats(0, 1))


def test_of_a_round_the_last_contributor_gets_its_end_and_the_others_wait_for_it():
    shard = make_shard([8, 8], protocol="hardsync")
    waits = exchange(shard, gradient([2, 2]), "a", "b", held_version=0)
    assert (waits.receipt.outcome, waits.receipt.min_version, waits.came) == (Outcome.PENDING, 1, False)
    answer = exchange(shard, gradient([4, 4], worker_id="b"), "a", "b", held_version=0)
    assert (answer.receipt.outcome, answer.receipt.version_after, answer.pushed.version) == (Outcome.APPLIED, 1, 1)
    np.testing.assert_array_equal(answer.parameters, floats(5, 5))


def test_a_softsync_push_that_waits_brings_what_others_made():
    shard = make_shard([8, 8], protocol="softsync:n=1")
    for worker_id in "bc":
        push(shard, [2, 2], worker_id=worker_id, workers=roster("b", "c"))
    answer = exchange(shard, gradient([1, 1]), "a", "b", held_version=0)
    assert (answer.receipt.outcome, answer.receipt.min_version, shard.version) == (Outcome.PENDING, 0, 1)
    np.testing.assert_array_equal(answer.parameters, floats(6, 6))


def test_a_duplicate_brings_what_there_is_by_now():
    shard = make_shard([8, 8])
    first = exchange(shard, gradient([1, 1])).receipt
    push(shard, [2, 2], sequence=1)
    answer = exchange(shard, gradient([1, 1]), held_version=1)
    assert answer.receipt == first._replace(duplicate=True)
    assert answer.pushed.version == 2
    np.testing.assert_array_equal(answer.parameters, floats(5, 5))


def test_a_refused_push_changes_nothing_and_brings_what_there_is():
    for pushed, reason in (
        (gradient([1, np.nan]), Reason.NOT_FINITE),
        (gradient([1, 1], epoch=7), Reason.EPOCH),
        (gradient([1, 1], sequence=5), Reason.STALE),
    ):
        shard = make_shard([8, 8], policy="drop:spread=0")
        push(shard, [1, 1], worker_id="b")
        answer = exchange(shard, pushed, "a", "b", held_version=0)
        assert (answer.receipt.outcome, answer.receipt.reason, shard.version) == (Outcome.REJECTED, reason, 1)
        np.testing.assert_array_equal(answer.parameters, floats(7, 7))


def test_parameters_that_came_with_a_receipt_are_recorded_as_a_pull_after_their_update():
    log = Log()
    shard = make_shard([8, 8], recorder=log)
    exchange(shard, gradient([1, 1]))
    exchange(shard, gradient([1, 1]))
    exchange(shard, gradient([1, 1], sequence=1), held_version=9)
    kinds = [(type(event), getattr(event, "version", None)) for event in log.events[0]]
    assert kinds == [(Pushed, None), (Pulled, 1), (Pulled, 1), (Pushed, None)]


def test_a_finding_says_the_place_in_the_shard_and_refuses_what_does_not_fit():
    found = scan(gradient([1, np.nan], extents=(Extent(0, 1), Extent(3, 1))), shard_id=2, shard_length=4)
    assert found == Finding(2, 3)
    assert scan(nothing(), shard_id=2, shard_length=4).finite
    with pytest.raises(InvalidArgument, match="shard 2"):
        scan(gradient([1]), shard_id=2, shard_length=4)


def test_numbers_that_are_finite_no_more_when_they_are_applied_leave_the_parameters_finite():
    pushed, memory = volatile(np.ones(3000))
    shard = make_shard(np.ones(3000), recorder=Meddling(lambda: memory.__setitem__(1500, np.nan)))
    answer = exchange(shard, pushed)
    receipt = answer.receipt
    _, parameters = pull(shard)
    assert (receipt.outcome, receipt.version_after) == (Outcome.APPLIED, 1)
    left_out = np.flatnonzero(parameters == 1.0)
    assert 1500 in left_out
    assert f"{left_out.size} numbers were left out" in receipt.message
    assert np.count_nonzero(parameters == 0.0) == 3000 - left_out.size > 0
    np.testing.assert_array_equal(answer.parameters, parameters)
    memory[:] = 1.0
    assert shard.push(pushed, roster=roster()).receipt == receipt._replace(duplicate=True)


def test_a_volatile_gradient_that_waits_is_kept_as_it_was():
    log = Log()
    shard = make_shard([8, 8], protocol="hardsync", recorder=log)
    pushed, memory = volatile([2, 2])
    assert shard.push(pushed, roster=roster("a", "b")).receipt.outcome is Outcome.PENDING
    memory[:] = np.nan
    assert not log.pushes(0)[0].gradient.volatile
    push(shard, [4, 4], worker_id="b", workers=roster("a", "b"))
    np.testing.assert_array_equal(pull(shard)[1], floats(5, 5))


def test_a_volatile_gradient_that_changed_before_it_could_be_kept_is_refused():
    log = Log()
    shard = make_shard([8, 8], protocol="hardsync", recorder=log)
    pushed, memory = volatile([2, 2])
    finding = scan(pushed, shard_id=0, shard_length=2)
    memory[1] = np.inf
    answer = exchange(shard, pushed, "a", "b", finding=finding)
    assert (answer.receipt.reason, shard.num_pending, shard.num_receipts) == (Reason.NOT_FINITE, 0, 0)
    assert [type(event) for event in log.events[0]] == [Pulled]
    np.testing.assert_array_equal(answer.parameters, floats(8, 8))
    memory[1] = 2.0
    assert shard.push(pushed, roster=roster("a", "b")).receipt.outcome is Outcome.PENDING


def test_a_volatile_gradient_that_waits_is_clipped_by_its_copys_norm():
    shard = make_shard([0, 0], behaviour=make_behaviour("hardsync", clip_norm=5.0))
    pushed, _ = volatile([6, 8])
    receipt = shard.push(pushed, roster=roster("a", "b")).receipt
    assert (receipt.outcome, receipt.weight) == (Outcome.PENDING, 0.5)
