"""How fast is the arithmetic on vectors, against memory itself and against numpy and torch?

One thread, 8.4 million parameters in shards, 21 vectors of them: what L-BFGS with a history of ten needs. Each
operation has its milliseconds; the share of what a plain loop moves a second (each vector read or written counts once;
the loop reads two arrays, writes one of them, and does one addition); and its speed in multiples of numpy's and of
torch's.

numpy and torch calculate in float32, the kernels in float64 with the same bits on every machine. Where those have no
such operation they take one step a vector, as one would write it; the table of all products is one product of matrices.

In each round every contender makes one pass over all shards, in an order that turns from round to round; the table
shows medians over the rounds, and medians of the ratios within a round. `--time cpu` counts the thread's own time, for
a machine that others use as well.

    python benchmarks/vectors.py [--rounds 15] [--quick] [--shard-size 1047552] [--isa avx2] [--time cpu]
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from kernel import CLOCKS, QUICK_ROUNDS, Contender, Seconds, measure, milliseconds, processor, speed
from measure import write_results
from threadpoolctl import threadpool_limits

from pyps import _kernels
from pyps.core.arrays import aligned_zeros
from pyps_wire.partition import DEFAULT_SHARD_SIZE

NUM_PARAMETERS = 8_380_416
NUM_VECTORS = 21
NUM_STAGES = 10
A = 1e-3
LOOP = "the bandwidth loop"
# What the bandwidth loop moves of a parameter: two arrays read, one written.
LOOP_BYTES = 12


class Shard:
    """A shard's part of all vectors: rows of one matrix, so that all contenders share the memory."""

    def __init__(self, size: int, random: np.random.Generator) -> None:
        self.matrix = aligned_zeros(NUM_VECTORS * size).reshape(NUM_VECTORS, size)
        self.matrix[:] = random.standard_normal(self.matrix.shape, np.float32)
        self.z = aligned_zeros(size)
        self.vectors = list(self.matrix)
        self.x, self.y = self.vectors[:2]
        self.scalars = np.full(NUM_VECTORS, A, np.float32)
        self.torch_z = torch.from_numpy(self.z)
        self.torch_matrix = torch.from_numpy(self.matrix)
        self.torch_vectors = list(self.torch_matrix)
        self.torch_x, self.torch_y = self.torch_vectors[:2]


Work = Callable[[Shard], object]


class Contest(NamedTuple):
    """One operation, three times, and the bytes of a parameter that it reads or writes."""

    bytes_moved: int
    own: Work
    numpy: Work
    torch: Work


def numpy_move(s: Shard) -> None:
    np.multiply(s.y, A, out=s.z)
    np.add(s.z, s.x, out=s.z)


def numpy_combine(s: Shard) -> None:
    s.z.fill(0)
    for scalar, vector in zip(s.scalars, s.vectors, strict=True):
        s.z += scalar * vector


def torch_combine(s: Shard) -> None:
    s.torch_z.zero_()
    for vector in s.torch_vectors:
        s.torch_z.add_(vector, alpha=A)


def numpy_fold(s: Shard) -> None:
    np.copyto(s.z, s.vectors[0])
    for vector in s.vectors[1:NUM_STAGES]:
        s.z += vector
    s.z /= 60_000


def torch_fold(s: Shard) -> None:
    s.torch_z.copy_(s.torch_vectors[0])
    for vector in s.torch_vectors[1:NUM_STAGES]:
        s.torch_z.add_(vector)
    s.torch_z.div_(60_000)


