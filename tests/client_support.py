"""What the client's tests share: a numpy reference of Adagrad, servers in numbers, a cutting proxy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pyps_client import Client
from support import AnyServer, inspect, wait_until

Array = npt.NDArray[np.float32]
Server = TypeVar("Server", bound=AnyServer)

ADAGRAD = ("adagrad", {"learning_rate": 0.05, "eps": 1e-10, "initial_accumulator_value": 0.1})
SGD = ("sgd", {"learning_rate": 0.05})


class Reference:
    """Adagrad as the paper writes it, in float32: what a single worker must get, bit for bit."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self.parameters = {name: tensor.copy() for name, tensor in tensors.items()}
        self.accumulators = {name: np.full_like(tensor, 0.1) for name, tensor in tensors.items()}

    def step(self, gradients: Mapping[str, Array]) -> None:
        rate, eps = np.float32(0.05), np.float32(1e-10)
        for name, g in gradients.items():
            self.accumulators[name] += g * g
            self.parameters[name] -= rate * g / (np.sqrt(self.accumulators[name]) + eps)

    def check(self, pulled: Mapping[str, Array]) -> None:
        assert list(pulled) == list(self.parameters)
        for name, expected in self.parameters.items():
            np.testing.assert_array_equal(pulled[name], expected, err_msg=name, strict=True)


def small_model(seed: int = 0) -> dict[str, Array]:
    """Some 5,000 parameters: several shards, a scalar, tensors that cross shard borders."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (50, 40), "scale": (), "layer": (40, 60), "bias": (601,)}
    return {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def gradients_like(tensors: Mapping[str, Array], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(1000 + seed)
    return {name: np.asarray(random.standard_normal(tensor.shape), np.float32) for name, tensor in tensors.items()}


def start_servers(start: Callable[..., Server], count: int, *flags: str) -> list[Server]:
    """Starts so many servers with a fixture that starts one."""
    return [start(*flags) for _ in range(count)]


def addresses(servers: Sequence[AnyServer]) -> str:
    return ",".join(server.data for server in servers)


def make_client(servers: str, **options: Any) -> Client:
    """A client of the small model with several shards, impatient unless told otherwise."""
    settings: dict[str, Any] = {
        "tensors": small_model(),
        "optimizer": ADAGRAD,
        "worker_id": "worker",
        "shard_size": 1024,
        "start_wait_seconds": 30,
        "loss_wait_seconds": 30,
    }
    return Client(servers=servers, **(settings | options))


class Clock:
    """A server's clock that a test sets forward: no lease has to be too short for a busy machine to end soon."""

    # What is more at once is taken for a standstill of the server, which is held against nobody.
    STRIDE_SECONDS = 0.9
    LOOK_SECONDS = 0.3

    def __init__(self) -> None:
        self._ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_seconds

    def pass_until(self, condition: Callable[[], object], *servers: AnyServer, living: Sequence[str] = ()) -> None:
        """Lets the servers' time pass until the condition is true; after each stride they hear the living."""
        began = time.monotonic()

        def heard() -> bool:
            workers = [worker for server in servers for worker in inspect(server.control, "ListWorkers").workers]
            return all(worker.silent_seconds < self.STRIDE_SECONDS for worker in workers if worker.worker_id in living)

        while not condition():
            assert time.monotonic() < began + 100, "the condition did not come true"
            self._ahead_seconds += self.STRIDE_SECONDS
            # Two between the same looks would be one to the server.
            time.sleep(self.LOOK_SECONDS)
            wait_until(heard, 60, f"signs of life of {living}")


class CuttingProxy:
    """Passes TCP through to one server, and cuts connections when told to."""

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
        self.num_cuts = 0
        # What each connection carries to the server; None for all it can.
        self.bytes_per_second: float | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_replies(self) -> None:
        """Lets nothing through to clients until the next cut."""
        self._replies_pass.clear()

    def cut_after(self, num_bytes: int) -> None:
        """Cuts everything, once, when so many more bytes have gone to the server."""
        self._cut_after = num_bytes

    def cut(self) -> None:
        """Cuts all connections; new ones pass."""
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
                if to_server and self._cut_after is not None:
                    self._cut_after -= len(data)
                    if self._cut_after <= 0:
                        self.cut()
        except OSError:
            return
        finally:
            with_shutdown(sink)
            with_shutdown(source)


def with_shutdown(end: socket.socket) -> None:
    """Closes a socket for both ends, whoever reads it."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
    finally:
        end.close()
