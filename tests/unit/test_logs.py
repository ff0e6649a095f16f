import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyps import logs

log = logs.get("pyps.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_time_level_event_and_fields(stream):
    logs.configure("text", stream=stream)
    log.warning("worker expired", worker="worker-1", silent_seconds=30.123456789, path=Path("/data"))
    line = stream.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING worker expired worker=worker-1 silent_seconds=30.1235 "
        r"path=/data\n",
        line,
    ), line


def test_what_a_caller_sent_can_neither_begin_a_line_nor_reach_the_terminal(stream):
    logs.configure("text", stream=stream)
    log.info("worker\njoined", worker='a\n2026 ERROR fake="1"', host="\x1b[31m\x9b", empty="")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'worker joined worker="a\n2026 ERROR fake=\"1\"" host="\u001b[31m\u009b" empty=""')


def test_json_lines_are_objects_with_the_fields(stream):
    logs.configure("json", stream=stream)
    log.info("saved", path=Path("/data"), bytes=3, level="cannot hide the level")
    logging.getLogger("other").error("text %d", 5)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["path"], first["bytes"]) == ("saved", "info", "/data", 3)
    assert (second["event"], second["level"], second["logger"]) == ("text 5", "error", "other")


def test_less_serious_lines_are_left_out(stream):
    logs.configure("text", level=logging.WARNING, stream=stream)
    log.info("nothing")
    log.debug("nothing")
    assert stream.getvalue() == ""