CONTESTS = {
    "copy": Contest(
        8,
        lambda s: _kernels.vector_copy(s.z, s.x),
        lambda s: np.copyto(s.z, s.x),
        lambda s: s.torch_z.copy_(s.torch_x),
    ),
    "move": Contest(
        12,
        lambda s: _kernels.vector_move(s.z, s.x, A, s.y),
        numpy_move,
        lambda s: torch.add(s.torch_x, s.torch_y, alpha=A, out=s.torch_z),
    ),
    "dot": Contest(
        8,
        lambda s: _kernels.vector_dot(s.x, s.y),
        lambda s: np.dot(s.x, s.y),
        lambda s: torch.dot(s.torch_x, s.torch_y),
    ),
    "norm1": Contest(
        4,
        lambda s: _kernels.vector_norm1(s.x),
        lambda s: np.abs(s.x).sum(),
        lambda s: torch.linalg.vector_norm(s.torch_x, 1),
    ),
    "norm_inf": Contest(
        4,
        lambda s: _kernels.vector_norm_inf(s.x),
        lambda s: np.abs(s.x).max(),
        lambda s: torch.linalg.vector_norm(s.torch_x, torch.inf),
    ),
    f"combine {NUM_VECTORS}": Contest(
        4 * (NUM_VECTORS + 1),
        lambda s: _kernels.vector_combine(s.z, [A] * NUM_VECTORS, s.vectors),
        numpy_combine,
        torch_combine,
    ),
    f"fold {NUM_STAGES}": Contest(
        4 * (NUM_STAGES + 1),
        lambda s: _kernels.vector_fold(s.z, s.vectors[:NUM_STAGES], 60_000),
        numpy_fold,
        torch_fold,
    ),
    f"gram {NUM_VECTORS}": Contest(
        4 * NUM_VECTORS,
        lambda s: _kernels.vector_gram(s.vectors, s.vectors),
        lambda s: s.matrix @ s.matrix.T,
        lambda s: s.torch_matrix @ s.torch_matrix.T,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--shard-size", type=int, default=DEFAULT_SHARD_SIZE, help="parameters of a shard")
    parser.add_argument("--isa", choices=_kernels.available(), default=_kernels.isa())
    parser.add_argument("--time", choices=CLOCKS, default="wall", help="what is counted")
    parser.add_argument("--json", type=Path, help="also write every operation's figures here")
    options = parser.parse_args()
    if options.quick:
        options.rounds = QUICK_ROUNDS
    _kernels.select(options.isa)
    torch.set_num_threads(1)

    text = [header(options)]
    print(text[0], flush=True)
    random = np.random.default_rng(0)
    whole, rest = divmod(NUM_PARAMETERS, options.shard_size)
    shards = [Shard(size, random) for size in [options.shard_size] * whole + [rest] * (rest > 0)]
    with threadpool_limits(1):
        seconds = measure(contenders(shards, CLOCKS[options.time]), options.rounds)
    text.append(table(seconds))
    print(f"\n{text[1]}")
    write_results(options.json, rows(seconds), quick=options.quick, isa=options.isa, text="\n\n".join(text))


def contenders(shards: list[Shard], clock: Callable[[], float]) -> dict[str, Contender]:
    def contender(work: Work) -> Contender:
        def run() -> float:
            start = clock()
            for shard in shards:
                work(shard)
            return clock() - start

        return run

    found = {LOOP: contender(lambda s: _kernels.bandwidth([s.z], s.x.data))}
    for name, contest in CONTESTS.items():
        for who in ("own", "numpy", "torch"):
            found[f"{name} {who}"] = contender(getattr(contest, who))
    return found


def rows(seconds: Seconds) -> list[dict[str, Any]]:
    """A row an operation: milliseconds, its share of the bandwidth loop, its speed in multiples of the others'."""
    found = []
    for name, contest in CONTESTS.items():
        own = seconds[f"{name} own"]
        share = speed(own, seconds[LOOP]) * contest.bytes_moved / LOOP_BYTES
        others = {f"of_{who}": speed(own, seconds[f"{name} {who}"]) for who in ("numpy", "torch")}
        found.append({"subject": name, "ms": milliseconds(own), "share": share, **others})
    return found


def header(options: argparse.Namespace) -> str:
    return (
        f"{processor()}; {platform.system()} {platform.machine()}; {_kernels.isa()}; one thread\n"
        f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}\n"
        f"{NUM_PARAMETERS:,} parameters in shards of {options.shard_size:,}; medians of {options.rounds} rounds,"
        f" {options.time} time"
    )


def table(seconds: Seconds) -> str:
    loop = milliseconds(seconds[LOOP])
    lines = [
        f"{LOOP}: {loop:.1f} ms, {LOOP_BYTES * NUM_PARAMETERS / loop / 1e6:.1f} GB/s",
        "",
        f"{'':16} {'ms':>7} {'share of the loop':>18} {'of numpy':>10} {'of torch':>10}",
    ]
    for row in rows(seconds):
        figures = f"{row['share']:18.2f} {row['of_numpy']:10.2f} {row['of_torch']:10.2f}"
        lines.append(f"{row['subject']:16} {row['ms']:7.1f} {figures}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
