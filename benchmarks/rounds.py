"""Push-and-pull rounds per second through a real server, by model size and workers, beside peers where given.

    python benchmarks/rounds.py [--peers FOLDER] [--cases small:1,mid:4] [--repeats 3] [--only NAME,NAME] [--quick]

In each round a worker rewrites its whole gradient and ends with the new parameters in its own torch parameters;
the peers do the same. Runs are interleaved (pyps, peer, peer, ... and back); cells are medians with the range.
Processes may use all cores; with the small model the server has one core and the workers share another, since
latency is the question there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
import trial
from measure import exit_on_sigterm, machine, spread, write_results
from rich.console import Console
from rich.table import Table
from trial import Failed
from work import SIZES, Size

CASES = "small:1,small:2,mid:1,mid:2,mid:4,big:1,big:2"
QUICK_CASES = "small:1,mid:1,big:1"
REFERENCE = "torch RPC"
COLUMNS = {
    "rounds/s": ("rounds_per_s", 1),
    "p50 ms": ("p50_ms", 2),
    "p99 ms": ("p99_ms", 2),
    "server CPU s/GB": ("server_cpu_s_per_gb", 2),
    "worker CPU s/GB": ("worker_cpu_s_per_gb", 2),
    "peak memory, MB": ("server_peak_mb", 0),
}

Row = dict[str, Any]
# Measures one size with so many workers.
Subject = Callable[[Size, int], Row]


def main() -> int:
    options = arguments()
    console = Console(width=170)
    exit_on_sigterm()
    print(machine(), flush=True)
    found, left_out = peers.available(options.peers)
    for name, reason in left_out.items():
        console.print(f"{name} is left out: {reason}", highlight=False)
    chosen = subjects(options.peers, found, only=options.only)
    rows: list[Row] = []
    versions: dict[str, dict[str, str]] = {}
    for case in (options.cases or (QUICK_CASES if options.quick else CASES)).split(","):
        name, _, count = case.partition(":")
        size = SIZES[name].shortened(3) if options.quick else SIZES[name]
        measured = interleaved(chosen, size, int(count), 1 if options.quick else options.repeats)
        console.print(table(size, int(count), measured))
        versions |= {row["subject"]: row.pop("versions") for row in measured if "versions" in row}
        rows += measured
        # After each case, so that an end midway loses one case only.
        write_results(options.json, rows, left_out=left_out, quick=options.quick, peer_versions=versions)
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    parser.add_argument("--cases", help=f"sizes and numbers of workers (default {CASES})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="the subjects to measure, by the beginnings of their names")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES}, once, with a third of the rounds")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def subjects(folder: Path | None, found: Sequence[peers.Peer], *, only: str = "") -> dict[str, Subject]:
    """Everything that is compared, by name."""
    chosen: dict[str, Subject] = {}
    for variant in trial.VARIANTS:
        chosen[variant.name] = partial(trial.run, variant)
    if folder is not None:
        for peer in found:
            chosen[peer.name] = partial(peers.run, folder, peer)
    wanted = tuple(only.split(","))
    return {name: subject for name, subject in chosen.items() if name.startswith(wanted)}


def interleaved(chosen: dict[str, Subject], size: Size, num_workers: int, repeats: int) -> list[Row]:
    """All subjects in turn, `repeats` times, every second time backwards. What fails is told, and is a row too."""
    rows = []
    for repeat in range(repeats):
        for name in list(chosen)[:: 1 if repeat % 2 == 0 else -1]:
            row: Row = {"subject": name, "size": size.name, "params": size.params, "workers": num_workers}
            try:
                row |= chosen[name](size, num_workers)
            except Failed as error:
                print(f"{name}, {size.name}, {num_workers} worker(s): {error}", file=sys.stderr)
                row["error"] = str(error)
            rows.append(row)
    return rows


def of_subject(rows: Sequence[Row], subject: str, column: str) -> list[float]:
    """A column's values over a subject's repeats."""
    return [row[column] for row in rows if row["subject"] == subject and row.get(column) is not None]


def reference_speed(rows: Sequence[Row]) -> float | None:
    """The median rounds per second of torch RPC by its better transport; None where it was not measured."""
    names = {row["subject"] for row in rows if row["subject"].startswith(REFERENCE)}
    speeds = [statistics.median(found) for name in names if (found := of_subject(rows, name, "rounds_per_s"))]
    return max(speeds, default=None)


def table(size: Size, num_workers: int, rows: Sequence[Row]) -> Table:
    """One row a subject, beside torch RPC at its best."""
    where = "server and workers on a core each" if size.pinned else "all on all cores"
    title = f"{size.name}: {size.params:,} parameters in {size.keys} tensors, {num_workers} worker(s), {where}"
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("")
    for heading in ("x torch RPC", *COLUMNS, "checked"):
        drawn.add_column(heading, justify="right")
    reference = reference_speed(rows)
    for subject in dict.fromkeys(row["subject"] for row in rows):
        speeds = of_subject(rows, subject, "rounds_per_s")
        ratio = f"{statistics.median(speeds) / reference:.2f}" if speeds and reference else "–"
        cells = [spread(of_subject(rows, subject, column), digits) for column, digits in COLUMNS.values()]
        ok = all(row.get("verified") for row in rows if row["subject"] == subject)
        drawn.add_row(subject, ratio, *cells, "yes" if ok else "NO")
    return drawn


if __name__ == "__main__":
    sys.exit(main())
