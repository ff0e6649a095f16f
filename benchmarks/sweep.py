"""Which message size, how many channels, which server? An echo over gRPC alone, and pyps with its shards so cut.

    python benchmarks/sweep.py [--repeats 3] [--quick]

The echo moves 100 MiB each way over open streams, in messages of one size, between two processes that do nothing else:
what gRPC itself makes possible. Its configurations differ in one thing each from what pyps does (an asyncio server, one
channel, large blocks kept by the allocator). The last table is the whole of pyps, float32 over gRPC: the big model, one
worker, shards of so many parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import server_model
import trial
from measure import exit_on_sigterm, machine, spread, write_results
from rich.console import Console
from rich.table import Table
from rounds import interleaved, of_subject
from work import BIG

from pyps_wire.allocator import keep_large_blocks

KIB = 2**10
MIB = 2**20
MESSAGE_BYTES = (64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
SHARD_SIZES = (16_384, 65_536, 262_144, 524_288, 1_047_552, 2_097_152, 4_194_304)
ROUND_BYTES = 100 * MIB
ROUNDS = 8


@dataclass(frozen=True)
class Setup:
    """One configuration of the echo."""

    name: str
    server: str = "asyncio"
    channels: int = 1
    keeps_blocks: bool = True


SETUPS = (
    Setup("asyncio server, 1 channel"),
    Setup("2 channels", channels=2),
    Setup("4 channels", channels=4),
    Setup("threaded server", server="threaded"),
    Setup("blocks returned to the system", keeps_blocks=False),
)


def main() -> int:
    options = arguments()
    if options.serve:
        return serve(options.serve, keeps_blocks=options.keep)
    if options.echo:
        if options.keep:
            keep_large_blocks()
        print(echo_rounds_per_s(options.echo, options.channels, options.message_bytes))
        return 0
    console = Console(width=170)
    exit_on_sigterm()
    print(machine(), flush=True)
    repeats = 1 if options.quick else options.repeats
    echoes = measure_echoes(repeats, MESSAGE_BYTES[1::2] if options.quick else MESSAGE_BYTES)
    console.print(echo_table(echoes))
    write_results(options.json, echoes, quick=options.quick)
    rounds = measure_rounds(repeats, SHARD_SIZES[1::2] if options.quick else SHARD_SIZES)
    console.print(rounds_table(rounds))
    write_results(options.json, echoes + rounds, quick=options.quick)
    return 1 if any("error" in row for row in rounds) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="every second size, once")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    # How this program starts its own two processes of an echo.
    for name, kind in (("--serve", str), ("--echo", str), ("--channels", int), ("--message-bytes", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_echoes(repeats: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """All setups in turn at each size, each time in processes of their own."""
    rows = []
    for message_bytes in sizes:
        for _ in range(repeats):
            for setup in SETUPS:
                speed = echo(setup, message_bytes)
                row = {"kind": "echo", "subject": setup.name, "message_bytes": message_bytes, "rounds_per_s": speed}
                rows.append(row)
    return rows


def echo(setup: Setup, message_bytes: int) -> float:
    """Rounds per second of one setup."""
    program = [sys.executable, __file__] + ["--keep"] * setup.keeps_blocks
    server = subprocess.Popen(
        [*program, "--serve", setup.server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{server.stdout.readline().strip()}"
        client = [*program, "--echo", address, "--channels", str(setup.channels), "--message-bytes", str(message_bytes)]
        return float(subprocess.run(client, check=True, capture_output=True, text=True).stdout)
    finally:
        server.communicate()


def serve(kind: str, *, keeps_blocks: bool) -> int:
    """The echo's server, until its input ends."""
    if keeps_blocks:
        keep_large_blocks()
    if kind == "threaded":
        server_model.serve_threaded()
    else:
        asyncio.run(server_model.serve_asyncio())
    return 0


def echo_rounds_per_s(address: str, num_channels: int, message_bytes: int) -> float:
    """100 MiB there and back, shared by the channels, ROUNDS times after one."""
    count = max(1, ROUND_BYTES // message_bytes // num_channels)
    message = bytes(message_bytes)
    streams = [Stream(address, message) for _ in range(num_channels)]
    for stream in streams:
        stream.round(count)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        together = [threading.Thread(target=stream.round, args=(count,)) for stream in streams[1:]]
        for thread in together:
            thread.start()
        streams[0].round(count)
        for thread in together:
            thread.join()
    seconds = time.perf_counter() - began
    for stream in streams:
        stream.close()
    # Where the messages do not divide the round evenly, a round is somewhat smaller.
    return ROUNDS / seconds * (count * num_channels * message_bytes / ROUND_BYTES)


class Stream:
    """An open echo on a channel of its own; the generator's thread writes while `round` reads."""

    def __init__(self, address: str, message: bytes):
        self._message = message
        self._allowed = threading.Semaphore(0)
        self._closed = False
        self._channel = grpc.insecure_channel(address, options=server_model.OPTIONS)
        echo: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream("/bench/echo")
        self._echoes = echo(self._messages())

    def round(self, count: int) -> None:
        """Sends `count` messages and takes their echoes."""
        self._allowed.release(count)
        for _ in range(count):
            next(self._echoes)

    def close(self) -> None:
        self._closed = True
        self._allowed.release()
        self._channel.close()

    def _messages(self) -> Iterator[bytes]:
        while True:
            self._allowed.acquire()
            if self._closed:
                return
            yield self._message


def measure_rounds(repeats: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """pyps with each shard size in turn."""
    rows: list[dict[str, Any]] = []
    flags = ["--max-message-bytes", str(64 * MIB)]
    for _ in range(repeats):
        for size in sizes:
            subject = partial(trial.run, trial.GRPC, server_flags=flags, shard_size=size)
            measured = interleaved({trial.GRPC.name: subject}, BIG.shortened(2), 1, 1)
            rows += [{"kind": "rounds", "shard_size": size, "message_bytes": size * 4} | row for row in measured]
    return rows


def in_units(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def echo_table(rows: list[dict[str, Any]]) -> Table:
    """A row a size, a column a setup."""
    drawn = Table(title="Echo over gRPC: rounds of 100 MiB each way per second", title_justify="left")
    drawn.add_column("message")
    for setup in SETUPS:
        drawn.add_column(setup.name, justify="right")
    for size in dict.fromkeys(row["message_bytes"] for row in rows):
        found = [row for row in rows if row["message_bytes"] == size]
        drawn.add_row(in_units(size), *(spread(of_subject(found, s.name, "rounds_per_s"), 2) for s in SETUPS))
    return drawn


def rounds_table(rows: list[dict[str, Any]]) -> Table:
    """A row a shard size."""
    drawn = Table(title=f"{trial.GRPC.name}, big, 1 worker, by the size of its shards", title_justify="left")
    for heading in ("parameters in a shard", "bytes", "rounds/s", "server CPU s/GB", "peak memory, MB"):
        drawn.add_column(heading, justify="right")
    for size in sorted({row["shard_size"] for row in rows}):
        found = [row for row in rows if row["shard_size"] == size]
        columns = [
            [row[name] for row in found if name in row]
            for name in ("rounds_per_s", "server_cpu_s_per_gb", "server_peak_mb")
        ]
        drawn.add_row(f"{size:,}", in_units(size * 4), spread(columns[0]), spread(columns[1], 2), spread(columns[2], 0))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
