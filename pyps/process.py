"""What the operating system says of this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def resident_bytes() -> int:
    """Memory that the process holds at the moment; its peak where the system tells no more."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
