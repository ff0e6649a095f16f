"""A server for one worker alone, `servers="local"`: a child process on loopback that ends with the worker."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pyps_client.fork import at_fork
from pyps_wire.errors import InvalidArgument, ServerUnavailable

START_SECONDS = 60.0
END_SECONDS = 10.0
_POLL_SECONDS = 0.01

# The child reads its stdin, a pipe of the worker's: the read returns when the worker's process ends, in any way.
_CODE = """
import os, runpy, signal, threading

def end_with_parent():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pyps", run_name="__main__", alter_sys=True)
"""
# "gone" ends the server even if a forked child of the worker still holds the pipe.
_FLAGS = (
    *("serve", "--port", "0", "--control-port", "0", "--metrics-port", "0", "--log-level", "warning"),
    *("--exit-when", "gone", "--ready-file"),
)

# By data address.
_servers: dict[str, subprocess.Popen[bytes]] = {}
# A forked child cannot wait for its parent's children: `check` would report them as ended.
at_fork(after_in_child=_servers.clear)


def start() -> str:
    """Start a server with a run of its own, and return its data address. Raises InvalidArgument where none starts."""
    if importlib.util.find_spec("pyps") is None:
        raise InvalidArgument(
            "servers='local' starts a server on this machine, which needs the package pyps: install it from the "
            "folder that this client came from; or name servers."
        )
    # The worker's settings do not apply to the server.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYPS_")}
    environment |= {name: os.environ[name] for name in ("PYPS_ISA",) if name in os.environ}
    # After the child's own path: the script's folder may be a clone of pyps, without compiled kernels.
    code = f"import sys\nsys.path += {list(filter(None, sys.path))!r}\n{_CODE}"
    with tempfile.TemporaryDirectory(prefix="pyps-local-") as folder:
        ready = Path(folder, "ready.json")
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *_FLAGS, str(ready)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C in the terminal ends the worker, which leaves its run first.
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise InvalidArgument(
                        f"The local server ended with status {process.returncode}: its lines say why."
                    )
                if time.monotonic() > deadline:
                    raise ServerUnavailable(f"The local server does not answer after {START_SECONDS:g} s.")
                time.sleep(_POLL_SECONDS)
            address: str = json.loads(ready.read_text(encoding="utf-8"))["data"]
        except BaseException:
            _end(process)
            raise
    _servers[address] = process
    return address


def check(address: str) -> None:
    """Raise ServerUnavailable if `start` started this server and it has ended: it does not come back."""
    process = _servers.get(address)
    if process is not None and process.poll() is not None:
        raise ServerUnavailable(
            f"The server that this worker started at {address} (servers='local') has ended, with status "
            f"{process.returncode}, and its run with it: make a new client, or name servers that keep checkpoints."
        )


def end(address: str) -> None:
    """End the server, if `start` started it."""
    if (process := _servers.pop(address, None)) is not None:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()
