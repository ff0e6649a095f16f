"""Helpers of the client's tests: a reference of Adagrad, a proxy that cuts connections, a recording session."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pyps.core.arrays import Floats
from pyps_client import Client, Launch
from pyps_client.push import GroupRate, Plan
from pyps_client.run_state import RunState, Terms
from pyps_client.transport.memory import Lent
from pyps_client.vectors import Converter
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32, codec_of
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, PAYLOAD_KIND_BUFFER, REASON_NOT_FINITE, Receipt
from pyps_wire.partition import ShardRange
from support import DEADLINE_SECONDS, AnyServer, ServerThread, wait_until, workers_of

if TYPE_CHECKING:
    from pyps_client.torch.layout import Layout

T = TypeVar("T")
Server = TypeVar("Server", bound=AnyServer)

ADAGRAD = ("adagrad", {"learning_rate": 0.05, "eps": 1e-10, "initial_accumulator_value": 0.1})
SGD = ("sgd", {"learning_rate": 0.05})


def values_of(layout: Layout) -> list[Floats]:
    """Return the values of a torch model, one new float32 vector a group."""
    vectors: list[list[Floats]] = [[] for _ in layout.model.group_sizes]
    for tensor, parameter in zip(layout.model.tensors, layout.parameters, strict=True):
        vectors[tensor.group].append(parameter.detach().float().cpu().reshape(-1).numpy())
    return [np.concatenate(vector) for vector in vectors]


class Reference:
    """Adagrad as the paper writes it, in float32: a single worker must get the same bits."""

    def __init__(self, tensors: Mapping[str, Floats]) -> None:
        self.parameters = {name: tensor.copy() for name, tensor in tensors.items()}
        self.accumulators = {name: np.full_like(tensor, 0.1) for name, tensor in tensors.items()}

    def step(self, gradients: Mapping[str, Floats]) -> None:
        rate, eps = np.float32(0.05), np.float32(1e-10)
        for name, g in gradients.items():
            self.accumulators[name] += g * g
            self.parameters[name] -= rate * g / (np.sqrt(self.accumulators[name]) + eps)

    def check(self, pulled: Mapping[str, Floats]) -> None:
        assert list(pulled) == list(self.parameters)
        for name, expected in self.parameters.items():
            np.testing.assert_array_equal(pulled[name], expected, err_msg=name, strict=True)


def small_model(seed: int = 0) -> dict[str, Floats]:
    """Some 5,000 parameters: several shards, a scalar, tensors that cross shard borders."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (50, 40), "scale": (), "layer": (40, 60), "bias": (601,)}
    return {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def gradients_like(tensors: Mapping[str, Floats], seed: int) -> dict[str, Floats]:
    random = np.random.default_rng(1000 + seed)
    return {name: np.asarray(random.standard_normal(tensor.shape), np.float32) for name, tensor in tensors.items()}


def start_servers(start: Callable[..., Server], count: int, *flags: str, **options: Any) -> list[Server]:
    return [start(*flags, **options) for _ in range(count)]


def addresses(servers: Sequence[AnyServer]) -> str:
    return ",".join(server.data for server in servers)


def make_client(servers: str, **options: Any) -> Client:
    """Make a client of the small model with several shards, which waits 30 s for servers unless an option says else."""
    settings: dict[str, Any] = {
        "worker_id": "worker",
        "shard_size": 1024,
        "start_wait_seconds": 30,
        "loss_wait_seconds": 30,
    }
    tensors, optimizer = options.pop("tensors", small_model()), options.pop("optimizer", ADAGRAD)
    return Client(tensors, optimizer, launch=Launch(servers, **(settings | options)))


class Clock:
    """A server's clock that a test sets forward, so that long leases end soon."""

    # A longer step at once counts as a pause of the server, during which no lease ends.
    STRIDE_SECONDS = 0.9

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_seconds

    def pass_until(self, condition: Callable[[], object], *servers: ServerThread, living: Sequence[str] = ()) -> None:
        """Let the servers' time pass until the condition is true; after each stride wait for heartbeats."""
        began = time.monotonic()

        def heard() -> bool:
            listed = [workers_of(server.control) for server in servers]
            known = [workers[worker_id] for workers in listed for worker_id in living if worker_id in workers]
            return all(worker.silent_seconds < self.STRIDE_SECONDS for worker in known)

        while not condition():
            assert time.monotonic() < began + 100, "the condition did not come true"
            self._ahead_seconds += self.STRIDE_SECONDS
            # The server must see each stride on its own.
            for server in servers:
                server.wait_for_look()
            wait_until(heard, what=f"heartbeats of {living}")

    def during(self, call: Callable[[], T], *servers: ServerThread, living: Sequence[str] = ()) -> T:
        """Return the call's result, and let the servers' time pass meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(call)
            self.pass_until(calling.done, *servers, living=living)
            return calling.result()


class CuttingProxy:
    """Passes TCP through to one server, and cuts connections on demand."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._replies_pass = threading.Event()
        self._replies_pass.set()
        self._cut_after: int | None = None
        self._counts_replies = False
        self.num_cuts = 0
        # The bandwidth of each connection to the server; None for no limit.
        self.bytes_per_second: float | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_replies(self) -> None:
        """Let nothing through to clients until the next cut."""
        self._replies_pass.clear()

    def cut_after(self, num_bytes: int, *, of_replies: bool = False) -> None:
        """Cut all connections once, after so many more bytes to the server, or from it."""
        self._cut_after, self._counts_replies = num_bytes, of_replies

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
            self._cut_after = None
            self.num_cuts += 1
        for end in sockets:
            # Without this a thread that reads the socket would keep it open.
            with_shutdown(end)
        self._replies_pass.set()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets += [near, far]
            threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        try:
            while data := source.recv(65536):
                if not to_server:
                    self._replies_pass.wait()
                if to_server and self.bytes_per_second is not None:
                    # A slow link: the bytes take their time.
                    time.sleep(len(data) / self.bytes_per_second)
                sink.sendall(data)
                if to_server != self._counts_replies and self._cut_after is not None:
                    self._cut_after -= len(data)
                    if self._cut_after <= 0:
                        self.cut()
        except OSError:
            return
        finally:
            with_shutdown(sink)
            with_shutdown(source)


def with_shutdown(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
    finally:
        end.close()


# Without a network.

# numpy's name of a vector's type -> the codec.
_CODECS = {"float32": FLOAT32, "float16": FLOAT16, "uint16": BFLOAT16}


@dataclass
class Pushed:
    """One recorded push, with vectors decoded to float32."""

    vectors: list[np.ndarray]
    present: list[bool]
    example_count: int
    minibatch_count: int
    base_version: int
    newest_base_version: int
    learning_rates: dict[int, GroupRate]
    kinds: list[int] | None


@dataclass
class RecordingSession:
    """A session with one shard (id 0) and plain SGD; deltas are added. Pushes wait until `gate` is set.

    With `checks_first` it refuses gradients that are not finite.
    """

    parameters: list[np.ndarray]
    rate: float = 0.0
    clock: int = 0
    finished: bool = False
    pull_needed: bool = False
    version: int = 0
    pushes: list[Pushed] = field(default_factory=list)
    pulls: int = 0
    failure: Exception | None = None
    protocol: str = "async"
    ask_to_proceed: bool = False
    batch_size: int = 0
    accumulate: int = 0
    current_version_only: bool = False
    gives_out_data: bool = False
    codec: str = "float32"
    pull_codec: str = "float32"
    tables: None = None
    checks_first: bool = False
    # Lent.private of lent vectors.
    private: bool = True
    # What was called, in order: "proceed", "push", "pull", "exchange", "snapshot".
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._pushing = threading.Lock()
        self.held = -1
        # For each list of vectors, the version that was last pulled into it.
        self._brought: dict[int, int] = {}
        self.on_landed: Callable[[ShardRange], object] | None = None

    def lend(self, gradient_buffers: int = 1, *, converter: Converter | None = None) -> Lent:
        sizes = [len(vector) for vector in self.parameters]
        return lent(sizes, gradient_buffers, codec=self.codec, pull_codec=self.pull_codec, private=self.private)

    def tell_landed(self, on_landed: Callable[[ShardRange], object]) -> None:
        self.on_landed = on_landed

    @property
    def view(self) -> RecordingSession:
        return self

    @property
    def terms(self) -> Terms:
        asks, current_only = self.ask_to_proceed, self.current_version_only
        return Terms(self.protocol, "", asks, current_only, self.batch_size, self.accumulate)

    @property
    def state(self) -> RunState:
        return RunState(self.terms, finished=self.finished, global_step=self.version)

    def exchange(self, plan: Plan) -> list[Receipt]:
        self.events.append("push" if plan.parameters is None else "exchange")
        assert self._pushing.acquire(blocking=False), "a push began while another was under way"
        try:
            receipts = self._push(plan)
        finally:
            self._pushing.release()
        if plan.parameters is not None and not self.pull_needed:
            self._pull(plan.parameters)
        return receipts

    def _push(self, plan: Plan) -> list[Receipt]:
        assert self.gate.wait(DEADLINE_SECONDS), "the test never opened the gate"
        if self.failure is not None:
            raise self.failure
        decoded = [np.array(_CODECS[v.dtype.name].decode(v.view(np.uint8), v.size)) for v in plan.gradients]
        base = plan.base_versions or {}
        newest = base if plan.newest_base_versions is None else plan.newest_base_versions
        if self.checks_first and not all(np.isfinite(vector).all() for vector in decoded):
            return [Receipt(outcome=OUTCOME_REJECTED, reason=REASON_NOT_FINITE)]
        self.pushes.append(
            Pushed(
                decoded,
                list(plan.present or []),
                plan.example_count,
                plan.minibatch_count,
                base[0],
                newest[0],
                dict(plan.learning_rates or {}),
                None if plan.kinds is None else list(plan.kinds),
            )
        )
        for group, (mine, gradient) in enumerate(zip(self.parameters, decoded, strict=True)):
            is_buffer = plan.kinds is not None and plan.kinds[group] == PAYLOAD_KIND_BUFFER
            mine -= np.float32(-1.0 if is_buffer else self.rate) * gradient
        self.version += 1
        return [Receipt(outcome=OUTCOME_APPLIED, version_after=self.version)]

    def proceed(self) -> None:
        if self.ask_to_proceed:
            self.events.append("proceed")

    def pull(self, vectors: Sequence[np.ndarray], **_: Any) -> set[int]:
        self.events.append("pull")
        self._pull(vectors)
        return {0}

    def _pull(self, vectors: Sequence[np.ndarray]) -> None:
        """Write the parameters into the vectors, if they are newer."""
        self.pulls += 1
        if self._brought.get(id(vectors), -1) < self.version:
            for theirs, mine in zip(vectors, self.parameters, strict=True):
                theirs.view(np.uint8)[:] = codec_of(self.pull_codec).encode(mine)
            if self.on_landed is not None:
                # Half of each group comes in a message, the rest as through shared memory.
                for group, mine in enumerate(self.parameters):
                    self.on_landed(ShardRange(0, group, 0, len(mine) // 2))
        self.held = self._brought[id(vectors)] = self.version

    def hurry(self) -> None:
        self.events.append("hurry")

    def snapshot(self, vectors: Sequence[np.ndarray]) -> dict[int, int]:
        self.events.append("snapshot")
        for theirs, mine in zip(vectors, self.parameters, strict=True):
            theirs[:] = mine
        return {0: self.version}

    @property
    def held_versions(self) -> dict[int, int]:
        return {0: self.held}


def lent(
    sizes: Sequence[int],
    gradient_buffers: int = 1,
    *,
    codec: str = "float32",
    pull_codec: str = "float32",
    private: bool = True,
) -> Lent:
    """Return vectors of groups of these sizes, as a session lends them."""

    def vectors(name: str) -> list[np.ndarray]:
        # Each on pages of its own.
        dtype = codec_of(name).dtype
        return [np.frombuffer(mmap.mmap(-1, dtype.itemsize * size or 1), dtype, size) for size in sizes]

    return Lent(vectors(pull_codec), [vectors(codec) for _ in range(gradient_buffers)], private=private)


def lent_for(layout: Layout, **options: Any) -> Lent:
    return lent(layout.model.group_sizes, **options)
