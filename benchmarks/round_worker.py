"""One worker of benchmarks/rounds.py: rewrites its gradient, steps, and prints its timings as one JSON line.

The model is `--keys` equal tensors in the torch parameters of an ordinary module, trained through RemoteOptimizer,
so that a round costs what it costs a user: gradient into the buffers, push, update, pull, new values in the
module's own parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time

import torch

from pyps_client import RemoteOptimizer

LEARNING_RATE = 0.01
EPSILON = 1e-10


class Tensors(torch.nn.Module):
    """`keys` vectors of `parameters / keys` numbers, all zero."""

    def __init__(self, parameters: int, keys: int):
        super().__init__()
        size = parameters // keys
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for _ in range(keys))


def gradients(parameters: int, keys: int) -> list[torch.Tensor]:
    """The same small random gradient for every worker; first and last numbers known, to be checked at the end."""
    flat = torch.empty(parameters).normal_(generator=torch.Generator().manual_seed(0)) * 0.01
    flat[0], flat[-1] = 0.01, -0.02
    return [part.clone() for part in flat.split(parameters // keys)]


def expected(gradient: float, updates: int) -> float:
    """Where a parameter that starts at 0 ends after Adagrad updates with one gradient."""
    return -sum(
        LEARNING_RATE * gradient / (math.sqrt(n * gradient * gradient) + EPSILON) for n in range(1, updates + 1)
    )


def wait_for_line(line: str) -> None:
    """Blocks until the driver says `line`: the barrier between warm-up, timing and the end."""
    if sys.stdin.readline().strip() != line:
        raise SystemExit(f"expected {line!r} from the driver")


def main() -> None:
    arguments = argparse.ArgumentParser()
    for name in ("--params", "--keys", "--rounds", "--warmup"):
        arguments.add_argument(name, type=int, required=True)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    model = Tensors(options.params, options.keys)
    optimizer = RemoteOptimizer(model, torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, eps=EPSILON))
    source = gradients(options.params, options.keys)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)

    def step() -> None:
        for parameter, values in zip(model.parameters(), source, strict=True):
            parameter.grad.copy_(values)
        optimizer.step()

    for _ in range(options.warmup):
        step()
    print("ready", flush=True)
    wait_for_line("go")
    cpu_before = resource.getrusage(resource.RUSAGE_SELF)
    latencies = []
    begin = time.perf_counter()
    for _ in range(options.rounds):
        before = time.perf_counter()
        step()
        latencies.append(time.perf_counter() - before)
    end = time.perf_counter()
    cpu_after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "begin": begin,
                "end": end,
                "latencies": latencies,
                "cpu": cpu_after.ru_utime + cpu_after.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime,
            }
        ),
        flush=True,
    )
    # Everybody's rounds are done: one more, and the first and last parameters must be where the formula says.
    wait_for_line("finish")
    step()
    first, last = next(model.parameters())[0].item(), list(model.parameters())[-1][-1].item()
    updates = round(optimizer.global_step)
    verified = math.isclose(first, expected(0.01, updates), rel_tol=2e-3) and math.isclose(
        last, expected(-0.02, updates), rel_tol=2e-3
    )
    print(json.dumps({"verified": verified, "updates": updates}), flush=True)
    optimizer.close()


if __name__ == "__main__":
    main()
