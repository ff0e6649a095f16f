"""How fast are the kernels, against memory itself and against torch's own Adagrad?

One thread, 25.6 million parameters in shards of 1,047,552. In each round every contender makes one pass
over all shards, in an order that turns from round to round; the table shows the medians over the rounds
and the medians of the ratios within a round. Ours include the finite guard: a scan of a shard's whole
payload before anything of that shard is written.

    python benchmarks/kernel.py [--rounds 15] [--isa avx2]
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from pyps import _kernels

NUM_PARAMETERS = 25_600_000
SHARD_SIZE = 1_047_552
RATE, EPS = 0.01, 1e-10
CODECS = {"float32": _kernels.FLOAT32, "float16": _kernels.FLOAT16, "bfloat16": _kernels.BFLOAT16}

Contender = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", choices=_kernels.available(), default=_kernels.isa())
    options = parser.parse_args()
    _kernels.select(options.isa)
    torch.set_num_threads(1)

    contenders = make_contenders()
    for run in contenders.values():
        run()
    print_header(options.rounds)
    print_table(measure(contenders, options.rounds))


def make_contenders() -> dict[str, Contender]:
    sizes = [SHARD_SIZE] * (NUM_PARAMETERS // SHARD_SIZE) + [NUM_PARAMETERS % SHARD_SIZE]
    random = np.random.default_rng(0)
    gradients = [random.standard_normal(size, np.float32) for size in sizes]
    encoded = {
        name: [_kernels.encode(gradient, codec) for gradient in gradients] for name, codec in CODECS.items()
    }
    # All of ours, and the bandwidth loop, share these: equal memory, equal pages.
    parameters = [np.zeros(size, np.float32) for size in sizes]
    accumulators = [np.zeros(size, np.float32) for size in sizes]

    def bandwidth() -> None:
        for p, a, g in zip(parameters, accumulators, encoded["float32"], strict=True):
            _kernels.bandwidth(p, a, g)

    def adagrad(name: str, guard: bool) -> None:
        codec = CODECS[name]
        for p, a, g in zip(parameters, accumulators, encoded[name], strict=True):
            if guard:
                assert _kernels.first_non_finite(g, codec) == -1
            _kernels.adagrad(p, a, g, codec, rate=RATE, eps=EPS)

    def sgd(name: str) -> None:
        codec = CODECS[name]
        for p, g in zip(parameters, encoded[name], strict=True):
            assert _kernels.first_non_finite(g, codec) == -1
            _kernels.sgd(p, g, codec, rate=RATE)

    contenders: dict[str, Contender] = {"bandwidth loop": bandwidth}
    contenders["adagrad float32, no guard"] = partial(adagrad, "float32", False)
    for name in CODECS:
        contenders[f"guard + adagrad {name}"] = partial(adagrad, name, True)
    for name in CODECS:
        contenders[f"guard + sgd {name}"] = partial(sgd, name)
    contenders["torch Adagrad, fused"] = torch_adagrad(gradients, fused=True)
    contenders["torch Adagrad, foreach"] = torch_adagrad(gradients, foreach=True)
    return contenders


def torch_adagrad(gradients: list[np.ndarray], **implementation: bool) -> Contender:
    parameters = [torch.zeros(gradient.size, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient)
    optimizer = torch.optim.Adagrad(parameters, lr=RATE, eps=EPS, **implementation)
    return optimizer.step


def measure(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def print_header(rounds: int) -> None:
    print(f"{processor()}; {platform.system()} {platform.machine()}; {_kernels.isa()}; one thread")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}")
    print(f"{NUM_PARAMETERS:,} parameters in shards of {SHARD_SIZE:,}; medians of {rounds} rounds")
    print()


def print_table(seconds: dict[str, list[float]]) -> None:
    print(f"{'':28} {'ms':>7} {'ns/parameter':>13} {'speed: of bandwidth loop':>25} {'of torch fused':>15}")
    for name, own in seconds.items():
        median = statistics.median(own)
        of_bandwidth = speed(own, seconds["bandwidth loop"])
        of_torch = speed(own, seconds["torch Adagrad, fused"])
        print(
            f"{name:28} {median * 1e3:7.1f} {median / NUM_PARAMETERS * 1e9:13.3f}"
            f" {of_bandwidth:25.2f} {of_torch:15.2f}"
        )


def speed(own: list[float], other: list[float]) -> float:
    """Returns how many times as fast as the other; above 1 is faster."""
    return statistics.median(theirs / mine for mine, theirs in zip(own, other, strict=True))


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
