"""The end of a program by an exception that nobody caught: remembered, and told in one sentence where it is ours."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from pyps_wire.errors import PypsError

# Set to 1, it brings the traceback back.
TRACEBACK_VARIABLE = "PYPS_TRACEBACK"

_OWN_PACKAGES = ("pyps_client", "pyps_wire")
_LIBRARIES = frozenset({"site-packages", "dist-packages"})

# What knows others' errors for one of ours.
Translator = Callable[[BaseException], PypsError | None]

_installed = False
_translators: list[Translator] = []
_error: BaseException | None = None


def install() -> None:
    """Wraps the interpreter's hook for uncaught exceptions, and sys.exit, once.

    Other errors than ours still go to the hook before.
    """
    global _installed
    if _installed:
        return
    _installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        remember(error)
        own = translated(error)
        if isinstance(own, PypsError) and os.environ.get(TRACEBACK_VARIABLE, "").strip() in ("", "0"):
            print(told(own, trace), file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
    leave = sys.exit

    def exit_program(status: Any = None, /) -> NoReturn:
        # No hook hears of a SystemExit.
        remember(SystemExit(status))
        leave(status)

    sys.exit = exit_program


def translate_with(translator: Translator) -> None:
    """Has errors that nobody catches looked at: where the translator says which of ours one is, that is told instead.

    The others must get None.
    """
    if translator not in _translators:
        _translators.append(translator)


def translated(error: BaseException) -> BaseException:
    """The error as one of ours, where a translator knows it; else the error itself."""
    return next((own for translate in _translators if (own := translate(error)) is not None), error)


def remember(error: BaseException) -> None:
    """Notes what ends the program."""
    global _error
    _error = error


def last() -> BaseException | None:
    """What ended the program, if an exception did; as one of ours where it is known for one."""
    error = _error
    if error is None and not hasattr(sys, "ps1"):
        # Python's own word, without the hook; to somebody at a prompt the program goes on after it.
        error = getattr(sys, "last_value", None)
    return None if error is None else translated(error)


def told(error: PypsError, trace: TracebackType | None) -> str:
    """The error's message, and below it the line of the user's program that it came from."""
    place = _place(trace)
    return f"pyps: {error}" + (f"\n  at {place}" if place else "")


def _place(trace: TracebackType | None) -> str:
    """file:line of the last frame in the user's own code; failing that, in anybody's but ours."""
    others = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN_PACKAGES
    ]
    own = [(file, line) for file, line in others if not _is_library(file)]
    if not others:
        return ""
    file, line = (own or others)[-1]
    return f"{_short(file)}:{line}"


def _is_library(file: str) -> bool:
    """True for the standard library and installed packages, torch's wrapper around `step` among them."""
    if file.startswith(("<frozen ", sysconfig.get_path("stdlib") + os.sep)):
        return True
    return not _LIBRARIES.isdisjoint(Path(file).parts)


def _short(file: str) -> str:
    try:
        return file.removeprefix(f"{Path.cwd()}{os.sep}")
    except OSError:
        # The working directory is gone.
        return file
