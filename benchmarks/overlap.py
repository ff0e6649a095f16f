"""How much of the communication does overlap="backward" hide, where the computation takes as long?

    python benchmarks/overlap.py [--rates 1gbit] [--repeats 3] [--quick]      (as root)

One worker of the big model, float32, over a link between two network namespaces (`network.py`). First its rounds are
timed without any computation; then steps whose backward pass takes as long as a round did, once with overlap="off"
and once with "backward". Computing is waiting here, tensor by tensor, as for a device that takes no processor from the
exchange; and it is all in the backward pass: what a forward pass takes, nothing hides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import exit_on_sigterm, machine, spread, wait_for_line, write_results
from network import Link, unavailable
from rich.console import Console
from rich.table import Table
from round_worker import EPSILON, LEARNING_RATE, Tensors, gradients, timed, verified
from trial import GRPC, LANE, Failed, Server, Variant, Workers
from work import BIG

from pyps_client import RemoteOptimizer

SUBJECTS = (LANE, GRPC)
WANTED = 1.15

Row = dict[str, Any]


def main() -> int:
    options = arguments()
    if options.compute is not None:
        work(options.overlap, options.compute, options.rounds)
        return 0
    console = Console(width=150)
    exit_on_sigterm()
    print(machine(), flush=True)
    if reason := unavailable():
        console.print(f"overlap: skipped, {reason}")
        write_results(options.json, [], skipped=reason)
        return 0
    rows: list[Row] = []
    for rate in options.rates.split(","):
        with Link(rate) as link:
            for repeat in range(1 if options.quick else options.repeats):
                for variant in SUBJECTS[:: 1 if repeat % 2 == 0 else -1]:
                    row: Row = {"rate": rate, "subject": variant.name}
                    try:
                        row |= measured(variant, link, 2 if options.quick else options.rounds)
                    except Failed as error:
                        print(f"{variant.name}, {rate}: {error}", file=sys.stderr)
                        row["error"] = str(error)
                    rows.append(row)
                    # After each, so that an end midway loses one only.
                    write_results(options.json, rows, quick=options.quick)
        console.print(table(rate, [row for row in rows if row["rate"] == rate]))
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1gbit", help="speeds of the link, as `tc` writes them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="each way once, for two steps")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    # Of the worker, which this script starts.
    parser.add_argument("--compute", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--overlap", default="off", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(variant: Variant, link: Link, rounds: int) -> Row:
    """Seconds of a step, median over the rounds: without computing, and with as much, waited for or overlapped."""
    exchange, _ = step_seconds(variant, link, "off", 0.0, rounds)
    waited, computing = step_seconds(variant, link, "off", exchange, rounds)
    overlapped, _ = step_seconds(variant, link, "backward", exchange, rounds)
    longer = max(exchange, computing)
    return {"longer_s": longer, "exchange_s": exchange, "off_s": waited, "backward_s": overlapped}


def step_seconds(variant: Variant, link: Link, overlap: str, compute: float, rounds: int) -> tuple[float, float]:
    """The median step of a worker and a server of their own, and its backward pass. Raises Failed."""
    command = [sys.executable, __file__, "--overlap", overlap, "--compute", str(compute), "--rounds", str(rounds)]
    with Server((), link) as server, Workers(command, server, variant, 1, link) as workers:
        workers.wait_until_ready()
        [timing] = workers.send("go")
        if not workers.send("finish")[0]["verified"]:
            raise Failed("the parameters are not where the formula says")
    return statistics.median(timing["latencies"]), statistics.median(timing["computing"])


def table(rate: str, rows: list[Row]) -> Table:
    """One row a transport, next to the longer of computing and exchanging, which take about the same time."""
    drawn = Table(title=f"{rate} each way: {BIG.params:,} parameters, float32, 1 worker", title_justify="left")
    drawn.add_column("")
    for heading in (
        "the longer, s",
        'overlap="off", of that',
        f'overlap="backward", of that (wanted: {WANTED} at most)',
    ):
        drawn.add_column(heading, justify="right")
    for name in dict.fromkeys(row["subject"] for row in rows):
        found = [row for row in rows if row["subject"] == name and "error" not in row]
        ratios = (spread([row[column] / row["longer_s"] for row in found], 2) for column in ("off_s", "backward_s"))
        drawn.add_row(name, spread([row["longer_s"] for row in found], 2), *ratios)
    return drawn


class Layer(torch.autograd.Function):
    """Passes its input on; its backward pass takes so many seconds, and gives a parameter its gradient."""

    @staticmethod
    def forward(
        context: Any, state: torch.Tensor, parameter: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        context.of = gradient, seconds
        return state.clone()

    @staticmethod
    def backward(context: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        gradient, seconds = context.of
        time.sleep(seconds)
        return state, gradient, None, None


def work(overlap: str, compute: float, rounds: int) -> None:
    """The worker: takes its steps when the driver says so, and prints how long each took."""
    torch.set_num_threads(1)
    model = Tensors(BIG.params, BIG.keys)
    source = gradients(BIG.params, BIG.keys)
    rule = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    optimizer = RemoteOptimizer(model, rule, overlap=overlap, rescales_gradients=False)
    computing: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        state = torch.zeros(1, requires_grad=True)
        for parameter, gradient in zip(model.layers, source, strict=True):
            state = Layer.apply(state, parameter, gradient, compute / BIG.keys)  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        state.sum().backward()  # type: ignore[no-untyped-call]
        computing.append(time.perf_counter() - began)
        optimizer.step()

    step()
    print("ready", flush=True)
    wait_for_line("go")
    print(json.dumps(timed(step, rounds) | {"computing": computing[1:]}), flush=True)
    wait_for_line("finish")
    step()
    updates = round(optimizer.global_step)
    print(json.dumps({"verified": verified(model, updates)}), flush=True)
    optimizer.close()


if __name__ == "__main__":
    sys.exit(main())
