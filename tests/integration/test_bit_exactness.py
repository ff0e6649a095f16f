"""Whatever way gradients and parameters take, the same pushes in the same order give the same bits."""

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import pytest

from client_support import addresses, start_servers
from pyps_client import Launch, Observer, Session
from pyps_client.push import Plan
from pyps_client.torch.memory import TorchConverter
from pyps_client.vectors import NUMPY, Converter
from pyps_wire import inspector_pb2 as pb
from pyps_wire.codecs import codec_of
from pyps_wire.common_pb2 import OUTCOME_REJECTED, GroupSettings, OptimizerSettings, Receipt
from pyps_wire.partition import Model, Tensor
from support import ServerThread, inspect

Vectors = list[npt.NDArray[np.generic]]
# Each worker's parameters after each round, then those that the servers hold, bit for bit.
Trajectory = list[bytes]
# Servers, their flags, the model, and the codecs of gradients and of parameters.
Form = Sequence[tuple[int, tuple[str, ...], Model, Sequence[tuple[str, str]]]]

WORKERS = ("a", "b")
ROUNDS = 3
# Two groups; tensors that begin and end inside of shards, which end in odd places.
MODEL = Model(
    (
        Tensor("embed", (37, 41)),
        Tensor("scale", ()),
        Tensor("bias", (13,)),
        Tensor("layer", (1201,), group=1),
        Tensor("head", (7, 11), group=1),
    ),
    shard_size=528,
)
# Shards that are updated on threads, and whose replies, in any type, are written past the caches; the last of each
# group is a small one.
LARGE_MODEL = Model(
    (
        Tensor("embed", (613, 509)),
        Tensor("scale", ()),
        Tensor("layer", (150_001,), group=1),
        Tensor("head", (7, 11), group=1),
    ),
    shard_size=150_016,
)
OPTIMIZER = OptimizerSettings(
    rule="adam",
    groups=[
        GroupSettings(hyperparameters={"learning_rate": 0.01}),
        GroupSettings(hyperparameters={"learning_rate": 0.003, "weight_decay": 0.1}),
    ],
)


class Worker:
    """One worker, which makes its rounds on a given way."""

    def __init__(self, session: Session, *, lends: bool, exchanges: bool, converter: Converter | None) -> None:
        self.session = session
        self._exchanges = exchanges
        codec, self._pull_codec = codec_of(session.launch.gradient_codec), codec_of(session.launch.parameter_codec)
        if lends:
            lent = session.lend(converter=converter)
            self._gradient, self.parameters = lent.gradients[0], lent.parameters
        else:
            sizes = session.model.group_sizes
            self._gradient = [np.zeros(size, codec.dtype) for size in sizes]
            self.parameters = [np.zeros(size, self._pull_codec.dtype) for size in sizes]
        session.pull(self.parameters)

    def push(self, seed: int) -> None:
        """Pushes the gradients of that seed, and gets what is new where nobody else has to push before."""
        random = np.random.default_rng(seed)
        for vector in self._gradient:
            values = random.standard_normal(vector.size).astype(np.float32)
            if vector.dtype == np.float32:
                vector[:] = values
            else:
                vector[:] = np.frombuffer(codec_of(self.session.launch.gradient_codec).encode(values), vector.dtype)
        # Now and then a tensor has no gradient.
        present = [seed % 3 != index for index in range(len(self.session.model.tensors))]
        self.session.clock += 1
        if self._exchanges:
            receipts = self.session.exchange(Plan(self._gradient, self.parameters, present=present, example_count=8))
        else:
            receipts = self.session.push(self._gradient, present=present, example_count=8)
            if not self.session.pull_needed:
                self.session.pull(self.parameters)
        assert_taken(receipts)

    def finish_round(self) -> bytes:
        """Waits for the others where the protocol does; returns the parameters."""
        if self.session.pull_needed:
            self.session.pull(self.parameters)
        # As they travel: what arrived in float32 is no more exact.
        words = [self._pull_codec.encode(v) if v.dtype == np.float32 else v.tobytes() for v in self.parameters]
        return b"".join(words)


