"""A GPU worker: the time from the gradients on its device to the new parameters there, and that of copying both.

    python benchmarks/gpu.py [--sizes mid,big] [--repeats 3] [--quick]

One worker whose model is on the GPU; Adagrad on the server. An event of CUDA is recorded before `step()` and one after
it, on the stream that the model computes on: their distance is what training waits for. The plain copy brings as
many numbers from the device into pinned memory and back, which is the least that a server on the host could cost;
its halves are what bfloat16 both ways could cost. Without a CUDA device it is left out, by name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import round_worker
import torch
from measure import exit_on_sigterm, machine, percentile, spread, wait_for_line, write_results
from rich.console import Console
from rich.table import Table
from trial import GRPC, GRPC_BFLOAT16, LANE, LANE_BFLOAT16, SHARED_MEMORY, Failed, Server, Variant, Workers
from work import SIZES, Size

SIZE_NAMES = "mid,big"
PLAIN_COPY = "plain copy, float32"
PLAIN_COPY_HALF = "plain copy, bfloat16"
SHARED_MEMORY_BFLOAT16 = Variant("pyps shared memory bfloat16", transport="shm", codec="bfloat16")
VARIANTS = (SHARED_MEMORY, SHARED_MEMORY_BFLOAT16, LANE, LANE_BFLOAT16, GRPC, GRPC_BFLOAT16)

Row = dict[str, Any]


def main() -> int:
    options = arguments()
    if options.worker:
        return worker(SIZES[options.worker], rounds=options.rounds)
    exit_on_sigterm()
    console = Console(width=150)
    print(machine(), flush=True)
    if not torch.cuda.is_available():
        reason = f"no CUDA device (torch {torch.__version__})"
        console.print(f"gpu: left out, {reason}", highlight=False)
        write_results(options.json, [], skipped=reason)
        return 0
    device = torch.cuda.get_device_name()
    console.print(device, highlight=False)
    rows: list[Row] = []
    for name in options.sizes.split(","):
        size = SIZES[name].shortened(3) if options.quick else SIZES[name]
        for _ in range(1 if options.quick else options.repeats):
            rows += measured(size)
        console.print(table(size, [row for row in rows if row["size"] == name]))
    write_results(options.json, rows, quick=options.quick, device=device)
    return 1 if any("error" in row or row.get("verified") is False for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZE_NAMES, help=f"some of {', '.join(SIZES)} (default {SIZE_NAMES})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once, a third of the rounds")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    for name, kind in (("--worker", str), ("--rounds", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(size: Size) -> list[Row]:
    """Each transport once, and the plain copies. A failure is printed, and is a row too."""
    rows: list[Row] = []
    for variant in VARIANTS:
        row: Row = {"subject": variant.name, "size": size.name, "params": size.params}
        command = [sys.executable, __file__, "--worker", size.name, "--rounds", str(size.rounds)]
        try:
            with Server() as server, Workers(command, server, variant, 1) as workers:
                workers.wait_until_ready()
                (reported,) = workers.send("go")
            row |= reported
        except Failed as error:
            print(f"{variant.name}, {size.name}: {error}", file=sys.stderr)
            row["error"] = str(error)
        rows.append(row)
    for name, dtype in ((PLAIN_COPY, torch.float32), (PLAIN_COPY_HALF, torch.bfloat16)):
        latencies = timed(plain_copy(size.params, dtype), size.rounds, warmup=size.warmup)
        rows.append({"subject": name, "size": size.name, "params": size.params, **summary(latencies)})
    return rows


def plain_copy(params: int, dtype: torch.dtype) -> Callable[[], None]:
    """From the device into pinned memory, and back."""
    on_device = torch.zeros(params, dtype=dtype, device="cuda")
    on_host = torch.empty(params, dtype=dtype, pin_memory=True)

    def copy() -> None:
        on_host.copy_(on_device, non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)

    return copy


def worker(size: Size, *, rounds: int) -> int:
    """The worker: its model and gradients are on the GPU from beginning to end."""
    from pyps_client import RemoteOptimizer, install_process_hooks

    install_process_hooks()
    torch.set_num_threads(1)
    model = round_worker.Tensors(size.params, size.keys).cuda()
    rule = torch.optim.Adagrad(model.parameters(), lr=round_worker.LEARNING_RATE, eps=round_worker.EPSILON)
    optimizer = RemoteOptimizer(model, rule)
    source = [gradient.cuda() for gradient in round_worker.gradients(size.params, size.keys)]
    for parameter, gradient in zip(model.parameters(), source, strict=True):
        parameter.grad = gradient.clone()
    print("ready", flush=True)
    wait_for_line("go")
    latencies = timed(optimizer.step, rounds, warmup=size.warmup)
    verified = round_worker.verified(model, round(optimizer.global_step))
    print(json.dumps({**summary(latencies), "verified": verified}), flush=True)
    optimizer.close()
    return 0


def timed(work: Callable[[], object], rounds: int, *, warmup: int) -> list[float]:
    """Milliseconds between two events on the device's stream, before the work and after it, a round at a time."""
    latencies = []
    for number in range(warmup + rounds):
        event: Any = torch.cuda.Event
        before, after = (event(enable_timing=True) for _ in range(2))
        # The work begins with its gradients there, and no earlier work to wait for.
        torch.cuda.synchronize()
        before.record()
        work()
        after.record()
        after.synchronize()
        if number >= warmup:
            latencies.append(before.elapsed_time(after))
    return latencies


def summary(latencies: list[float]) -> Row:
    return {"p50_ms": statistics.median(latencies), "p99_ms": percentile(latencies, 99)}


def table(size: Size, rows: list[Row]) -> Table:
    """A row a transport, next to the plain copy of the same type."""
    title = f"{size.name}: {size.params:,} parameters, from gradients on the GPU to new parameters there"
    drawn = Table(title=title, title_justify="left")
    for heading in ("", "p50 ms", "p99 ms", "x plain copy", "checked"):
        drawn.add_column(heading, justify="right" if heading else "left")
    for subject in dict.fromkeys(row["subject"] for row in rows):
        ok = {row.get("verified", not row.get("error")) for row in rows if row["subject"] == subject}
        drawn.add_row(
            subject,
            spread(figures.values(rows, subject, "p50_ms"), 2),
            spread(figures.values(rows, subject, "p99_ms"), 2),
            times_plain_copy(rows, subject),
            "–" if subject.startswith("plain") else "yes" if ok == {True} else "NO",
        )
    return drawn


def times_plain_copy(rows: list[Row], subject: str) -> str:
    """How many times as long as the plain copy of the same numbers in the same type."""
    copy = PLAIN_COPY_HALF if "bfloat16" in subject else PLAIN_COPY
    own, plain = figures.values(rows, subject, "p50_ms"), figures.values(rows, copy, "p50_ms")
    return f"{statistics.median(own) / statistics.median(plain):.2f}" if own and plain else "–"


if __name__ == "__main__":
    sys.exit(main())
