"""A line of an update log: JSON for people and scripts, whose last member is the checksum of what precedes it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from pyps_wire.errors import PypsError

FORMAT = "pyps update log 2"
_CHECKSUM = b', "crc32": "'


class UpdateLogError(PypsError):
    """Raised when an update log cannot be written or read; the message says which and why."""

    status = "FAILED_PRECONDITION"


def encode(plain: Mapping[str, Any]) -> bytes:
    """The line, with its end."""
    text = json.dumps(plain).encode()[:-1]
    return b'%s%s%08x"}\n' % (text, _CHECKSUM, zlib.crc32(text))


def decode(line: bytes) -> dict[str, Any] | None:
    """What `encode` was given; None where the line is not what was written."""
    text, _, checksum = line.rpartition(_CHECKSUM)
    if checksum != b'%08x"}\n' % zlib.crc32(text):
        return None
    plain: dict[str, Any] = json.loads(text + b"}")
    return plain
