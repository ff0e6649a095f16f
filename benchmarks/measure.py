"""What the benchmarks share: a process's CPU time, memory and cores, percentiles, the machine, the results' file."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("pyps", "torch", "grpcio", "protobuf", "numpy")


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, field: str) -> int:
    """A field of /proc/PID/status: VmHWM for the most that was resident, RssShmem for what is shared of it now."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no {field}")


def machine_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """What new processes can take without pushing others out."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable")


def pin(pid: int, cores: Collection[int]) -> None:
    """Keeps all threads of a process, and those that they will start, on `cores`."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue  # The thread has just ended.


def pinned_cores() -> tuple[set[int], set[int]]:
    """The server's core and the workers', where each side is to have one of its own; the same one if there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[0]}, {cores[-1]}


def exit_on_sigterm() -> None:
    """Lets SIGTERM end this program as Ctrl-C does: what it has started, and set up, goes with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def wait_for_line(line: str) -> None:
    """Blocks until the driver says `line`: the barrier between warm-up, timing and the end."""
    if sys.stdin.readline().strip() != line:
        raise SystemExit(f"expected {line!r} from the driver")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(percent / 100 * len(ordered)) - 1))]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range in one cell: "12.5 (11.9-13.0)"; a dash for nothing."""
    if not values:
        return "–"
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def machine(*packages: str) -> str:
    """One line: processor, cores, memory, system and the versions of `packages`."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    found = []
    for package in packages or PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} absent")
    cores = len(os.sched_getaffinity(0))
    memory = f"{machine_memory_bytes() / 2**30:.0f} GiB"
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {cores} cores, {memory}, {system}; {', '.join(found)}"


def write_results(path: Path | None, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Writes what one benchmark measured: its rows, the machine, how it was called, and how busy the machine was."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": path.stem,
        # Where the folders of one machine lie says nothing to readers.
        "command": " ".join(
            ["python", "benchmarks/" + Path(sys.argv[0]).name]
            + [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        **facts,
        "rows": list(rows),
    }
    # Whole or not at all: a measurement may be ended at any time.
    written = path.with_suffix(".part")
    written.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    written.replace(path)
