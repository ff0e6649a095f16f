"""Reads what the benchmarks measured: medians by subject, the fastest peer, and what was recorded elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from measure import spread

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]

SHARED_MEMORY = "pyps shared memory"
LANE = "pyps lane float32"
LANE_TLS = "pyps lane float32, TLS"
LANE_BFLOAT16 = "pyps lane bfloat16"
LANE_INT4 = "pyps lane int4"
GRPC = "pyps gRPC float32"
GRPC_BFLOAT16 = "pyps gRPC bfloat16"
TORCH_RPC = "torch RPC"
# What a link allows: streams of nothing else, both ways at the same time, in rounds of so many bytes.
PLAIN_TCP = "plain TCP"

# ps-lite (C++ on both ends, TCP) does not run here. Measured before on another 2-core machine, torch 2.13.0, next to
# torch RPC's better transport in the same run: (size, workers) to rounds per second of ps-lite and of torch RPC.
PS_LITE = {
    ("small", 1): (4451.0, 1288.0),
    ("small", 2): (7765.0, 1353.0),
    ("mid", 1): (324.0, 326.0),
    ("mid", 2): (417.0, 390.0),
    ("big", 1): (5.3, 12.5),
    ("big", 2): (7.6, 16.3),
}
PS_LITE_SERVER_CPU_S_PER_GB = 0.58
# Rounds per second with 10 thousand parameters and one worker: that ratio, of torch RPC when the target was set.
PS_LITE_SMALL = 2936


# Who trains without anybody else.
ALONE = "one process alone"


def rows(results: Results, benchmark: str, **where: Any) -> list[Row]:
    """The successful measurements of a benchmark whose fields have these values."""
    found = results.get(benchmark, {}).get("rows", [])
    return [row for row in found if "error" not in row and all(row.get(name) == value for name, value in where.items())]


def subjects(found: Iterable[Row]) -> list[str]:
    """Names in order of their first row, ours first."""
    names = list(dict.fromkeys(row["subject"] for row in found))
    return sorted(names, key=lambda name: not name.startswith("pyps"))


def values(found: Iterable[Row], subject: str, column: str = "rounds_per_s") -> list[float]:
    """A column's values over a subject's repeats."""
    return [row[column] for row in found if row["subject"] == subject and row.get(column) is not None]


def median(found: Iterable[Row], subject: str, column: str = "rounds_per_s") -> float | None:
    """The median over a subject's repeats; None where there is none."""
    measured = values(found, subject, column)
    return statistics.median(measured) if measured else None


def fastest(found: list[Row], is_one: Callable[[str], bool]) -> tuple[str, float] | None:
    """The subject with the highest median of rounds per second among those that `is_one` names."""
    speeds = [(speed, name) for name in subjects(found) if is_one(name) and (speed := median(found, name)) is not None]
    if not speeds:
        return None
    speed, name = max(speeds)
    return name, speed


def is_torch_rpc(name: str) -> bool:
    return name.startswith(TORCH_RPC)


def is_peer(name: str) -> bool:
    return not name.startswith(("pyps", PLAIN_TCP))


def share_of_link(found: Iterable[Row], subject: str) -> float | None:
    """What a subject's bytes are of those that plain TCP moves over the same link, both ways at once."""
    found = list(found)
    speed, most = median(found, subject), median(found, PLAIN_TCP)
    bits = {LANE_BFLOAT16: 16, LANE_INT4: 4.25}.get(subject, 32)
    return speed * bits / 32 / most if speed and most else None


def ps_lite(found: list[Row], size: str, workers: int) -> float | None:
    """ps-lite's rounds per second as they would be here: its recorded ratio to torch RPC, times torch RPC here."""
    reference = fastest(found, is_torch_rpc)
    if reference is None or (size, workers) not in PS_LITE:
        return None
    lite, torch_rpc = PS_LITE[size, workers]
    return lite / torch_rpc * reference[1]


def of_training_case(found: Iterable[Row], rate: str, slowed: float) -> list[Row]:
    """The rows of one link and one slowness; and of the process alone, which has neither."""
    return [row for row in found if row["subject"] == ALONE or (row["rate"], row["slowed"]) == (rate, slowed)]


TRAINING_HEADINGS = ("", "x alone", "samples/s", "s to the loss", "batches to it", "batches", "loss at the end")


def training_cells(found: list[Row]) -> list[tuple[str, ...]]:
    """A line a subject of one case of training.py, under TRAINING_HEADINGS."""
    alone = median(found, ALONE, "samples_per_s")
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(row["subject"] for row in found):
        speed, times = median(found, name, "samples_per_s"), values(found, name, "seconds_to_loss")
        lines.append(
            (
                name,
                f"{speed / alone:.2f}" if speed and alone else "–",
                spread(values(found, name, "samples_per_s")),
                spread(times) if times or not speed else f"not in {median(found, name, 'limit_s'):g}",
                spread(values(found, name, "batches_to_loss"), 0),
                spread(values(found, name, "batches"), 0),
                spread(values(found, name, "loss"), 2),
            )
        )
    return lines


LOCAL_HEADINGS = ("", "loss at equal time", "at equal batches", "s to the loss", "batches", "kB a batch and worker")


def local_cells(found: list[Row]) -> list[tuple[str, ...]]:
    """A line a subject of one case of local_training.py, under LOCAL_HEADINGS: medians and ranges over seeds."""
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(row["subject"] for row in found if "error" not in row):
        times = values(found, name, "seconds_to_loss")
        lines.append(
            (
                name,
                spread(values(found, name, "loss"), 3),
                spread(values(found, name, "loss_at_batches"), 3),
                spread(times) if times else f"not in {median(found, name, 'limit_s'):g}",
                spread(values(found, name, "batches"), 0),
                spread(values(found, name, "kilobytes_a_batch"), 1),
            )
        )
    return lines
