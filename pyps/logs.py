"""Log lines, an event each: as `time level event key=value ...`, or as JSON.

log = logs.get("pyps.checkpoint")
log.info("checkpoint written", path=path, seconds=0.2)
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from functools import partialmethod
from typing import Literal, TextIO

Format = Literal["text", "json"]


class Log:
    """Writes events with fields through the standard logger of a name; `exception` is for bugs only."""

    def __init__(self, name: str):
        self._logger = logging.getLogger(name)

    def _write(self, level: int, with_traceback: bool, event: str, /, **fields: object) -> None:
        self._logger.log(level, event, exc_info=with_traceback, extra={"fields": fields})

    debug = partialmethod(_write, logging.DEBUG, False)
    info = partialmethod(_write, logging.INFO, False)
    warning = partialmethod(_write, logging.WARNING, False)
    error = partialmethod(_write, logging.ERROR, False)
    exception = partialmethod(_write, logging.ERROR, True)


# The log of a module, by its name.
get = Log


class Crowd:
    """Counts warnings of frequent events, and logs one line for each kind. Any thread may use it."""

    def __init__(self, log: Log):
        self._log = log
        self._lock = threading.Lock()
        # Guarded by _lock. For each event its count and newest fields.
        self._noted: dict[str, tuple[int, dict[str, object]]] = {}

    def note(self, event: str, /, **fields: object) -> bool:
        """Count an event; return whether it is the first since the last call of `tell`."""
        with self._lock:
            is_first = not self._noted
            count, _ = self._noted.get(event, (0, {}))
            self._noted[event] = count + 1, fields
        return is_first

    def tell(self) -> None:
        """Write a line for each kind of event since the last call."""
        with self._lock:
            noted, self._noted = self._noted, {}
        for event, (count, fields) in noted.items():
            self._log.warning(event, count=count, **fields)


def configure(format: Format = "text", *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr by default), in place of all earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class TextFormatter(logging.Formatter):
    """Formats `2026-01-31T12:00:00.123Z INFO    checkpoint written path=/data/checkpoint-01 seconds=0.2`."""

    def format(self, record: logging.LogRecord) -> str:
        # A line break in a caller's text must not begin another line.
        event = "".join(character if character.isprintable() else " " for character in record.getMessage())
        words = [_time(record), f"{record.levelname:<7}", event]
        words += [f"{name}={_text(value)}" for name, value in getattr(record, "fields", {}).items()]
        line = " ".join(words)
        # Only a traceback, which means a bug, takes several lines.
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formats an object of time, level, event and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        entry.update({name: value for name, value in getattr(record, "fields", {}).items() if name not in entry})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    """Return the value as one word, quoted if plain text would be ambiguous."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text and text.isprintable() and not any(character in ' "=' for character in text)
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
