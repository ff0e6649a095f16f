"""A model larger than any message: one SGD step on 4.5 GB of float32 over gRPC, with messages of 4 MiB at most.

    python benchmarks/huge.py [--params 1125000000]

Protobuf ends at 2 GiB a message, and gRPC takes 4 MiB by default. Here the server is configured to take no more
than those 4 MiB in a message, either way, and refuses what is longer: the step succeeds only because no message grows
with the model. Needs 22 GiB of memory: server and worker hold the parameters, the worker a gradient too. A tenth of the
model comes first, and shows what each process takes: where the whole would take more than is free, it is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import (
    available_memory_bytes,
    cpu_seconds,
    exit_on_sigterm,
    machine,
    machine_memory_bytes,
    memory_bytes,
    wait_for_line,
    write_results,
)
from rich.console import Console
from trial import GRPC, Failed, Server, Workers

PARAMS = 1_125_000_000
KEYS = 250
MEMORY_GIB = 22
TRIAL_SHARE = 10
# What the rest of the machine, and the pages of its files, are left.
SPARE_MB = 500
MESSAGE_BYTES_MAX = 4 * 2**20
LEARNING_RATE = 0.5
# One gradient for all: exact in float32, and so is the step.
GRADIENT = 0.25


def main() -> int:
    options = arguments()
    if options.worker:
        return worker(options.params)
    console = Console(width=150)
    exit_on_sigterm()
    print(machine(), flush=True)
    # Should memory end in spite of all, then these processes do, and nothing else of the machine's.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    needed = MEMORY_GIB * 2**30 * options.params / PARAMS
    if (memory := machine_memory_bytes()) < needed:
        return skip(options, f"{memory / 2**30:.1f} GiB of memory, needs {needed / 2**30:.0f}")
    try:
        tenth = measure(options.params // TRIAL_SHARE // KEYS * KEYS)
        console.print(sentence(tenth), highlight=False)
        server_mb, worker_mb = (expected_peak_mb(tenth, side, options.params) for side in ("server", "worker"))
        words = f"{server_mb / 1e3:.1f} GB in the server and {worker_mb / 1e3:.1f} GB in the worker"
        print(f"The whole is expected to take {words} at its peak.", flush=True)
        free_mb = available_memory_bytes() / 1e6
        if server_mb + worker_mb + SPARE_MB > free_mb:
            return skip(options, f"it would take {words}, and {free_mb / 1e3:.1f} GB are free")
        row = measure(options.params) | {"expected_server_peak_mb": server_mb, "expected_worker_peak_mb": worker_mb}
    except Failed as error:
        print(f"huge: failed: {error}", file=sys.stderr)
        failed = {"subject": GRPC.name, "params": options.params, "error": str(error)}
        write_results(options.json, [failed], message_bytes_max=MESSAGE_BYTES_MAX)
        return 1
    console.print(sentence(row), highlight=False)
    write_results(options.json, [row], message_bytes_max=MESSAGE_BYTES_MAX)
    return 0 if row["verified"] else 1


def skip(options: argparse.Namespace, reason: str) -> int:
    """Says why it is not measured."""
    print(f"huge: skipped, {reason}")
    write_results(options.json, [], skipped=reason)
    return 0


def expected_peak_mb(tenth: dict[str, Any], side: str, params: int) -> float:
    """A side's peak with the whole model, all that grew with the tenth growing on."""
    base = float(tenth[f"{side}_base_mb"])
    return base + (float(tenth[f"{side}_peak_mb"]) - base) * params / int(tenth["params"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=PARAMS, help=f"a multiple of {KEYS}")
    parser.add_argument("--json", type=Path, help="also write the measurement here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(params: int) -> dict[str, Any]:
    """The step, in processes of their own. Raises Failed."""
    command = [sys.executable, __file__, "--worker", "--params", str(params)]
    flags = ["--max-message-bytes", str(MESSAGE_BYTES_MAX)]
    with Server(flags) as server, Workers(command, server, GRPC, 1) as workers:
        workers.wait_until_ready()
        cpu_before = cpu_seconds(server.pid)
        (reported,) = workers.send("go")
        return {
            "subject": GRPC.name,
            "params": params,
            "server_base_mb": server.base_bytes / 1e6,
            "server_cpu_s_per_gb": (cpu_seconds(server.pid) - cpu_before) / (params * 8 / 1e9),
            "server_peak_mb": memory_bytes(server.pid, "VmHWM") / 1e6,
            **reported,
        }


def sentence(row: dict[str, Any]) -> str:
    """The measurement in words."""
    gigabytes = row["params"] * 4 / 1e9
    right = "every parameter is where it should be" if row["verified"] else "NOT EVERY PARAMETER IS WHERE IT SHOULD BE"
    return (
        f"{row['params']:,} parameters, {gigabytes:.2f} GB, in messages of at most {MESSAGE_BYTES_MAX >> 20} MiB: "
        f"joined in {row['join_s']:.1f} s, one SGD step in {row['step_s']:.1f} s "
        f"({2 * gigabytes / row['step_s']:.2f} GB/s, both ways together); {right}; "
        f"peak memory {row['server_peak_mb'] / 1e3:.1f} GB server, {row['worker_peak_mb'] / 1e3:.1f} GB worker"
    )


def worker(params: int) -> int:
    """The worker: joins, fills its gradient, makes one step, and looks at every parameter."""
    import round_worker

    from pyps_client import RemoteOptimizer, install_process_hooks

    install_process_hooks()
    torch.set_num_threads(1)
    base = memory_bytes(os.getpid(), "VmRSS")
    began = time.perf_counter()
    # Zeros without a write take no memory.
    model = round_worker.Tensors(params, KEYS)
    optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    joined = time.perf_counter()
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    # Moves those that are there into the optimizer's memory.
    optimizer.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(GRADIENT)
    print("ready", flush=True)
    wait_for_line("go")
    before, cpu_before = time.perf_counter(), cpu_seconds(os.getpid())
    optimizer.step()
    after, cpu_after = time.perf_counter(), cpu_seconds(os.getpid())
    moved = -LEARNING_RATE * GRADIENT
    reported = {
        "join_s": joined - began,
        "step_s": after - before,
        "worker_cpu_s_per_gb": (cpu_after - cpu_before) / (params * 8 / 1e9),
        "worker_base_mb": base / 1e6,
        "worker_peak_mb": memory_bytes(os.getpid(), "VmHWM") / 1e6,
        # Without a copy: the least and the largest.
        "verified": all(p.min().item() == moved and p.max().item() == moved for p in model.parameters()),
    }
    print(json.dumps(reported), flush=True)
    optimizer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
