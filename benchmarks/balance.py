"""How long does a pass take with two of eight workers eight times as slow, on real processes?

    python benchmarks/balance.py [--out FILE]

Computing is a pause here, 0.2 s an example for a worker at full speed, so that a machine with few cores can be many
workers: what is measured is the handing out, with its messages, and not the machine. Ideal is the time in which all
workers, each at its own speed, would end together. Three ways: each worker its fixed share, ten portions a worker, and
copies of the last portions too (Dean et al. 2012, section 4.2). In virtual time: experiments/sandblaster_balance.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import exit_on_sigterm, machine, write_results
from rich.console import Console
from rich.table import Table
from trial import Failed, Server

import pyps_client

WORKERS, SLOW, SLOWNESS = 8, 2, 8
EXAMPLES, SECONDS_AN_EXAMPLE = 80, 0.2
ITERATIONS = 5
IDEAL_SECONDS = EXAMPLES * SECONDS_AN_EXAMPLE / (WORKERS - SLOW + SLOW / SLOWNESS)
END_SECONDS = 600.0


@dataclass(frozen=True)
class Way:
    """How a pass is handed out."""

    name: str
    portions: int
    copies: int


WAYS = (Way("each its share", WORKERS, 1), Way("portions", EXAMPLES, 1), Way("portions and copies", EXAMPLES, 2))


def main() -> int:
    """Measures every way and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="where to write the figures, as JSON")
    parser.add_argument("--worker", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(slowness=options.worker)
        return 0
    exit_on_sigterm()
    print(machine(), flush=True)
    try:
        rows = [measure(way) for way in WAYS]
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    table = Table(title=f"a pass, ideal {IDEAL_SECONDS:.2f} s")
    for heading in ("way", "median seconds", "of ideal", "results thrown away"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        table.add_row(row["way"], f"{row['seconds']:.2f}", f"{row['of_ideal']:.2f}", str(row["wasted"]))
    Console(width=120).print(table)
    write_results(options.out, rows)
    return 0


def measure(way: Way) -> dict[str, Any]:
    """Seconds of the passes that iterations with one trial took, the first left out."""
    with Server(("--protocol", "sandblaster", "--run-id", "balance")) as server:
        environment = os.environ | {"PYPS_SERVERS": server.address, "PYPS_RUN_ID": "balance", "OMP_NUM_THREADS": "1"}
        environment["PYPS_PROCESS_HOOKS"] = "1"
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(SLOWNESS if index < SLOW else 1)],
                env=environment | {"PYPS_WORKER_ID": f"worker-{index}"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for index in range(WORKERS)
        ]
        try:
            command = [sys.executable, "-m", "pyps", "coordinate", "--json", "--servers", server.address]
            command += ["--iterations", str(ITERATIONS), "--portions", str(way.portions), "--copies", str(way.copies)]
            command += ["--tolerance", "0", "--loss-tolerance", "0"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_SECONDS)
            if done.returncode:
                raise Failed(f"the coordinator ended with {done.returncode}: {done.stderr[-500:]}")
            for process in processes:
                process.wait(END_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    # Workers join during the first; a second trial would be a second pass.
    iterations = [line for line in lines if line.get("iteration", 0) > 1 and line["trials"] == 1]
    if not iterations:
        raise Failed("no iteration took exactly one pass")
    seconds = median(line["seconds"] for line in iterations)
    copies, stolen = sum(line["copies"] for line in iterations), sum(line["stolen"] for line in iterations)
    return {
        "way": way.name,
        "seconds": seconds,
        "ideal_seconds": IDEAL_SECONDS,
        "of_ideal": seconds / IDEAL_SECONDS,
        "passes": len(iterations),
        "copies": copies,
        "stolen": stolen,
        # Of a portion with a copy one result is of no use.
        "wasted": copies,
    }


class Bowl(torch.nn.Module):
    """Twenty numbers, so unequally steep that no iteration is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.ones(20))


def worker(*, slowness: float) -> None:
    """One worker, whose computing is a pause."""
    steepness = torch.logspace(0, 2, 20)

    def loss_of(model: Bowl, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(len(batch[0]) * SECONDS_AN_EXAMPLE * slowness)
        return (steepness * model.numbers**2).sum() + 0 * batch[0].mean()

    dataset = torch.utils.data.TensorDataset(torch.zeros(EXAMPLES))
    pyps_client.sandblaster(Bowl(), None, dataset, loss_of=loss_of, batch_size=EXAMPLES)


if __name__ == "__main__":
    sys.exit(main())
