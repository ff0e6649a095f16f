"""One worker of a measurement: rewrites its gradient, steps, and prints its timings as one JSON line.

The model is `--keys` equal tensors in the torch parameters of an ordinary module, trained through RemoteOptimizer,
so that a round costs what it costs a user: gradient into the buffers, push, update, pull, new values in the
module's own parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Callable

import torch
from measure import memory_bytes, pin, pinned_cores, wait_for_line

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
    return list(flat.reshape(keys, -1).unbind())


def stepping(model: Tensors, optimizer: RemoteOptimizer) -> Callable[[], None]:
    """A round: rewrites the whole gradient, in the optimizer's own views as the peers rewrite theirs, and steps."""
    parameters = list(model.parameters())
    source = gradients(sum(p.numel() for p in parameters), len(parameters))
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    # Moves those that are there into the optimizer's memory.
    optimizer.zero_grad(set_to_none=False)

    def step() -> None:
        for parameter, values in zip(parameters, source, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(values)
        optimizer.step()

    return step


def timed(step: Callable[[], None], rounds: int) -> dict[str, object]:
    """Times the rounds one by one."""
    cpu_before = resource.getrusage(resource.RUSAGE_SELF)
    latencies = []
    begin = time.perf_counter()
    for _ in range(rounds):
        before = time.perf_counter()
        step()
        latencies.append(time.perf_counter() - before)
    end = time.perf_counter()
    cpu_after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = cpu_after.ru_utime + cpu_after.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime
    peak = memory_bytes(os.getpid(), "VmHWM")
    return {"begin": begin, "end": end, "latencies": latencies, "cpu": cpu, "peak": peak}


def expected(gradient: float, updates: int) -> float:
    """Where a parameter that starts at 0 ends after Adagrad updates with one gradient."""
    return -sum(
        LEARNING_RATE * gradient / (math.sqrt(n * gradient * gradient) + EPSILON) for n in range(1, updates + 1)
    )


def verified(model: Tensors, updates: int, *, tolerance: float = 5e-3) -> bool:
    """Whether the first and the last parameter are where the formula says, but for that share."""
    parameters = list(model.parameters())
    first, last = parameters[0][0].item(), parameters[-1][-1].item()
    return all(
        math.isclose(value, expected(gradient, updates), rel_tol=tolerance)
        for value, gradient in ((first, 0.01), (last, -0.02))
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--params", "--keys", "--rounds", "--warmup"):
        arguments.add_argument(name, type=int, required=True)
    arguments.add_argument("--tolerance", type=float, required=True, help="how far from the formula one may end")
    arguments.add_argument("--pinned", action="store_true", help="stay on the workers' core")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if options.pinned:
        pin(os.getpid(), pinned_cores()[1])
    model = Tensors(options.params, options.keys)
    rule = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    optimizer = RemoteOptimizer(model, rule)
    step = stepping(model, optimizer)
    for _ in range(options.warmup):
        step()
    print("ready", flush=True)
    wait_for_line("go")
    print(json.dumps(timed(step, options.rounds)), flush=True)
    # Everybody's rounds are done: one more, after which the parameters hold a known number of updates.
    wait_for_line("finish")
    step()
    updates = round(optimizer.global_step)
    right = verified(model, updates, tolerance=options.tolerance)
    print(json.dumps({"verified": right, "updates": updates}), flush=True)
    optimizer.close()


if __name__ == "__main__":
    main()
