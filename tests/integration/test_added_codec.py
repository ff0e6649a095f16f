"""A codec that neither kernels nor torch know: a name, a number and two conversions are all that it needs."""

import numpy as np
import pytest

from client_support import CuttingProxy, make_client
from pyps.core.arrays import Floats
from pyps.core.gradient import made_native
from pyps_client import InvalidArgument
from pyps_client.torch.memory import TorchConverter
from pyps_wire.codecs import CODECS, INT8, Codec
from pyps_wire.partition import Partition
from shards import PAIRS
from shards import gradient as make_gradient
from support import shell, status_of, workers_of


class ScaledBytes(Codec):
    """A float32 scale for each 64 numbers and a byte for each number, none in a block of zeros: sizes vary."""

    def encode(self, values: Floats) -> memoryview:
        blocks = self._blocks(values)
        scales = np.abs(blocks).max(axis=1) / np.float32(127)
        numbers = np.rint(blocks[scales > 0] / scales[scales > 0, None]).astype(np.int8)
        return memoryview(scales.tobytes() + numbers.tobytes())

    def decode_into(self, payload: bytes | memoryview, place: Floats) -> None:
        self.require_count(payload, place.size)
        num_scales = -(-place.size // 64)
        scales = np.frombuffer(payload, np.float32, num_scales)
        numbers = np.frombuffer(payload, np.int8, offset=4 * num_scales)
        if numbers.size != 64 * np.count_nonzero(scales):
            raise InvalidArgument(f"{numbers.size} bytes for {np.count_nonzero(scales)} blocks of 64")
        blocks = np.zeros((num_scales, 64), np.float32)
        blocks[scales != 0] = numbers.reshape(-1, 64) * scales[scales != 0, None]
        place[:] = blocks.reshape(-1)[: place.size]

    def _blocks(self, values: Floats) -> Floats:
        return np.pad(values, (0, -values.size % 64)).reshape(-1, 64)


CODEC = ScaledBytes(4711, "scaled_bytes", lambda count: 68 * -(-count // 64))
# The second of its five shards has a piece of both.
TENSORS = {name: np.asarray(np.random.default_rng(1).standard_normal(size), np.float32) for name, size in
           (("first", 1500), ("second", 2700))}  # fmt: skip


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, CODEC, CODEC)


def options(**more: object) -> dict[str, object]:
    sgd = ("sgd", {"learning_rate": 0.5})
    return {"tensors": TENSORS, "optimizer": sgd, "gradient_codec": CODEC.name, "parameter_codec": CODEC.name, **more}


def travelled(values: Floats, plan: Partition, present: slice = slice(None), codec: Codec = CODEC) -> Floats:
    """What comes out at the other end, shard by shard; of numbers that are absent zeros."""
    arrived, is_present = np.zeros_like(values), np.zeros(values.size, np.bool_)
    is_present[present] = True
    for shard in plan.shards:
        place = np.flatnonzero(is_present[shard.offset : shard.offset + shard.length]) + shard.offset
        arrived[place] = codec.decode(codec.encode(values[place]), place.size)
    return arrived


def flat(tensors: dict[str, Floats]) -> Floats:
    return np.concatenate([tensors["first"], tensors["second"]])


def test_gradients_and_parameters_travel_in_it_whole_and_in_part(start_server):
    gradient = {name: np.sin(tensor) for name, tensor in TENSORS.items()}
    gradient["second"][100:2000] = 0
    for protocol in ("async", "asgd:mutex=whole"):
        held = flat(TENSORS)
        server = start_server("--protocol", protocol, "--staleness", "none", "--clip-norm", "1000")
        with make_client(server.data, **options()) as client:
            plan = client.session.partition
            assert client.session.transport == "tcp"
            client.push(gradient)
            held -= np.float32(0.5) * travelled(flat(gradient), plan)
            np.testing.assert_array_equal(flat(client.pull()), travelled(held, plan), err_msg=protocol)
            pulled = client.exchange({"first": gradient["first"]})
            held -= np.float32(0.5) * travelled(flat(gradient), plan, slice(1500))
            np.testing.assert_array_equal(flat(pulled), travelled(held, plan), err_msg=protocol)
            np.testing.assert_array_equal(flat(client.snapshot()), held, err_msg=protocol)


def test_a_payload_of_another_size_than_its_numbers_take_is_refused():
    payload = bytes(CODEC.encode(np.ones(100, np.float32)))
    for wrong, words in ((payload + bytes(100), "at most 136 bytes"), (payload[:-1], "127 bytes for 2 blocks")):
        wrong_push = make_gradient([], codec=CODEC, payload=wrong)
        with pytest.raises(InvalidArgument, match=words):
            made_native(wrong_push, shard_id=0, shard_length=100)


def test_torch_leaves_to_the_codec_what_it_has_no_type_for():
    values, place = np.sin(np.arange(100, dtype=np.float32)), np.empty(100, np.float32)
    payload = TorchConverter().encode(values, CODEC)
    assert bytes(payload) == bytes(CODEC.encode(values))
    TorchConverter().decode(payload, CODEC, place)
    np.testing.assert_array_equal(place, CODEC.decode(payload, 100))


def test_sparse_gradients_wait_as_they_are_and_a_restart_keeps_them(start_server, monkeypatch, tmp_path):
    monkeypatch.setitem(CODECS, PAIRS, PAIRS)
    flags = ("--protocol", "hardsync", "--expected-workers", "2", "--checkpoint-dir", str(tmp_path))
    server = start_server(*flags)
    sparse = options(gradient_codec=PAIRS.name, parameter_codec="float32", transport="grpc")
    gradient = {name: np.zeros_like(tensor) for name, tensor in TENSORS.items()}
    gradient["first"][:2] = 4.0, 2.0
    with make_client(server.data, worker_id="a", **sparse) as first:
        first.push(gradient)
        assert status_of(server).pending_bytes == 16
        port = server.data.rpartition(":")[2]
        server.stop()
        server = start_server(*flags, "--resume", "--port", port)
        gradient["first"][:3] = 0.0, 4.0, 8.0
        with make_client(server.data, worker_id="b", **sparse) as second:
            second.push(gradient)
            # Half the rate, of the numbers 4, (2 + 4) / 2 and 8.
            moved = TENSORS["first"][:4] - np.float32([2.0, 1.5, 4.0, 0.0])
            np.testing.assert_array_equal(second.pull()["first"][:4], moved)


def test_it_does_not_lie_in_shared_memory():
    with pytest.raises(InvalidArgument, match=r"is 'scaled_bytes', which shared memory does not carry.*to 'auto'"):
        make_client("127.0.0.1:1", **options(transport="shm"))


@pytest.mark.parametrize("setting", ["gradient_codec", "parameter_codec"])
def test_a_server_without_the_codec_names_those_that_it_knows(start_server_process, setting):
    others = {"gradient_codec": "float32", "parameter_codec": "float32", setting: CODEC.name}
    words = rf"the worker's {setting} is 4711; expected float32 \(1\), float16 \(2\), .*delta \(10\) "
    with pytest.raises(InvalidArgument, match=words):
        make_client(start_server_process().data, **options(**others))


def test_a_codec_with_a_residual_is_for_gradients_alone_unless_pulls_follow_a_published_copy(start_server, monkeypatch):
    monkeypatch.setattr(ScaledBytes, "stateful", True)
    with pytest.raises(InvalidArgument, match=r"parameter_codec .* is 'scaled_bytes'; expected one of float32, "):
        make_client(start_server().data, **options())
    monkeypatch.setattr(ScaledBytes, "published", True)
    gradient = {name: np.sin(tensor) for name, tensor in TENSORS.items()}
    with make_client(start_server("--staleness", "none").data, **options(gradient_codec="float32")) as client:
        followed, held = flat(client.pull()), flat(TENSORS)
        np.testing.assert_array_equal(followed, held, "the first pull is exact")
        for _ in range(4):
            held -= np.float32(0.5) * flat(gradient)
            followed += travelled(held - followed, client.session.partition)
            np.testing.assert_array_equal(flat(client.exchange(gradient)), followed)
        np.testing.assert_array_equal(flat(client.snapshot()), held)


@pytest.mark.parametrize(("codec", "transport"), [(CODEC, "grpc"), (INT8, "grpc"), (INT8, "tcp")])
def test_error_feedback_survives_lost_connections(start_server, monkeypatch, proxies, codec, transport):
    monkeypatch.setattr(ScaledBytes, "stateful", True)
    server = start_server("--staleness", "none", "--clip-norm", "1000")
    proxy = CuttingProxy(server.data)
    gradient = {name: np.float32(1e-3) + np.eye(1, tensor.size, 7, np.float32)[0] for name, tensor in TENSORS.items()}
    held, owed = flat(TENSORS), np.zeros(4200, np.float32)
    own = options(gradient_codec=codec.name, parameter_codec="float32", transport=transport)
    with make_client(proxy.address, **own) as client:
        before = proxy if transport == "grpc" else list(proxies.values())[-1]
        plan = client.session.partition
        for number in range(12):
            if number % 4 == 1:
                before.cut_after(1000, of_replies=number % 8 == 1)
            client.push(gradient)
            wanted = flat(gradient) + owed
            arrived = travelled(wanted, plan, codec=codec)
            held -= np.float32(0.5) * arrived
            owed = wanted - arrived
            np.testing.assert_array_equal(flat(client.pull()), held)
        assert before.num_cuts >= 2
    proxy.close()
    # Without it the small numbers beside the large ones would never have moved.
    np.testing.assert_allclose(held, flat(TENSORS) - 6 * flat(gradient), atol=0.005)
    assert np.abs(travelled(flat(gradient), plan, codec=codec)[1:7]).max() == 0


def test_a_server_knows_its_workers_codecs_and_refuses_a_sparse_one_under_momentum(start_server, monkeypatch):
    monkeypatch.setattr(ScaledBytes, "sparse", True)
    server = start_server()
    nesterov = ("nesterov", {"learning_rate": 0.5, "momentum": 0.9})
    for life in ("first", "later"):
        with pytest.raises(InvalidArgument, match=r"'worker' pushes in codec scaled_bytes.*nesterov has momentum 0.9"):
            make_client(server.data, **options(optimizer=nesterov))
        # Now the run is there.
        with make_client(server.data, **options(optimizer=nesterov, gradient_codec="int8", worker_id=life, run_id="r")):
            worker = workers_of(server.control)[life]
            assert (worker.gradient_codec, worker.parameter_codec) == ("int8", CODEC.name)
            assert f"int8, {CODEC.name}" in shell("status", "--servers", server.control, "--wide")
            # Narrow columns are folded.
            assert "codecs" in shell("status", "--servers", server.control)
    server = start_server()
    without = ("nesterov", {"learning_rate": 0.5, "momentum": 0.0})
    with make_client(server.data, **options(optimizer=without, parameter_codec="float32")):
        assert workers_of(server.control)["worker"].gradient_codec == CODEC.name
        assert "up, down" in shell("status", "--servers", server.control, "--wide")
    server = start_server()
    with make_client(server.data, **options(gradient_codec="float32", parameter_codec="float32")):
        assert "up, down" not in shell("status", "--servers", server.control, "--wide")
