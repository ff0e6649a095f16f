"""The client's logger, "pyps.client"."""

from __future__ import annotations

import logging

logger = logging.getLogger("pyps.client")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints messages in programs that do not configure logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and not logging.getLogger("pyps").handlers:
            super().emit(record)


def prepare() -> None:
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("pyps: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET and logging.getLogger("pyps").level == logging.NOTSET:
        logger.setLevel(logging.INFO)
