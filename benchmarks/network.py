"""A link of a chosen speed, full duplex, between two network namespaces of this machine; and plain TCP over it.

`ip netns` makes the two, a veth pair joins them, and a token bucket (`tc tbf`) on each end limits what is sent.
That needs root. A delay is made by a program of its own, since few kernels of virtual machines have one (`netem`).
The peers' scripts run here too, under their own Python: standard library only.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

# Both ends are named alike, so that a peer's script needs one name only. Loopback inside each namespace is up too.
INTERFACE = "pyps0"
_CLONE_NEWNET = 0x40000000
# Of /dev/net/tun: a device of Ethernet frames, without a header of its own.
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
# Frames that would wait longer for their turn on a delayed link are dropped, as by a router.
_QUEUE_SECONDS = 0.1
_BLOCK = bytes(2**20)


def unavailable() -> str:
    """Why this machine cannot make links; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 are not on the PATH"
    namespace = f"pyps-bench-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", namespace], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    return f"`ip netns add` fails: {made.stderr.strip()}" if made.returncode else ""


class Link:
    """Two namespaces with a link of `rate` ("1gbit") each way; taken down with the context."""

    server_address = "10.99.0.1"
    worker_address = "10.99.0.2"

    def __init__(self, rate: str):
        self.rate = rate
        self.server_namespace = f"pyps-bench-{os.getpid()}-server"
        self.worker_namespace = f"pyps-bench-{os.getpid()}-worker"
        self.on_server = ("ip", "netns", "exec", self.server_namespace)
        self.on_worker = ("ip", "netns", "exec", self.worker_namespace)

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    @property
    def _namespaces(self) -> tuple[str, ...]:
        return self.server_namespace, self.worker_namespace

    def _set_up(self) -> None:
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
        _join((self.server_namespace, INTERFACE), (self.worker_namespace, INTERFACE), rate=self.rate)
        _give_address(self.server_namespace, self.server_address)
        _give_address(self.worker_namespace, self.worker_address)

    def _take_down(self) -> None:
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def tcp_gbit(self, seconds: float = 2.0) -> float:
        """Gbit/s of plain TCP, a stream each way at the same time: of the slower one, as it was received."""
        ways = (
            (self.on_server, self.on_worker, self.server_address),
            (self.on_worker, self.on_server, self.worker_address),
        )
        streams = []
        for sink, source, address in ways:
            receiver = subprocess.Popen(
                [*sink, sys.executable, __file__, "receive", address], stdout=subprocess.PIPE, text=True
            )
            assert receiver.stdout is not None
            streams.append((receiver, source, address, receiver.stdout.readline().strip()))
        senders = [
            subprocess.Popen([*source, sys.executable, __file__, "send", address, port, str(seconds)])
            for _, source, address, port in streams
        ]
        rates = [float(receiver.communicate()[0]) for receiver, *_ in streams]
        for sender in senders:
            sender.wait()
        return min(rates)


class Switch(Link):
    """A namespace for the server and one for each worker, each with a link of `rate` each way to what joins them."""

    def __init__(self, rate: str, num_workers: int):
        super().__init__(rate)
        self.switch_namespace = f"pyps-bench-{os.getpid()}-switch"
        self._workers = (self.worker_namespace, *(f"{self.worker_namespace}-{n}" for n in range(1, num_workers)))
        self.on_workers = [("ip", "netns", "exec", namespace) for namespace in self._workers]

    @property
    def _namespaces(self) -> tuple[str, ...]:
        return self.server_namespace, *self._workers, self.switch_namespace

    def _set_up(self) -> None:
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
        _run("ip", "-n", self.switch_namespace, "link", "add", "bridge", "up", "type", "bridge")
        for number, namespace in enumerate((self.server_namespace, *self._workers), start=1):
            _join((namespace, INTERFACE), (self.switch_namespace, f"port{number}"), rate=self.rate)
            _run("ip", "-n", self.switch_namespace, "link", "set", f"port{number}", "master", "bridge")
            _give_address(namespace, f"10.99.0.{number}")

    def bytes_of(self, worker: int) -> int:
        """Bytes that have passed the worker's end of its link, both ways together."""
        shown = ("ip", "-json", "-statistics", "-n", self._workers[worker], "link", "show", INTERFACE)
        [link] = json.loads(subprocess.run(shown, capture_output=True, check=True).stdout)
        return sum(link["stats64"][way]["bytes"] for way in ("rx", "tx"))


