"""Several raw workers of one run at once, and what a server says of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2
from pyps_wire.inspector_pb2_grpc import InspectorStub
from support import AnyServer, wait_until
from wire_worker import CHANNEL_OPTIONS, WireWorker

T = TypeVar("T")

# A worker that is killed is forgotten within two seconds. No shorter: those that live must be heard on a busy machine.
QUICK_LEASES = ("--heartbeat-seconds", "0.3", "--lease-seconds", "2")


@contextlib.contextmanager
def crew(server: AnyServer, num_workers: int, **fields: object) -> Iterator[list[WireWorker]]:
    """That many workers, "w0" first, all of them members of a run that serves."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(WireWorker(server.data, f"w{index}", **fields))  # type: ignore[arg-type]
            for index in range(num_workers)
        ]
        for worker in workers:
            worker.join()
        for worker in workers:
            assert worker.hello().state == common.RUN_STATE_READY
        yield workers


@contextlib.contextmanager
def beating(workers: Iterable[WireWorker], seconds: float = 0.2) -> Iterator[None]:
    """Gives signs of life for the workers, as their clients would."""
    workers, ends = list(workers), threading.Event()

    def beat() -> None:
        while not ends.wait(seconds):
            for worker in workers:
                worker.heartbeat()

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        yield
    finally:
        ends.set()
        heart.join(20)


def at_once(calls: Iterable[Callable[[], T]], deadline_seconds: float = 60.0) -> list[T]:
    """Makes the calls from a thread each; their results, in order."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(deadline_seconds) for future in futures]


@contextlib.contextmanager
def inspector(server: AnyServer) -> Iterator[InspectorStub]:
    """The server's control plane."""
    with grpc.insecure_channel(server.control, options=CHANNEL_OPTIONS) as channel:
        yield InspectorStub(channel)


def status_of(server: AnyServer) -> inspector_pb2.Status:
    """The server at a glance."""
    with inspector(server) as stub:
        return stub.GetStatus(inspector_pb2.GetStatusRequest(), timeout=20)


def configure(server: AnyServer, **fields: object) -> inspector_pb2.ConfigureReply:
    """Changes settings of the running server."""
    with inspector(server) as stub:
        return stub.Configure(inspector_pb2.ConfigureRequest(**fields), timeout=20)  # type: ignore[arg-type]


def events_of(server: AnyServer, kind: str) -> list[str]:
    """The messages of the events of that kind so far."""
    with inspector(server) as stub:
        reply = stub.ListEvents(inspector_pb2.ListEventsRequest(limit=1000), timeout=20)
    return [event.message for event in reply.events if event.kind == kind]


def wait_for_event(server: AnyServer, kind: str, text: str = "", deadline_seconds: float = 20.0) -> str:
    """The first event of that kind with that text in its message."""

    def found() -> str:
        return next((message for message in events_of(server, kind) if text in message), "")

    return wait_until(found, deadline_seconds, f"an event {kind!r} with {text!r}")
