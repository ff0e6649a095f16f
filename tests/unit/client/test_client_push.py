import math
import threading
from itertools import product
from typing import Any

import numpy as np
import pytest

from pyps_client.early_shards import EarlyShards
from pyps_client.launch import Launch
from pyps_client.pull import Held, Receiver
from pyps_client.push import GroupRate, Outgoing, Plan, Template, norm_of, pushed_parts
from pyps_client.retry import LinkLost
from pyps_client.torch.memory import TorchConverter
from pyps_client.transport import Parts, Take
from pyps_client.transport.connection import Connection
from pyps_client.vectors import NUMPY, Encoder, check_vectors
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32, Codec
from pyps_wire.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_PENDING,
    OUTCOME_REJECTED,
    PAYLOAD_KIND_DELTA,
    PAYLOAD_KIND_GRADIENT,
    PAYLOAD_KIND_NOTHING,
    Receipt,
    Sender,
)
from pyps_wire.errors import WrongSize
from pyps_wire.framing import join, split
from pyps_wire.parameter_server_pb2 import Parameters, PushRequest
from pyps_wire.partition import Model, Tensor, partition

MODEL = Model((Tensor("a", (10,)), Tensor("b", (2, 5)), Tensor("c", (30,)), Tensor("d", (14,))), shard_size=32)


PLAN = partition(MODEL, num_servers=1)
GRADIENT = [PAYLOAD_KIND_GRADIENT]


def push_of(parts: Any, vectors: list[np.ndarray], **described: Any) -> Outgoing:
    codec, kinds = described.pop("codec", FLOAT32), described.pop("kinds", GRADIENT * len(vectors))
    described.setdefault("encoder", Encoder(codec, described.pop("converter", NUMPY)))
    described.setdefault("learning_rates", {})
    versions = {0: 5, 1: 6}
    template = Template(parts, sender=Sender(), codec=codec, kinds=kinds)
    return Outgoing(
        *(template, Plan(vectors), 3),
        base_versions=versions,
        newest_base_versions=versions,
        connection=Connection(0, launch=Launch("one:1")),
        waiting=template.waiting.copy(),
        **described,
    )


def frames_of(push: Outgoing) -> list[tuple[PushRequest, memoryview]]:
    push._fill(push.template)
    split_frames = [split(join(*message)) for message in push._messages(push.template)]
    return [(PushRequest.FromString(header), payload) for header, payload in split_frames]


def test_neighbours_are_one_extent_and_an_absent_shard_has_none():
    assert [(s.offset, s.length) for s in PLAN.of_server(0)] == [(0, 32), (32, 32)]

    def extents(*present: bool) -> list[tuple[tuple[int, int], ...] | None]:
        parts = pushed_parts(PLAN, 0, present=present or None)
        assert [shard for shard, _ in parts] == list(PLAN.of_server(0))
        return [extents for _, extents in parts]

    assert extents() == extents(True, True, True, True) == [(), ()]
    assert extents(True, True, False, False) == [((0, 20),), None]
    assert extents(True, False, True, False) == [((0, 10), (20, 12)), ((0, 18),)]
    assert extents(True, True, True, False) == [(), ((0, 18),)]
    assert extents(False, False, False, False) == [None, None]


def test_frames_hold_the_present_numbers_only():
    parts = pushed_parts(PLAN, 0, present=[True, False, True, False])
    for codec, dtype in ((FLOAT32, np.float32), (FLOAT16, np.float16)):
        push = push_of(parts, [np.arange(64, dtype=dtype)], codec=codec, kinds=[PAYLOAD_KIND_DELTA])

        headers, payloads = zip(*frames_of(push), strict=True)

        assert [(h.shard_id, h.base_version, h.sequence) for h in headers] == [(0, 5, 3), (1, 6, 3)]
        assert [(e.offset, e.length) for e in headers[0].extents] == [(0, 10), (20, 12)]
        assert {(h.kind, h.num_shards, h.HasField("learning_rate")) for h in headers} == {
            (PAYLOAD_KIND_DELTA, 2, False)
        }
        np.testing.assert_array_equal(np.frombuffer(payloads[0], dtype), [*range(10), *range(20, 32)])
        np.testing.assert_array_equal(np.frombuffer(payloads[1], dtype), range(32, 50))


