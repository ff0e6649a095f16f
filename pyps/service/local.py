"""A server within the process of its worker: `servers="local"` of a client, for a first try or a test."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
from concurrent.futures import Future

from pyps import _kernels
from pyps.config import ServerConfig
from pyps.service.report import Addresses
from pyps.service.server import Server

# In a process that is not its own a server ends when it has, and never by ending the process.
DRAIN_SECONDS = 86_400.0


def start() -> str:
    """Starts a server with a run of its own and returns its address; it ends when its last worker has left."""
    config = ServerConfig(
        port=0,
        control_port=0,
        metrics_port=0,
        local_socket="off",
        exit_when_done=True,
        drain_seconds=DRAIN_SECONDS,
        # Its lines go where the program's do: none to stdout.
        log_format="json",
    )
    ready: Future[Addresses] = Future()
    ended = asyncio.run_coroutine_threadsafe(_serve(config, ready), _loop())
    ended.add_done_callback(functools.partial(_give_up, ready))
    return ready.result().data


async def _serve(config: ServerConfig, ready: Future[Addresses]) -> int:
    server = Server(config, token=None, instruction_set=_kernels.isa())
    return await server.run(signals=False, on_ready=ready.set_result)


def _give_up(ready: Future[Addresses], ended: Future[int]) -> None:
    if not ready.done():
        ready.set_exception(ended.exception() or RuntimeError("the server ended before it served"))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all such servers, on a thread that does not hold up the program's end."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pyps-servers", daemon=True).start()
    return loop


# A forked child has the loop without its thread.
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_loop.cache_clear)
