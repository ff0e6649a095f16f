"""What is said to a wrong value: the program is called with it, and stopped before it touches the world."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import grpc
from typer.testing import CliRunner

from pyps import logs
from pyps.cli.main import app

# Of sys.addaudithook: what comes once a program has taken what it was given.
_STARTS = ("subprocess.", "socket.", "os.fork", "os.posix_spawn", "os.exec", "os.system", "os.kill")
_CHANGES = ("shutil.", "tempfile.", "os.mkdir", "os.remove", "os.rename")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_watching = False


class Reached(BaseException):
    """Everything was taken: what comes next would start, write or connect something."""


def of_call(call: Callable[[], object]) -> str:
    """The sentence with which a call refuses what it was given; empty where it takes it."""
    with _nothing_happens():
        try:
            call()
        except Reached:
            return ""
        except Exception as error:
            return str(error)
    return ""


def of_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The sentence with which `pyps` refuses these arguments; empty where a command begins its work."""
    # Nothing of the builder's own environment counts.
    env: dict[str, str | None] = dict.fromkeys(name for name in os.environ if name.startswith("PYPS_"))
    with _nothing_happens():
        try:
            result = CliRunner().invoke(app, arguments, env=env | dict(environment))
        except Reached:
            return ""
    if result.exit_code == 0:
        return ""
    text = result.output if isinstance(result.exception, SystemExit) else str(result.exception)
    return text.strip().rpartition("\n")[2].removeprefix("Error: ").removeprefix("pyps: ").strip()


@contextmanager
def _nothing_happens() -> Iterator[None]:
    """Raises Reached where something would be started, written or connected to."""
    global _watching
    with ExitStack() as patches:
        for name in ("insecure_channel", "secure_channel", "server"):
            patches.enter_context(mock.patch.object(grpc, name, _reached))
        patches.enter_context(mock.patch.object(asyncio, "run", _close))
        if launcher := sys.modules.get("pyps.ray"):
            patches.enter_context(mock.patch.object(launcher, "Job", _reached))
        # A command says where its process logs, and how loudly.
        for place, name in ((logs, "configure"), (logging, "basicConfig"), (logging.Logger, "setLevel")):
            patches.enter_context(mock.patch.object(place, name))
        patches.enter_context(mock.patch.object(sys, "dont_write_bytecode", True))
        _watching = True
        try:
            yield
        finally:
            _watching = False


def _reached(*_: Any, **__: Any) -> None:
    raise Reached


def _close(coroutine: Any, **_: Any) -> None:
    coroutine.close()
    raise Reached


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    # Some modules look around while they are imported.
    deed = _watching and (event.startswith(_STARTS + _CHANGES) or (event == "open" and arguments[2] & _WRITING))
    if deed and not any("importlib" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)):
        raise Reached


# There is no way to take it away again.
sys.addaudithook(_on_event)