def test_float32_is_converted_as_frames_are_made_and_as_halves_arrive():
    random = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    parts = pushed_parts(PLAN, 0, present=[True, False, True, True])
    for codec, converter in product([FLOAT16, BFLOAT16], [NUMPY, TorchConverter()]):
        words = np.frombuffer(codec.encode(random), np.uint16)
        frames = frames_of(push_of(parts, [random], codec=codec, converter=converter))
        payloads = [np.frombuffer(payload, np.uint16) for _, payload in frames]
        np.testing.assert_array_equal(payloads[0], [*words[:10], *words[20:32]])
        np.testing.assert_array_equal(payloads[1], words[32:])
        # The norm is that of what travels, whoever converts it.
        norm = norm_of(parts, [random], kinds=GRADIENT, encoder=Encoder(codec, converter))
        assert norm == norm_of(parts, [words.view(codec.dtype)], kinds=GRADIENT, encoder=Encoder(codec))

        vector = np.full(64, 9.0, np.float32)
        receiver = Receiver([vector], Held(PLAN.of_server(0)), codec=codec, name="server 0", converter=converter)
        sent = np.arange(32, dtype=np.float32)
        receiver.write(1, Parameters(codec=codec), codec.encode(sent))
        np.testing.assert_array_equal(vector, [*[9.0] * 32, *sent])
        with pytest.raises(WrongSize, match="sent 62 bytes of parameters of shard 0; expected 64"):
            receiver.write(0, Parameters(codec=codec), codec.encode(sent[1:]))


def test_a_shard_without_a_gradient_says_so_and_carries_a_new_rate_all_the_same():
    plan = partition(Model((Tensor("a", (10,)), Tensor("b", (4,), group=1))), num_servers=1)
    parts = pushed_parts(plan, 0, present=[False, True])
    push = push_of(parts, [np.zeros(10, np.float32), np.ones(4, np.float32)], learning_rates={0: GroupRate(0.5, 0.9)})

    (absent, nothing), (whole, numbers) = frames_of(push)

    assert (absent.kind, nothing.nbytes, absent.num_shards) == (PAYLOAD_KIND_NOTHING, 0, 2)
    assert (absent.learning_rate, absent.momentum) == (0.5, 0.9)
    assert (whole.kind, numbers.nbytes, whole.HasField("learning_rate")) == (PAYLOAD_KIND_GRADIENT, 16, False)


def test_the_norm_is_that_of_the_whole_push_without_deltas_and_absent_tensors():
    model = Model((Tensor("a", (3,)), Tensor("b", (2,)), Tensor("c", (2,), group=1)))
    plan = partition(model, num_servers=2)
    parts = [part for server in range(2) for part in pushed_parts(plan, server, present=[True, False, True])]
    numbers = [np.array([1, 2, 4, 100, 100], np.float32), np.array([8, 8], np.float32)]
    for codec in (FLOAT32, FLOAT16, BFLOAT16):
        vectors = [np.frombuffer(codec.encode(values), codec.dtype) for values in numbers]
        both = norm_of(parts, vectors, kinds=GRADIENT * 2, encoder=Encoder(codec))
        first = norm_of(parts, vectors, kinds=[PAYLOAD_KIND_GRADIENT, PAYLOAD_KIND_DELTA], encoder=Encoder(codec))
        assert both == pytest.approx(math.sqrt(1 + 4 + 16 + 64 + 64))
        assert first == pytest.approx(math.sqrt(21))
    # Nor do squares of large numbers overflow.
    plan = partition(Model((Tensor("a", (2,)),)), num_servers=1)
    large = [np.array([3e30, 4e30], np.float32)]
    norm = norm_of(pushed_parts(plan, 0, present=None), large, kinds=GRADIENT, encoder=Encoder(FLOAT32))
    assert norm == pytest.approx(5e30)


def test_vectors_are_never_converted_silently():
    float32 = np.dtype(np.float32)
    good = np.zeros(64, np.float32)
    check_vectors([good], MODEL, float32, what="pushed gradient")
    for bad, complaint in [
        ([], "0 vectors were given for 1 parameter groups"),
        ([good[:-1]], r"group 0 is float32\[63\]; expected float32\[64\]"),
        ([good.astype(np.float64)], r"is float64\[64\]; expected float32"),
        ([np.zeros(128, np.float32)[::2]], "must be contiguous"),
    ]:
        with pytest.raises(WrongSize, match=complaint):
            check_vectors(bad, MODEL, float32, what="pushed gradient")


class LosingChannel:
    """A channel that loses each call after one receipt."""

    def __init__(self) -> None:
        self.sent: list[list[PushRequest]] = []

    def round(self, method: str, parts: Parts, take: Take) -> bool:
        self.sent.append([PushRequest.FromString(message.SerializeToString()) for message, _ in parts.messages])
        header = self.sent[-1][0]
        take(Receipt(shard_id=header.shard_id, sequence=header.sequence), memoryview(b""))
        return True


