"""The end of a process whose main thread cannot end it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# What the program printed may lead into a pipe that nobody reads any more.
FLUSH_SECONDS = 2.0


def end_process(words: str, status: int) -> None:
    """Ends the process at once, with a line on stderr; nothing is closed: what is open may be the main thread's."""
    try:
        last_words = threading.Thread(target=_say, args=(words,), name="pyps-last-words", daemon=True)
        last_words.start()
        last_words.join(FLUSH_SECONDS)
    finally:
        os._exit(status)


def _say(words: str) -> None:
    # Either may be None, closed, or a broken pipe.
    with contextlib.suppress(Exception):
        print(f"pyps: {words}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
