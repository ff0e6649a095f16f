"""One measurement of pyps: a server, its workers as processes of their own, their timed rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from measure import cpu_seconds, memory_bytes, percentile, pin, pinned_cores
from network import Link
from work import Size

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0


class Failed(Exception):
    """A subject could not be measured; the text says why."""


@dataclass(frozen=True)
class Variant:
    """How a worker's rounds travel."""

    name: str
    transport: str = "grpc"
    # How gradients are written on the way, and parameters, unless they are written otherwise.
    codec: str = "float32"
    parameter_codec: str = ""
    # Whether its server speaks TLS.
    tls: bool = False
    # How far from the formula a parameter may end, as a share: here half of a bfloat16's last bit.
    tolerance: float = 5e-3

    @property
    def environment(self) -> dict[str, str]:
        ways = {"PYPS_TRANSPORT": self.transport, "PYPS_PROCESS_HOOKS": "1"}
        return ways | {"PYPS_GRADIENT_CODEC": self.codec, "PYPS_PARAMETER_CODEC": self.parameter_codec or self.codec}


SHARED_MEMORY = Variant("pyps shared memory", transport="shm")
LANE = Variant("pyps lane float32", transport="tcp")
LANE_BFLOAT16 = Variant("pyps lane bfloat16", transport="tcp", codec="bfloat16")
LANE_INT4 = Variant("pyps lane int4", transport="tcp", codec="int4", tolerance=0.3)
LANE_TLS = Variant("pyps lane float32, TLS", transport="tcp", tls=True)
GRPC = Variant("pyps gRPC float32")
GRPC_BFLOAT16 = Variant("pyps gRPC bfloat16", codec="bfloat16")
VARIANTS = (SHARED_MEMORY, LANE, LANE_BFLOAT16, LANE_TLS, GRPC, GRPC_BFLOAT16)


class Server:
    """A `pyps serve` process on free ports, on one side of `link` where there is one; ended with the context.

    With `tls` it has a certificate of its own. `environment` is what its workers are to be started with.
    """

    def __init__(self, flags: Sequence[str] = (), link: Link | None = None, *, tls: bool = False):
        # Without a penalty for staleness every update is the full one, and the end can be checked against the formula.
        self._command = [sys.executable, "-m", "pyps", "serve", "--port", "0", "--control-port", "0"]
        self._command += ["--metrics-port", "0", "--staleness", "none", *flags]
        self._host = link.server_address if link else "127.0.0.1"
        self._tls = tls
        if link is not None:
            self._command = [*link.on_server, *self._command, "--host", "0.0.0.0", "--insecure"]

    def __enter__(self) -> Server:
        self._kept = tempfile.TemporaryDirectory(prefix="pyps-bench-")
        self.folder = Path(self._kept.name)
        ready, log = self.folder / "ready.json", self.folder / "server.log"
        self.environment = {"PYPS_RUN_ID": "bench"}
        command = [*self._command, "--ready-file", str(ready)]
        if self._tls:
            make = [sys.executable, "-m", "pyps", "certs", "init", "--folder", str(self.folder), "--host", self._host]
            subprocess.run(make, check=True, capture_output=True)
            command += ["--tls-cert", str(self.folder / "server.crt"), "--tls-key", str(self.folder / "server.key")]
            self.environment["PYPS_TLS_CA"] = str(self.folder / "ca.crt")
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                message = log.read_text(encoding="utf-8")[-1000:]
                self._stop()
                raise Failed(f"the server did not start: {message}")
            time.sleep(0.02)
        self.pid = self._process.pid
        port = str(json.loads(ready.read_text(encoding="utf-8"))["data"]).rpartition(":")[2]
        self.address = self.environment["PYPS_SERVERS"] = f"{self._host}:{port}"
        self.base_bytes = memory_bytes(self.pid, "VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._kept.cleanup()


class Workers:
    """Worker processes that go on at each line that they get; all end with the context."""

    def __init__(self, command: Sequence[str], server: Server, variant: Variant, count: int, link: Link | None = None):
        environment = os.environ | variant.environment | server.environment | {"PYPS_WORKER_COUNT": str(count)}
        # Their output besides answers: shown if one fails.
        self._log = server.folder / "workers.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._processes = [
                subprocess.Popen(
                    [*(link.on_worker if link else ()), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment | {"PYPS_WORKER_INDEX": str(index)},
                )
                for index in range(count)
            ]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            process.communicate()

    def wait_until_ready(self) -> None:
        for process in self._processes:
            if (line := self._read(process)) != "ready":
                raise Failed(f"a worker said {line!r} instead of 'ready'")

    def send(self, line: str) -> list[dict[str, Any]]:
        """Says it to all at once; returns what each answers."""
        for process in self._processes:
            self._write(process, line)
        return [json.loads(self._read(process)) for process in self._processes]

    def tell_in_turn(self, line: str) -> list[dict[str, Any]]:
        """Says it to the next once the one before has answered."""
        answers = []
        for process in self._processes:
            self._write(process, line)
            answers.append(json.loads(self._read(process)))
        return answers

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise Failed(f"a worker ended early: {self._log.read_text(encoding='utf-8')[-1000:]}")
        return line


def run(variant: Variant, size: Size, num_workers: int, *, link: Link | None = None) -> dict[str, Any]:
    """Measures one variant: all workers warm up, go at once, and are summed up. Raises Failed."""
    command = [sys.executable, str(HERE / "round_worker.py"), "--params", str(size.params), "--keys", str(size.keys)]
    command += ["--rounds", str(size.rounds), "--warmup", str(size.warmup), "--tolerance", str(variant.tolerance)]
    command += ["--pinned"] * size.pinned
    with Server(link=link, tls=variant.tls) as server, Workers(command, server, variant, num_workers, link) as workers:
        if size.pinned:
            pin(server.pid, pinned_cores()[0])
        workers.wait_until_ready()
        cpu_before = cpu_seconds(server.pid)
        timings = workers.send("go")
        server_cpu = cpu_seconds(server.pid) - cpu_before
        measured = summary(size, timings, server_cpu=server_cpu)
        measured |= server_memory(server, size)
        # One after the other, so that a worker's last pull holds a known number of updates.
        measured["verified"] = all(end["verified"] for end in workers.tell_in_turn("finish"))
    return measured


def summary(size: Size, timings: list[dict[str, Any]], *, server_cpu: float) -> dict[str, Any]:
    """The figures of one measurement, over all workers."""
    wall = max(t["end"] for t in timings) - min(t["begin"] for t in timings)
    latencies = [value for t in timings for value in t["latencies"]]
    gigabytes = len(latencies) * size.gigabytes_a_round
    return {
        "rounds_per_s": len(latencies) / wall,
        "p50_ms": percentile(latencies, 50) * 1e3,
        "p99_ms": percentile(latencies, 99) * 1e3,
        "server_cpu_s_per_gb": server_cpu / gigabytes,
        "worker_cpu_s_per_gb": sum(t["cpu"] for t in timings) / gigabytes,
    }


def server_memory(server: Server, size: Size) -> dict[str, float]:
    """The server's memory: at its start, at its peak (shared pages included), and what workers share with it."""
    peak = memory_bytes(server.pid, "VmHWM")
    return {
        "server_base_mb": server.base_bytes / 1e6,
        "server_peak_mb": peak / 1e6,
        "server_peak_x": peak / size.nbytes,
        "server_shared_mb": memory_bytes(server.pid, "RssShmem") / 1e6,
    }
