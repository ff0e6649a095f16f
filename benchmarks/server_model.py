"""Threaded or asyncio grpcio for the data plane? Both kinds of server, the same messages, one run.

    python benchmarks/server_model.py

Each server is a process of its own that does nothing but take and give bytes, as the data plane does (identity
serializers). The kinds take turns, so that whatever else the machine does hits both; the table shows the median of
the rounds. What the table cannot show: a parked pull costs an asyncio server a future and a threaded one a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

LARGE = bytes(4 * 2**20)
SMALL = bytes(1024)
NUM_LARGE = 48
NUM_SMALL = 1500
NUM_CLIENTS = 16
ROUNDS = 3
KINDS = ("threaded", "asyncio")
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
GB = 1e9


class Threaded:
    """The calls on a thread each."""

    def push(self, requests: Iterator[bytes], context: object) -> bytes:
        for _ in requests:
            pass
        return b"done"

    def pull(self, request: bytes, context: object) -> Iterator[bytes]:
        for _ in range(int(request)):
            yield LARGE

    def echo(self, requests: Iterator[bytes], context: object) -> Iterator[bytes]:
        yield from requests


class Asyncio:
    """The same calls on one event loop."""

    async def push(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        while await context.read() is not grpc.aio.EOF:
            pass
        return b"done"

    async def pull(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        for _ in range(int(request)):
            await context.write(LARGE)

    async def echo(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)


def handlers(calls: Threaded | Asyncio) -> grpc.GenericRpcHandler:
    """Bytes in, bytes out."""
    return grpc.method_handlers_generic_handler(
        "bench",
        {
            "push": grpc.stream_unary_rpc_method_handler(calls.push),
            "pull": grpc.unary_stream_rpc_method_handler(calls.pull),
            "echo": grpc.stream_stream_rpc_method_handler(calls.echo),
        },
    )


def serve_threaded() -> None:
    """Runs a threaded server until its input ends."""
    server = grpc.server(ThreadPoolExecutor(2 * NUM_CLIENTS), options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(Threaded()),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None).wait()


async def serve_asyncio() -> None:
    """Runs an asyncio server until its input ends."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((handlers(Asyncio()),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def push_rate(address: str) -> float:
    """GB/s of 4 MiB messages to the server, one client."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        call: Any = channel.stream_unary("/bench/push")
        began = time.perf_counter()
        call((LARGE for _ in range(NUM_LARGE)), timeout=60)
        return NUM_LARGE * len(LARGE) / (time.perf_counter() - began) / GB


def pull_rate(address: str) -> float:
    """GB/s of 4 MiB messages from the server, one client."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        call: Any = channel.unary_stream("/bench/pull")
        began = time.perf_counter()
        received = sum(len(message) for message in call(str(NUM_LARGE).encode(), timeout=60))
        return received / (time.perf_counter() - began) / GB


def echo_latency(address: str) -> float:
    """Microseconds from a 1 KiB message to its echo on an open stream, one client."""
    turn = threading.Semaphore(1)

    def messages() -> Iterator[bytes]:
        for _ in range(NUM_SMALL):
            turn.acquire()
            yield SMALL

    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        call: Any = channel.stream_stream("/bench/echo")
        began = time.perf_counter()
        for _ in call(messages(), timeout=60):
            turn.release()
        return (time.perf_counter() - began) / NUM_SMALL * 1e6


def echo_rate(address: str) -> float:
    """Echoes of 1 KiB a second, 16 clients with a stream each."""

    async def client(num_echoes: int) -> None:
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            call: Any = channel.stream_stream("/bench/echo")
            stream = call(timeout=60)
            for _ in range(num_echoes):
                await stream.write(SMALL)
                await stream.read()
            await stream.done_writing()

    async def clients() -> float:
        began = time.perf_counter()
        num_echoes = NUM_SMALL // 3
        await asyncio.gather(*(client(num_echoes) for _ in range(NUM_CLIENTS)))
        return NUM_CLIENTS * num_echoes / (time.perf_counter() - began)

    return asyncio.run(clients())


MEASURES: dict[str, Callable[[str], float]] = {
    "push 4 MiB, GB/s": push_rate,
    "pull 4 MiB, GB/s": pull_rate,
    "echo 1 KiB, microseconds": echo_latency,
    "echo 1 KiB, 16 clients, a second": echo_rate,
}


def main() -> None:
    """Measures both kinds in turns and prints the table."""
    servers: dict[str, Any] = {kind: _start(kind) for kind in KINDS}
    addresses = {kind: f"127.0.0.1:{server.stdout.readline().strip()}" for kind, server in servers.items()}
    figures: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, measure in MEASURES.items():
            for kind in KINDS:
                figures.setdefault((name, kind), []).append(measure(addresses[kind]))
    for server in servers.values():
        server.communicate(timeout=20)
    print(f"grpcio {grpc.__version__}, Python {sys.version.split()[0]}, median of {ROUNDS} rounds")
    print(f"{'':36}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'ratio':>12}")
    for name in MEASURES:
        threaded, on_loop = (statistics.median(figures[name, kind]) for kind in KINDS)
        print(f"{name:36}{threaded:12.4g}{on_loop:12.4g}{on_loop / threaded:12.2f}")


def _start(kind: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, __file__, "--serve", kind]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    wanted = parser.parse_args().serve
    if wanted == "threaded":
        serve_threaded()
    elif wanted == "asyncio":
        asyncio.run(serve_asyncio())
    else:
        main()
