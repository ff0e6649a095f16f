"""Amounts as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pyps_wire.errors import InvalidArgument

SECONDS_MAX = 1e12
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
# Bits with a small letter, as links are named.
_BYTES = {"": 1.0, "bit": 1 / 8, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "KB": 1e3, "MB": 1e6, "GB": 1e9}


def parse_seconds(text: str, *, what: str, most: float = SECONDS_MAX) -> float:
    """Return the seconds of "0.01", "10ms" or "50us"; InvalidArgument for other texts, and for more than `most`."""
    refusal = f"{what} is {text!r}; expected a time such as 0.01 (seconds), 10ms or 50us"
    return _parsed(text, _SECONDS, refusal, least=0.0, most=most)


def parse_bandwidth(text: str, *, what: str) -> float:
    """Return the bytes a second of "1gbit", "100mbit", "12.5MB" or "inf"; InvalidArgument for others, and 0."""
    refusal = f"{what} is {text!r}; expected a link such as 1gbit, 100mbit or 12.5MB (a second)"
    return _parsed(text, _BYTES, refusal, least=1e-9, most=math.inf)


def _parsed(text: str, units: Mapping[str, float], refusal: str, *, least: float, most: float) -> float:
    found = re.fullmatch(r"(inf|[\d.]+(?:e-?\d+)?)([a-zA-Z]*)", text.replace(" ", ""))
    try:
        value = float(found[1]) * units[found[2]] if found else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not least <= value <= most:
        raise InvalidArgument(refusal)
    return value


def in_bytes(count: int) -> str:
    """Return a number of bytes in KiB, from one MiB on in MiB."""
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


def in_seconds(seconds: float) -> str:
    """Return a time in seconds, from two minutes on in minutes."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def counted(count: int, noun: str) -> str:
    """Return a number of things: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
