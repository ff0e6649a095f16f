"""Amounts as people read them."""

from __future__ import annotations


def in_bytes(count: int) -> str:
    """A number of bytes: in KiB below one MiB, in MiB above."""
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"
