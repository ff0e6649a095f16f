"""Which lines of the servers `pyps run` shows among those of the workers."""

from __future__ import annotations

import io
import logging

import pytest

from pyps import logs
from pyps.launcher.server_output import ServerLines


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_warnings_and_errors_are_shown_and_routine_is_not(log_format: logs.Format) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter() if log_format == "json" else logs.TextFormatter())
    logger = logging.Logger("a server's")
    logger.addHandler(handler)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "the event of level %d", level)
    lines = ServerLines()

    shown = [line for line in stream.getvalue().splitlines() if lines.attention("server-0", line)]

    assert len(shown) == 2
    assert "level 30" in shown[0]
    assert "level 40" in shown[1]


def test_the_start_block_is_routine_and_a_traceback_is_not() -> None:
    lines = ServerLines()
    block = ["pyps 0.1.0 parameter server", "  kernels  avx2, 2 threads", "  data     127.0.0.1:7610"]
    error = ["Traceback (most recent call last):", '  File "x.py", line 1, in x', "ValueError: x"]

    assert [line for line in [*block, *error] if lines.attention("server-0", line)] == error
    assert lines.attention("server-1", "  a line of a server whose block comes later")
