"""How stale are gradients of real workers, beside the law (L - 1)/c and beside virtual ones?

    python benchmarks/staleness.py [--gradients 2000] [--csv docs/experiments/live_staleness.csv]

L worker processes train over gRPC with one server process, all on this machine's cores, as fast as they can, under
n-softsync, whose updates are made of c = L/n gradients. Virtual workers have exponential times. A real run has other
bytes each time; the law does not.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import exit_on_sigterm, machine
from trial import GRPC

from pyps.cli.laboratory.measure import launched, status_of
from pyps.core.behaviour import Behaviour
from pyps.core.rule_settings import RuleSettings
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Simulation, WorkerPlan, exponential
from pyps_client import RemoteOptimizer
from pyps_wire.inspector_pb2 import Status

CASES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 8))
VIRTUAL_GRADIENTS = 20_000


def main() -> int:
    options = arguments()
    if options.worker:
        work()
    exit_on_sigterm()
    print(machine(), flush=True)
    rows = []
    for workers, n in CASES:
        rows.append({"workers": workers, "n": n, "law": (workers - 1) / (workers // n)})
        rows[-1] |= {"virtual": virtual(workers, n)} | live(workers, n, options.gradients)
        print(" ".join(f"{name} {value:g}" for name, value in rows[-1].items()), flush=True)
    if options.csv is not None:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=int, default=2000, help="of each case")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work() -> None:
    """Train until the process ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    images = torch.ones(4, 64)
    while True:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def live(workers: int, n: int, least: int) -> dict[str, Any]:
    """What a server counted between two moments, over so many gradients at least. Raises ServerUnavailable."""
    os.environ.update(GRPC.environment)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    with launched(command, workers=workers, flags={"protocol": f"softsync:n={n}"}) as (job, wait_until):
        wait_until(lambda: len(status_of(job).roster) == workers)
        before = counted(status_of(job))
        wait_until(lambda: counted(status_of(job))[0] >= before[0] + least)
        gradients, summed = (now - then for now, then in zip(counted(status_of(job)), before, strict=True))
    return {"live": round(summed / gradients, 4), "gradients": round(gradients)}


def counted(now: Status) -> tuple[float, float]:
    """How many gradients were taken, and the sum of their staleness."""
    taken = now.tally.pushes_applied + now.tally.pushes_pending
    return taken, now.tally.staleness_mean * taken


def virtual(workers: int, n: int) -> float:
    """The mean staleness in virtual time."""
    zero = np.zeros(1, np.float32)
    simulation = Simulation(
        [zero],
        RuleSettings.parse("sgd:learning_rate=1"),
        Behaviour.parse(protocol=f"softsync:n={n}"),
        [WorkerPlan(f"w{index}", exponential()) for index in range(workers)],
        lambda step: Computed({0: zero}),
        server=ServerPlan(expected_workers=workers),
    )
    simulation.run(pushes=VIRTUAL_GRADIENTS)
    return round(simulation.tally.staleness_mean, 4)


if __name__ == "__main__":
    sys.exit(main())
