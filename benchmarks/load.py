"""How does one server bear 1 to 64 workers on a small model? Updates per second, latency, memory.

    python benchmarks/load.py [--workers 1,4,16,64] [--seconds 2] [--quick]

All workers are processes of their own that rewrite their gradient and step as fast as they can, for a fixed time, on
all cores. They share the cores with the server: beyond as many workers as cores the latency is mostly theirs, waiting
for a processor. Every push is an update of its own (async).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import queue
import sys
import threading
import time
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from measure import cpu_seconds, exit_on_sigterm, machine, memory_bytes, percentile, write_results
from rich.console import Console
from rich.table import Table
from trial import LANE, SHARED_MEMORY, Failed, Server, Variant
from work import SMALL

HERE = Path(__file__).resolve().parent
WORKERS = "1,4,16,64"
WARMUP = 20
START_SECONDS = 300.0

# All workers are forked from one process that has imported torch: 64 imports would take minutes.
context = multiprocessing.get_context("forkserver")


def main() -> int:
    options = arguments()
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    context.set_forkserver_preload(["round_worker"])
    console = Console(width=150)
    exit_on_sigterm()
    print(machine(), flush=True)
    rows: list[dict[str, Any]] = []
    failed = False
    for count in map(int, (options.workers or ("1,4,16" if options.quick else WORKERS)).split(",")):
        for variant in (SHARED_MEMORY, LANE):
            try:
                rows.append(measure(variant, count, options.seconds))
            except Failed as error:
                failed = True
                print(f"{variant.name}, {count} workers: {error}", file=sys.stderr)
            # After each, so that an end midway loses one only.
            write_results(options.json, rows, quick=options.quick)
    console.print(table(rows))
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", help=f"numbers of workers (default {WORKERS})")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="1, 4 and 16 workers")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def measure(variant: Variant, num_workers: int, seconds: float) -> dict[str, Any]:
    """One server and `num_workers` workers for so many seconds. Raises Failed."""
    with Server() as server:
        settings = server.environment | {"PYPS_WORKER_COUNT": str(num_workers)}
        barrier = context.Barrier(num_workers + 1)
        answers: Queue[dict[str, Any]] = context.Queue()
        workers = [
            context.Process(
                target=work,
                args=(variant.environment | settings | {"PYPS_WORKER_INDEX": str(i)}, seconds, barrier, answers),
            )
            for i in range(num_workers)
        ]
        for worker in workers:
            worker.start()
        try:
            row = observe(server, barrier, answers, num_workers, seconds)
        except (threading.BrokenBarrierError, queue.Empty):
            raise Failed("not all workers came to their rounds, or ended them; see above") from None
        finally:
            end(workers)
    return {"subject": variant.name, "workers": num_workers} | row


def observe(
    server: Server, barrier: Barrier, answers: Queue[dict[str, Any]], num_workers: int, seconds: float
) -> dict[str, Any]:
    """Start all at once, and sum up what they and the server's process report."""
    barrier.wait(START_SECONDS)
    cpu_before = cpu_seconds(server.pid)
    reported = [answers.get(timeout=START_SECONDS + seconds) for _ in range(num_workers)]
    cpu = cpu_seconds(server.pid) - cpu_before
    peak, num_threads = memory_bytes(server.pid, "VmHWM"), len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    barrier.wait(START_SECONDS)
    latencies = [value for one in reported for value in one["latencies"]]
    wall = max(one["end"] for one in reported) - min(one["begin"] for one in reported)
    return {
        "updates_per_s": len(latencies) / wall,
        # 1 where all workers got equally many rounds in.
        "slowest_of_mean": min(len(one["latencies"]) for one in reported) * num_workers / len(latencies),
        "p50_ms": percentile(latencies, 50) * 1e3,
        "p99_ms": percentile(latencies, 99) * 1e3,
        "server_cores": cpu / wall,
        "server_base_mb": server.base_bytes / 1e6,
        "server_peak_mb": peak / 1e6,
        "server_threads": num_threads,
    }


def end(workers: list[ForkServerProcess]) -> None:
    """Waits for all; those that have not ended by then are killed."""
    deadline = time.monotonic() + START_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def work(environment: dict[str, str], seconds: float, barrier: Barrier, answers: Queue[dict[str, Any]]) -> None:
    """One worker: joins, waits for the others, and makes rounds until its time is over."""
    os.environ.update(environment)
    try:
        answers.put(rounds(seconds, barrier))
        barrier.wait(START_SECONDS)
    except BaseException:
        barrier.abort()
        raise


def rounds(seconds: float, barrier: Barrier) -> dict[str, Any]:
    import round_worker
    import torch

    from pyps_client import RemoteOptimizer

    torch.set_num_threads(1)
    logging.getLogger("pyps.client").setLevel(logging.WARNING)
    model = round_worker.Tensors(SMALL.params, SMALL.keys)
    rule = torch.optim.Adagrad(model.parameters(), lr=round_worker.LEARNING_RATE, eps=round_worker.EPSILON)
    optimizer = RemoteOptimizer(model, rule)
    step = round_worker.stepping(model, optimizer)
    for _ in range(WARMUP):
        step()
    barrier.wait(START_SECONDS)
    latencies = []
    begin = now = time.perf_counter()
    while now < begin + seconds:
        step()
        before, now = now, time.perf_counter()
        latencies.append(now - before)
    optimizer.close()
    return {"begin": begin, "end": now, "latencies": latencies}


def table(rows: list[dict[str, Any]]) -> Table:
    """One row a measurement."""
    drawn = Table(title=f"One server, {SMALL.params:,} parameters, all on all cores", title_justify="left")
    drawn.add_column("")
    columns = {
        "workers": ("workers", 0),
        "updates/s": ("updates_per_s", 0),
        "p50 ms": ("p50_ms", 2),
        "p99 ms": ("p99_ms", 2),
        "slowest worker's rounds, of the mean": ("slowest_of_mean", 2),
        "cores the server used": ("server_cores", 2),
        "its peak memory, MB": ("server_peak_mb", 0),
        "its threads": ("server_threads", 0),
    }
    for heading in columns:
        drawn.add_column(heading, justify="right")
    for row in rows:
        drawn.add_row(row["subject"], *(f"{row[name]:,.{digits}f}" for name, digits in columns.values()))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
