"""A process that imports once what the children of tests need, and becomes one of them by a fork each.

torch alone takes two to four seconds of a processor to import; a fork of a process that has it takes hundredths. A
child is a process like any other: with a pid, signals, an environment, an output file and an end of its own, all but
the interpreter's last collection of garbage. `support.Forker` starts this script and speaks to it, one JSON object a
message, over the socket whose number is its argument.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "sklearn.datasets",
    "hypothesis",
    "pyps.cli.main",
    "pyps.service.server",
    "pyps.cli.serve",
    "pyps.cli.coordinate",
    "pyps_client",
    "pyps_client.data",
    "pyps_client.torch",
)

# Of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    # What another thread holds at a fork nobody ever releases in the child.
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, f"a module of {PRELOADED} started {num_threads - 1} threads"
    # Else the child's first collection writes to, and so copies, every page with an object.
    gc.freeze()
    job = serve(connection)
    kind, what = become(job)
    end(status_of(kind, what))


def serve(connection: socket.socket) -> dict[str, Any]:
    """Forks for every job that comes and tells how each ended; returns, in the child, with the child's job."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, int] = {}
    while True:
        ready = select.select([connection, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 4096)
            while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                job_id = children.pop(ended[0])
                connection.send(json.dumps({"id": job_id, "status": os.waitstatus_to_exitcode(ended[1])}).encode())
        if connection in ready:
            message = connection.recv(1 << 20)
            if not message:
                sys.exit()
            job: dict[str, Any] = json.loads(message)
            pid = os.fork()
            if pid == 0:
                # However this process ends, what it forked ends with it.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for fd in (connection.detach(), wake, woken):
                    os.close(fd)
                return job
            children[pid] = job["id"]
            connection.send(json.dumps({"id": job["id"], "pid": pid}).encode())


def become(job: dict[str, Any]) -> tuple[str, str]:
    """Takes over the job's environment, folder, output and arguments; returns what is to be run, and how."""
    for path, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (job["output"], os.O_WRONLY, (1, 2))):
        fd = os.open(path, flags)
        for target in targets:
            os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job["env"])
    if job["cwd"] is not None:
        os.chdir(job["cwd"])
    kind, *arguments = job["arguments"]
    if kind in ("-c", "-m"):
        sys.path[0] = "" if kind == "-c" else str(Path.cwd())
        sys.argv[:] = ["-c" if kind == "-c" else arguments[0], *arguments[1:]]
        return kind, arguments[0]
    sys.path[0] = str(Path(kind).resolve().parent)
    sys.argv[:] = [kind, *arguments]
    return "", kind


def run(kind: str, what: str) -> None:
    if kind == "-c":
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(what, "<string>", "exec"), module.__dict__)
    elif kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        # As `python` leaves it: what the script defines can be pickled, and outlives its last line.
        module = types.ModuleType("__main__")
        module.__file__ = what
        sys.modules["__main__"] = module
        exec(compile(Path(what).read_bytes(), what, "exec"), module.__dict__)


def status_of(kind: str, what: str) -> int:
    try:
        run(kind, what)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 0xFF
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(status: int) -> None:
    """Ends as the interpreter does, but collects no garbage: that would copy every page shared with the parent."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
