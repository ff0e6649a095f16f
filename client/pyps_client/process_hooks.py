"""What pyps does to a whole process: only where its program wants that, as it is the program's own."""

from __future__ import annotations

import os

from pyps_client import log, termination, uncaught
from pyps_wire import allocator

# Set to 1, it has them installed by the first client; `pyps run` sets it for its workers.
VARIABLE = "PYPS_PROCESS_HOOKS"

_installed = False


def install_process_hooks() -> None:
    """Makes this process a worker as `pyps run` starts one, before its first client is made.

    * An error of pyps that nobody catches ends it with one sentence; that one, any other and `sys.exit(1)` are told to
      the servers as the worker's failure (`sys.excepthook`, `sys.exit`).
    * SIGTERM, where it has no handler, unwinds it, so that the worker takes leave and nobody waits out its lease.
    * The client's messages appear on stderr, until the program sets up logging of its own.
    * glibc's allocator keeps the blocks of large messages.

    PYPS_PROCESS_HOOKS=1 in the environment does the same.
    """
    global _installed
    _installed = True
    log.prepare()
    uncaught.install()
    termination.install()


def install_where_asked() -> None:
    """Installs them where the environment asks for them."""
    if os.environ.get(VARIABLE, "").strip() not in ("", "0"):
        install_process_hooks()


def keep_large_blocks() -> None:
    """Tells the allocator of large messages, where the process is ours to set up."""
    if _installed:
        allocator.keep_large_blocks()
