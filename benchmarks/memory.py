"""How much memory does a server take at its peak? The big model, Adagrad, async, float32 over gRPC, 1 to 8 workers.

    python benchmarks/memory.py [--workers 1,2,4,8] [--repeats 3] [--quick]

The least is twice the model, parameters and Adagrad's sums, plus the process itself. The peak is the kernel's own
count (VmHWM), from the start over the first parameters' arrival to the last round. A part of the spread is luck: how
many workers happen to have messages on their way at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import trial
from measure import exit_on_sigterm, machine, spread, write_results
from rich.console import Console
from rich.table import Table
from rounds import Subject, interleaved
from work import BIG

WORKERS = "1,2,4,8"
LIMIT_WORKERS, LIMIT_X, LIMIT_MORE_MB = 4, 2.3, 100.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", help=f"numbers of workers (default {WORKERS})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="4 workers, once")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args()
    console = Console(width=150)
    exit_on_sigterm()
    print(machine(), flush=True)
    rows: list[dict[str, Any]] = []
    for count in map(int, (options.workers or ("4" if options.quick else WORKERS)).split(",")):
        subjects: dict[str, Subject] = {trial.GRPC.name: partial(trial.run, trial.GRPC)}
        rows += interleaved(subjects, BIG.shortened(2), count, 1 if options.quick else options.repeats)
    console.print(table(rows))
    limit = LIMIT_X * BIG.nbytes / 1e6 + LIMIT_MORE_MB
    if peaks := [row["server_peak_mb"] for row in rows if row["workers"] == LIMIT_WORKERS and "error" not in row]:
        words = "kept" if max(peaks) <= limit else "NOT kept"
        console.print(
            f"{LIMIT_X} x the model + {LIMIT_MORE_MB:.0f} MB = {limit:.0f} MB with {LIMIT_WORKERS} workers: "
            f"{words}, {statistics.median(peaks):.0f} MB"
        )
    write_results(options.json, rows, quick=options.quick, limit_mb=limit, limit_workers=LIMIT_WORKERS)
    return 1 if any("error" in row for row in rows) else 0


def table(rows: list[dict[str, Any]]) -> Table:
    """One row a number of workers."""
    drawn = Table(title=f"Server, {BIG.params:,} parameters ({BIG.nbytes / 1e6:.1f} MB)", title_justify="left")
    for heading in ("workers", "at its start, MB", "peak, MB", "peak, x model", "above twice the model, MB"):
        drawn.add_column(heading, justify="right")
    for count in sorted({row["workers"] for row in rows}):
        found = [row for row in rows if row["workers"] == count and "error" not in row]
        peaks = [row["server_peak_mb"] for row in found]
        drawn.add_row(
            str(count),
            spread([row["server_base_mb"] for row in found], 0),
            spread(peaks, 0),
            spread([row["server_peak_x"] for row in found], 2),
            spread([peak - 2 * BIG.nbytes / 1e6 for peak in peaks], 0),
        )
    return drawn


if __name__ == "__main__":
    sys.exit(main())
