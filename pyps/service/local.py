"""A server within the process of its worker: `servers="local"` of a client, for a first try or a test."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
from concurrent.futures import Future

from pyps import _kernels
from pyps.config import ServerConfig
from pyps.service.in_process import InProcess
from pyps.service.report import Addresses
from pyps.service.server import Server
from pyps_wire.in_process import SERVERS

# How long a server's end waits for calls, and the program's end for what the servers are amid.
END_SECONDS = 2.0

_numbers = itertools.count(1)


def start() -> str:
    """Starts a server with a run of its own and returns its address; it ends when its last worker has left."""
    ready: Future[str] = Future()
    ended = asyncio.run_coroutine_threadsafe(_serve(ready), _loop())
    ended.add_done_callback(functools.partial(_give_up, ready))
    return ready.result()


class LocalServer(Server):
    """A server that opens no port, writes nothing down and tells nobody but its own process's log."""

    async def serve(self, ready: Future[str]) -> None:
        address = f"local:{next(_numbers)}"
        services = self._services(Addresses(data=address, control="", metrics=""))
        for transport in self._transports:
            await transport.start(services, address)
        ready.set_result(address)
        await self._keep_serving()
        self._run.drain()
        for transport in self._transports:
            await transport.stop(END_SECONDS)
        await asyncio.to_thread(self._work.shutdown)


async def _serve(ready: Future[str]) -> None:
    config = ServerConfig(exit_when_done=True)
    await LocalServer(config, token=None, instruction_set=_kernels.isa(), transports=[InProcess]).serve(ready)


def _give_up(ready: Future[str], ended: Future[None]) -> None:
    if not ready.done():
        ready.set_exception(ended.exception() or RuntimeError("the server ended before it served"))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all such servers, on a thread that does not hold up the program's end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pyps-servers", daemon=True)
    thread.start()
    # As thread pools do it, and before them: without their threads a server would complain that its clock fails.
    threading._register_atexit(_park, loop, thread)  # type: ignore[attr-defined]
    return loop


def _park(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Lets the servers rest as they are: nobody would see more of what they hold."""
    if not thread.is_alive():
        # In a forked child.
        return
    parked = threading.Event()

    def park() -> None:
        SERVERS.clear()
        parked.set()
        threading.Event().wait()

    loop.call_soon_threadsafe(park)
    parked.wait(END_SECONDS)


# A forked child has the loop without its thread.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loop.cache_clear)
