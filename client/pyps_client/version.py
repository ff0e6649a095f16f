"""This software's name and version, which servers log."""

from __future__ import annotations

VERSION = "0.1.0"
SOFTWARE = f"pyps-client {VERSION}"
