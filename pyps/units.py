"""Amounts as people read them."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """A number of bytes: in KiB below one MiB, in MiB above."""
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


def in_seconds(seconds: float) -> str:
    """A time: in seconds below two minutes, in minutes above."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def counted(count: int, noun: str) -> str:
    """A number of things in words: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