class DelayedSwitch(Switch):
    """The same, with a delay of so many seconds each way between any two of them."""

    def __init__(self, rate: str, num_workers: int, *, delay_seconds: float):
        super().__init__(rate, num_workers)
        self._delay_seconds = delay_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def _set_up(self) -> None:
        namespaces = self._namespaces[:-1]
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
        command = [sys.executable, __file__, "delay", self.rate, str(self._delay_seconds), *namespaces]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("the delayed switch ended at its start")
        for number, namespace in enumerate(namespaces, start=1):
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            _limit(namespace, INTERFACE, self.rate)
            _give_address(namespace, f"10.99.0.{number}")

    def _take_down(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        super()._take_down()


def enter(namespace: str) -> None:
    """Moves the calling thread, and the threads that it will start, into a named namespace."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _join(*ends: tuple[str, str], rate: str) -> None:
    """A link between two interfaces, each given by its namespace and its name."""
    (namespace, interface), (other, peer) = ends
    pair = ("type", "veth", "peer", "name", peer, "netns", other)
    _run("ip", "link", "add", interface, "netns", namespace, *pair)
    for namespace, interface in ends:
        _run("ip", "-n", namespace, "link", "set", interface, "up")
        _limit(namespace, interface, rate)


def _limit(namespace: str, interface: str, rate: str) -> None:
    # A burst of 256 KiB is 2 ms of a gigabit; the queue behind it holds 20 ms more.
    bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _give_address(namespace: str, address: str) -> None:
    _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _run(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}: {finished.stderr.strip()}")


def _receive(address: str) -> None:
    """Takes one stream; prints its port, then its rate in Gbit/s."""
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        buffer, total, began = bytearray(len(_BLOCK)), 0, time.perf_counter()
        while received := connection.recv_into(buffer):
            total += received
    print(total * 8 / 1e9 / (time.perf_counter() - began))


def _send(address: str, port: str, seconds: str) -> None:
    with socket.create_connection((address, int(port))) as connection:
        deadline = time.perf_counter() + float(seconds)
        while time.perf_counter() < deadline:
            connection.sendall(_BLOCK)


def _delay(rate: str, seconds: str, namespaces: Sequence[str]) -> None:
    """Joins the namespaces: gives each a device, and brings its frames to the others late, until it is killed."""
    bits_per_second = float(rate.removesuffix("mbit")) * 1e6
    ports = [_tap(namespace) for namespace in namespaces]
    print("ready", flush=True)
    waiting: list[collections.deque[tuple[float, bytes]]] = [collections.deque() for _ in ports]
    free_at = [0.0] * len(ports)
    # Where the frames of an Ethernet address come from.
    known: dict[bytes, int] = {}
    with selectors.DefaultSelector() as selector:
        for number, port in enumerate(ports):
            selector.register(port, selectors.EVENT_READ, number)
        while True:
            due = min((queue[0][0] for queue in waiting if queue), default=None)
            for key, _ in selector.select(None if due is None else max(0.0, due - time.monotonic())):
                number = key.data
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        frame = os.read(key.fd, 2048)
                        now = time.monotonic()
                        known[frame[6:12]] = number
                        target = known.get(frame[:6])
                        for to in range(len(ports)) if target is None else (target,):
                            free_at[to] = max(free_at[to], now)
                            if to != number and free_at[to] < now + _QUEUE_SECONDS:
                                free_at[to] += len(frame) * 8 / bits_per_second
                                waiting[to].append((free_at[to] + float(seconds), frame))
            now = time.monotonic()
            for port, queue in zip(ports, waiting, strict=True):
                while queue and queue[0][0] <= now:
                    # A device that is not up yet takes none.
                    with contextlib.suppress(OSError):
                        os.write(port, queue.popleft()[1])


def _tap(namespace: str) -> int:
    """The file of a new device INTERFACE in the namespace, through which this process sends and receives frames."""
    enter(namespace)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _TAP_WITHOUT_HEADER))
    return file


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", address]:
            _receive(address)
        case ["delay", rate, seconds, *namespaces]:
            _delay(rate, seconds, namespaces)
        case _:
            _send(*sys.argv[2:])