# By its name: the launch's transport, whether the worker computes in lent vectors, whether it exchanges, and what
# converts float32 on its way.
WAYS: dict[str, tuple[str, bool, bool, Converter | None]] = {
    "Push and Pull": ("grpc", False, False, None),
    "Exchange": ("grpc", False, True, None),
    "Exchange of lent vectors": ("grpc", True, True, None),
    "Exchange of lent float32": ("grpc", True, True, NUMPY),
    "Exchange of float32 that torch converts": ("grpc", True, True, TorchConverter()),
    "Push and Pull of float32 that torch converts": ("grpc", True, False, TorchConverter()),
    "lane, Push and Pull": ("tcp", False, False, None),
    "lane": ("tcp", True, True, None),
    "lane of float32 that torch converts": ("tcp", True, True, TorchConverter()),
    "shared memory, push and pull": ("shm", True, False, None),
    "shared memory": ("shm", True, True, TorchConverter()),
}
CODECS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]


def assert_taken(receipts: list[Receipt]) -> None:
    refused = [receipt for receipt in receipts if receipt.outcome == OUTCOME_REJECTED]
    assert receipts and not refused, refused


def trajectory(servers: str, way: str, codecs: tuple[str, str], *, model: Model) -> Trajectory:
    transport, lends, exchanges, converter = WAYS[way]
    launches = {
        name: Launch(
            servers=tuple(servers.split(",")),
            run_id=way,
            worker_id=name,
            transport=transport,
            gradient_codec=codecs[0],
            parameter_codec=codecs[1],
            start_wait_seconds=30,
        )
        for name in WORKERS
    }

    def initial() -> Vectors:
        random = np.random.default_rng(7)
        return [random.standard_normal(size).astype(np.float32) for size in model.group_sizes]

    with ExitStack() as stack:
        workers = []
        for launch in launches.values():
            session = stack.enter_context(Session(model, OPTIMIZER, launch=launch, initial=initial))
            workers.append(Worker(session, lends=lends, exchanges=exchanges, converter=converter))
        if lends:
            assert {worker.session.transport for worker in workers} == {transport}
        seen = []
        for number in range(ROUNDS):
            for index, worker in enumerate(workers):
                worker.push(seed=2 * number + index)
            seen += [worker.finish_round() for worker in workers]
        with Observer(servers) as observer:
            held = b"".join(tensor.tobytes() for tensor in observer.snapshot().values())
    return [*seen, held]


# Several servers, none of them in step; a barrier; one mutex; and what is changed of a push as a whole.
SHORT_FORM = (
    (2, ("--protocol", "hardsync"), MODEL, CODECS),
    (1, ("--protocol", "asgd:mutex=whole", "--clip-norm", "20"), MODEL, CODECS[3:]),
    (1, ("--protocol", "async"), LARGE_MODEL, CODECS[1::2]),
)
LONG_FORM = (
    *((num_servers, ("--protocol", "async"), MODEL, CODECS) for num_servers in (1, 2)),
    (1, ("--protocol", "hardsync"), MODEL, CODECS),
    (2, ("--protocol", "softsync:n=1", "--clip-norm", "20"), MODEL, CODECS),
    (1, ("--protocol", "asgd:mutex=whole"), MODEL, CODECS),
    (1, ("--protocol", "async"), LARGE_MODEL, CODECS),
    (2, ("--protocol", "hardsync"), LARGE_MODEL, CODECS),
    (1, ("--protocol", "asgd:mutex=whole"), LARGE_MODEL, CODECS),
)


@pytest.mark.parametrize("form", [SHORT_FORM, pytest.param(LONG_FORM, marks=pytest.mark.extended)], ids=["some", "all"])
def test_every_way_gives_the_same_bits(start_server, form):
    for num_servers, flags, model, codecs in form:
        servers = start_servers(start_server, num_servers, "--expected-workers", "2", *flags)
        for pair in codecs:
            assert_same_bits(servers, pair, model=model, mode=flags[1])
        for server in servers:
            server.stop()


def assert_same_bits(servers: Sequence[ServerThread], codecs: tuple[str, str], *, model: Model, mode: str) -> None:
    """Each way makes a run of its own on these servers, and sees what the first one saw."""
    expected: Trajectory = []
    for way in WAYS:
        seen = trajectory(addresses(servers), way, codecs, model=model)
        expected = expected or seen
        differing = [index for index, pair in enumerate(zip(expected, seen, strict=True)) if pair[0] != pair[1]]
        assert not differing, f"{mode}: {way} differs from {next(iter(WAYS))} with {codecs}, first at {differing[0]}"
        for server in servers:
            inspect(server.control, "Reset", pb.ResetRequest(run_id=way))
    assert len(set(expected)) >= ROUNDS, "the parameters move"
