"""What it costs that no acknowledged push is lost: rounds beside a server that saves, and beside one with a standby.

    python benchmarks/durability.py [--parameters 1e6,25.6e6] [--codecs float32,int4] [--transport tcp] [--windows 9]
        [--seconds 1] [--json FILE]

One worker goes round (push, SGD, pull) with each of these servers in turn, a window each:

* alone: nothing is kept.
* resend: the worker keeps its pushes until a checkpoint, of which there is none meanwhile.
* saving: a checkpoint a second; its longest round says how long a save holds up a push.
* standby: another server follows it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from measure import cpu_seconds, exit_on_sigterm, machine, write_results
from rich.console import Console
from rich.table import Table
from trial import START_SECONDS, Failed, Server

from pyps_client import Client, Launch

FLAGS = {
    "alone": [],
    "resend": ["--checkpoint-seconds", "3600"],
    "saving": ["--checkpoint-seconds", "1"],
    "standby": ["--heartbeat-seconds", "0.2"],
}


class Subject:
    """A server, with its standby if it has one, and its worker."""

    def __init__(self, name: str, size: int, codec: str, transport: str, stack: ExitStack):
        folder = [] if "--checkpoint-seconds" not in FLAGS[name] else ["--checkpoint-dir", str(_folder(stack, name))]
        self.server = stack.enter_context(Server([*FLAGS[name], *folder]))
        self.standby = None
        launch = Launch(self.server.address, run_id="bench", gradient_codec=codec, transport=transport)
        tensors = {"w": np.zeros(size, np.float32)}
        self.client = stack.enter_context(Client(tensors, ("sgd", {"learning_rate": 0.01}), launch=launch))
        if name == "standby":
            self.standby = stack.enter_context(Server(["--standby-of", self.server.address]))
            self._wait_for("answers wait until it has received")
        self.rates: list[float] = []
        self.longest = 0.0
        self.rounds = 0
        # Of the server and of its standby.
        self.cpu_seconds = [0.0, 0.0]

    def _wait_for(self, words: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while words not in (self.server.folder / "server.log").read_text(encoding="utf-8"):
            if time.monotonic() > deadline:
                raise Failed(f"the server does not say {words!r}")
            time.sleep(0.02)

    def play(self, gradient: dict[str, np.ndarray[Any, Any]], seconds: float) -> None:
        before, began, rounds = self._cpu(), time.monotonic(), 0
        while (at := time.monotonic()) - began < seconds:
            self.client.exchange(gradient)
            self.longest = max(self.longest, time.monotonic() - at)
            rounds += 1
        self.rates.append(rounds / (at - began))
        self.rounds += rounds
        self.cpu_seconds = [sum(these) for these in zip(self.cpu_seconds, self._cpu(), strict=True)]
        self.cpu_seconds = [total - earlier for total, earlier in zip(self.cpu_seconds, before, strict=True)]

    def _cpu(self) -> list[float]:
        return [cpu_seconds(server.pid) if server else 0.0 for server in (self.server, self.standby)]


def _folder(stack: ExitStack, name: str) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"pyps-bench-{name}-")))


def measure(size: int, codec: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    gradient = {"w": 0.01 * np.random.default_rng(0).standard_normal(size).astype(np.float32)}
    with ExitStack() as stack:
        subjects = {name: Subject(name, size, codec, options.transport, stack) for name in FLAGS}
        for subject in subjects.values():
            for _ in range(3):
                subject.client.exchange(gradient)
        for _ in range(options.windows):
            for subject in subjects.values():
                subject.play(gradient, options.seconds)
        alone = subjects["alone"].rates
        return [
            {
                "subject": name,
                "params": size,
                "codec": codec,
                "rounds_per_second": statistics.median(subject.rates),
                "ratio": statistics.median(own / other for own, other in zip(subject.rates, alone, strict=True)),
                "longest_ms": 1e3 * subject.longest,
                "server_cpu_ms": 1e3 * subject.cpu_seconds[0] / subject.rounds,
                "standby_cpu_ms": 1e3 * subject.cpu_seconds[1] / subject.rounds,
            }
            for name, subject in subjects.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", default="1e6,25.6e6")
    parser.add_argument("--codecs", default="float32,int4")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    exit_on_sigterm()
    print(machine(), flush=True)
    rows: list[dict[str, Any]] = []
    for size in (int(float(text)) for text in options.parameters.split(",")):
        for codec in options.codecs.split(","):
            rows += measure(size, codec, options)
            write_results(options.json, rows)
    drawn = Table(title=f"One worker, {options.transport}, {options.windows} windows of {options.seconds:g} s each")
    columns = "parameters", "codec", "server", "rounds/s", "x alone", "longest, ms", "server CPU, ms", "standby CPU, ms"
    for column in columns:
        drawn.add_column(column, justify="left" if column in columns[1:3] else "right")
    for row in rows:
        numbers = [f"{row['rounds_per_second']:.1f}", f"{row['ratio']:.2f}", f"{row['longest_ms']:.0f}"]
        numbers += [f"{row['server_cpu_ms']:.2f}", f"{row['standby_cpu_ms']:.2f}"]
        drawn.add_row(f"{row['params']:,}", row["codec"], row["subject"], *numbers)
    Console(width=120).print(drawn)


if __name__ == "__main__":
    main()