def test_shards_sent_again_after_a_loss_state_their_number():
    """Under one mutex for the model the server waits for so many."""
    parts = pushed_parts(PLAN, 0, present=None)
    push = push_of(parts, [np.zeros(64, np.float32)])
    channel = LosingChannel()
    with pytest.raises(LinkLost, match="1 shards were left"):
        push(channel, threading.Event())  # type: ignore[arg-type]
    assert len(push(channel, threading.Event())) == 2  # type: ignore[arg-type]
    told = [[(header.sequence, header.num_shards) for header in headers] for headers in channel.sent]
    assert told == [[(3, 2), (3, 2)], [(3, 1)]]


class OneLevel(Codec):
    """The largest magnitude, and the numbers of at least half of it as that: all else is lost."""

    stateful = True

    def encode(self, values: np.ndarray) -> memoryview:
        largest = np.abs(values).max()
        kept = np.where(np.abs(values) >= largest / 2, np.sign(values), 0).astype(np.int8)
        return memoryview(largest.tobytes() + kept.tobytes())

    def decode_into(self, payload: Any, place: np.ndarray) -> None:
        place[:] = np.frombuffer(payload, np.int8, offset=4) * np.frombuffer(payload, np.float32, 1)


def test_an_encodings_error_is_added_to_the_next_push_once_a_server_took_it():
    codec = OneLevel(4712, "one_level", lambda count: 4 + count)
    encoder, gradient = Encoder(codec), np.array([8, 3, 0, 1] * 16, np.float32)
    parts = pushed_parts(PLAN, 0, present=None)

    def sent(outcome: int, part: Any = parts) -> np.ndarray:
        """Push to shard 0 twice, as after a loss, and take the answer."""
        plan = Plan([gradient])
        encoder.begin(plan)
        push = push_of(part, plan.gradients, codec=codec, encoder=encoder)
        first, again = frames_of(push)[0][1], frames_of(push)[0][1]
        assert bytes(first) == bytes(again)
        push._take(Receipt(shard_id=0, sequence=3, outcome=outcome), None)  # type: ignore[arg-type]
        return codec.decode(first, len(first) - 4)[:4]

    assert sent(OUTCOME_APPLIED).tolist() == [8, 0, 0, 0]
    # Now 3 and 1 are owed, and are as long as nothing is taken.
    for _ in range(2):
        assert sent(OUTCOME_REJECTED).tolist() == [8, 8, 0, 0]
    assert sent(OUTCOME_PENDING).tolist() == [8, 8, 0, 0]
    # What is absent is owed still: here 2 to each fourth number.
    only_a = pushed_parts(PLAN, 0, present=[True, False, False, False])
    assert sent(OUTCOME_APPLIED, only_a).tolist() == [8, 0, 0, 0]
    assert encoder.residuals[0].values[:12].tolist() == [0, 1, 0, 3, 0, 1, 0, 3, 0, 1, 0, 2]


def test_a_shard_counts_once_it_was_answered_however_often_it_left():
    early = EarlyShards(PLAN, [True] * 4, fits=lambda _: True, arrive=lambda _: None)
    for shard_id in (0, 0, 1):
        assert early.send(shard_id, np.zeros(32, np.float32), set(), begins=True)
    # The first time 0 was lost, and 1 is under way still.
    early.lost({0})
    assert not early.answered({0, 1}, waiting={1})
    assert early.num_answered == 1


@pytest.mark.parametrize("answered_first", [True, False])
def test_a_shard_that_is_not_sent_keeps_no_round_open(answered_first):
    early = EarlyShards(PLAN, [True] * 4, fits=lambda _: True, arrive=lambda _: None, held=True)
    waiting, under_way, numbers = {0: None, 1: None}, set[int](), np.zeros(32, np.float32)
    for shard_id in (0, 1):
        early.complete(shard_id)
    assert early.next(waiting, under_way, begins=True) == 0
    assert early.send(0, numbers, under_way, begins=True)
    assert early.next(waiting, under_way, begins=False) == 1
    if answered_first:
        del waiting[0]
        assert early.answered(under_way, waiting)
        assert early.send(1, numbers, under_way, begins=False) is None
        # The next round sends it.
        assert early.next(waiting, under_way, begins=True) == 1
        assert early.send(1, numbers, under_way, begins=True)
        assert not early.answered(under_way, waiting)
    else:
        early.abandon()
        assert early.send(1, numbers, under_way, begins=False) is None
        del waiting[0]
        assert early.answered(under_way, waiting)
