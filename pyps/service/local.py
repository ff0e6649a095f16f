"""A server within the process of its worker: `servers="local"` of a client, for a first try or a test."""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pyps import _kernels
from pyps.config import ServerConfig
from pyps.service.in_process import InProcess
from pyps.service.report import Addresses
from pyps.service.server import Server
from pyps_wire.errors import InvalidArgument

# How long a server's end waits for calls, and the program's end for what the servers are amid.
END_SECONDS = 2.0

T = TypeVar("T")

_numbers = itertools.count(1)
_servers: dict[str, LocalServer] = {}


def start() -> str:
    """Starts a server with a run of its own and returns its address; it ends when its last worker has left.

    Raises InvalidArgument where PYPS_ISA names none of this machine's instruction sets.
    """
    try:
        instruction_set = _kernels.isa()
    except ValueError as error:
        raise InvalidArgument(f"PYPS_ISA in the environment cannot be used: {error}") from None
    ready: Future[str] = Future()
    ended = asyncio.run_coroutine_threadsafe(_serve(ready, instruction_set), _loop())
    ended.add_done_callback(functools.partial(_give_up, ready))
    return ready.result()


def end(address: str) -> None:
    """Ends the server unless it has a run, with which it ends."""
    if (server := _servers.get(address)) is not None:
        _loop().call_soon_threadsafe(server.stop_unused)


class LocalServer(Server):
    """A server that opens no port, writes nothing down and tells nobody but its own process's log."""

    async def serve(self, ready: Future[str]) -> None:
        address = f"local:{next(_numbers)}"
        services = self._services(Addresses(data=address, control="", metrics=""))
        for transport in self._transports:
            await transport.start(services, address)
        _servers[address] = self
        ready.set_result(address)
        await self._keep_serving()
        _servers.pop(address, None)
        self._run.drain()
        for transport in self._transports:
            await transport.stop(END_SECONDS)
        await asyncio.to_thread(self._work.shutdown)

    def stop_unused(self) -> None:
        """Ends it where nobody has initialised a run."""
        if self._run.content.partition is None:
            self.stop("nobody trains here")


async def _serve(ready: Future[str], instruction_set: str) -> None:
    config = ServerConfig(exit_when="gone")
    server = LocalServer(config, instruction_set=instruction_set, transports=[InProcess], pool=_threads())
    await server.serve(ready)


def _give_up(ready: Future[str], ended: Future[None]) -> None:
    if not ready.done():
        ready.set_exception(ended.exception() or RuntimeError("the server ended before it served"))


class Threads(ThreadPoolExecutor):
    """Threads for all such servers, as many as there is work at once, until the very end of the program.

    Pools of the standard library end when the main thread does: before other threads, and handlers of `atexit`, by
    which workers still train or leave.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._running: list[threading.Thread] = []

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Lets a thread do work."""
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._run, name="local-server-work", daemon=True)
            thread.start()
            self._running.append(thread)
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(work, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends nothing: other servers' work is done here too."""

    def rest(self, seconds: float) -> None:
        """Waits until nothing is under way, for so long at most; nothing begins any more where nobody submits it."""
        deadline = time.monotonic() + seconds
        for _ in range(len(self._running)):
            self._idle.acquire(timeout=max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            future, work = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            # Nothing is kept until the next call.
            del future, work
            self._idle.release()


@functools.cache
def _threads() -> Threads:
    return Threads()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all such servers, on a thread that does not hold up the program's end."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_threads())
    thread = threading.Thread(target=loop.run_forever, name="local-servers", daemon=True)
    thread.start()
    # Before the first worker is made: it runs when the workers have left.
    atexit.register(_park, loop, thread)
    return loop


def _park(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Lets the servers rest: a thread that comes back from a kernel to an interpreter that ends, aborts the process."""
    if not thread.is_alive():
        # In a forked child.
        return
    parked = threading.Event()

    def park() -> None:
        parked.set()
        threading.Event().wait()

    loop.call_soon_threadsafe(park)
    parked.wait(END_SECONDS)
    _threads().rest(END_SECONDS)


def _forget_threads() -> None:
    _loop.cache_clear()
    _threads.cache_clear()
    _servers.clear()


# A forked child has none of the threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
