"""A link of a chosen speed, full duplex, between two network namespaces of this machine; and plain TCP over it.

`ip netns` makes the two, a veth pair joins them, and a token bucket (`tc tbf`) on each end limits what leaves it.
That needs root. The peers' scripts run here too, under their own Python: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

# Both ends are named alike, so that a peer's script needs one name only. Loopback inside each namespace is up too.
INTERFACE = "pyps0"
_CLONE_NEWNET = 0x40000000
_BLOCK = bytes(2**20)


def unavailable() -> str:
    """Why this machine cannot make links; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} of iproute2 are not on the PATH" if missing else ""


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

    def __enter__(self) -> Link:
        ends = (self.server_namespace, self.server_address), (self.worker_namespace, self.worker_address)
        try:
            for namespace, _ in ends:
                _run("ip", "netns", "add", namespace)
            pair = ("type", "veth", "peer", "name", INTERFACE, "netns", self.worker_namespace)
            _run("ip", "link", "add", INTERFACE, "netns", self.server_namespace, *pair)
            for namespace, address in ends:
                _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
                _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
                # A burst of 256 KiB is 2 ms of a gigabit; the queue behind it holds 20 ms more.
                bucket = ("tbf", "rate", self.rate, "burst", "256kb", "latency", "20ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, "root", *bucket)
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def _take_down(self) -> None:
        for namespace in (self.server_namespace, self.worker_namespace):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def tcp_gbit(self, seconds: float = 2.0) -> dict[str, float]:
        """Gbit/s of plain TCP streams: to the server alone, to the worker alone, and of both while both run."""
        return {
            "to server": self._streams(seconds, "up")[0],
            "to worker": self._streams(seconds, "down")[0],
            "both at once": min(self._streams(seconds, "up", "down")),
        }

    def _streams(self, seconds: float, *directions: str) -> list[float]:
        """A stream each way that is asked for, at the same time; the receivers' rates."""
        receivers = []
        for direction in directions:
            away = direction == "up"
            sink, source = (self.on_server, self.on_worker) if away else (self.on_worker, self.on_server)
            address = self.server_address if away else self.worker_address
            receiver = subprocess.Popen(
                [*sink, sys.executable, __file__, "receive", address], stdout=subprocess.PIPE, text=True
            )
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            sender = subprocess.Popen([*source, sys.executable, __file__, "send", address, port, str(seconds)])
            receivers.append((receiver, sender))
        rates = []
        for receiver, sender in receivers:
            rates.append(float(receiver.communicate()[0]))
            sender.wait()
        return rates


def enter(namespace: str) -> None:
    """Moves the calling thread, and the threads that it will start, into a named namespace."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


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


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2])
    else:
        _send(*sys.argv[2:])
