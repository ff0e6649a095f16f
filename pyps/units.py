"""Amounts as text."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """Return a number of bytes in KiB, from one MiB on in MiB."""
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


def in_seconds(seconds: float) -> str:
    """Return a time in seconds, from two minutes on in minutes."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def counted(count: int, noun: str) -> str:
    """Return a number of things: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
