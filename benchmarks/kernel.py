"""How fast are the kernels, against memory itself and against torch's own Adagrad?

The second table has every rule, alone and over the mean of four float32 gradients: how many bytes a second
it moves, and how much that is of what a bandwidth loop over the same number of arrays moves.

One thread, 25.6 million parameters in shards. In each round every contender makes one pass over all shards,
in an order that turns from round to round; the table shows the medians over the rounds and the medians of
the ratios within a round. The guard is the scan of a shard's whole payload for NaN before anything of that
shard is written; it reads a fifth more bytes than the bandwidth loop moves. "Received" means that the
payload was copied just before, outside the time, as it is when gRPC hands over a message.

    python benchmarks/kernel.py [--rounds 15] [--shard-size 1047552] [--isa avx2]
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pyps import _kernels
from pyps.core.update_rules import RULES, UpdateRule, WeightedGradient, validate

NUM_PARAMETERS = 25_600_000
RATE, EPS = 0.01, 1e-10
CODECS = {"float32": _kernels.FLOAT32, "float16": _kernels.FLOAT16, "bfloat16": _kernels.BFLOAT16}

# Makes one pass over all shards and returns the seconds that it took.
Contender = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shard-size", type=int, default=1_047_552, help="parameters of a shard")
    parser.add_argument("--isa", choices=_kernels.available(), default=_kernels.isa())
    options = parser.parse_args()
    _kernels.select(options.isa)
    torch.set_num_threads(1)

    print_header(options.shard_size, options.rounds)
    print_table(measure(make_contenders(options.shard_size), options.rounds))
    print()
    print_rules(measure(make_rules(options.shard_size), options.rounds))


def make_contenders(shard_size: int) -> dict[str, Contender]:
    sizes = shard_sizes(shard_size)
    gradients = make_gradients(sizes)
    payloads = {name: [_kernels.encode(gradient, codec) for gradient in gradients] for name, codec in CODECS.items()}
    # All of ours, and the bandwidth loop, share these: equal memory, equal pages.
    parameters = [np.zeros(size, np.float32) for size in sizes]
    accumulators = [np.zeros(size, np.float32) for size in sizes]

    def each_shard(update: Callable[..., None], codec: str, received: bool = False) -> Contender:
        def run() -> float:
            seconds = 0.0
            for p, a, payload in zip(parameters, accumulators, payloads[codec], strict=True):
                g = bytes(memoryview(payload)) if received else payload
                start = time.perf_counter()
                update(p, a, g, CODECS[codec])
                seconds += time.perf_counter() - start
            return seconds

        return run

    contenders = {
        "bandwidth loop": each_shard(bandwidth, "float32"),
        "adagrad float32": each_shard(adagrad, "float32"),
    }
    for codec in CODECS:
        contenders[f"guard + adagrad {codec}"] = each_shard(guarded_adagrad, codec)
    contenders["the same, float32 received"] = each_shard(guarded_adagrad, "float32", received=True)
    for codec in CODECS:
        contenders[f"guard + sgd {codec}"] = each_shard(guarded_sgd, codec)
    contenders["torch Adagrad, fused"] = torch_adagrad(gradients, fused=True)
    contenders["torch Adagrad, foreach"] = torch_adagrad(gradients, foreach=True)
    return contenders


def make_rules(shard_size: int) -> dict[str, Contender]:
    """Returns the bandwidth loops over one, two and three arrays, and every rule over one and four gradients."""
    sizes = shard_sizes(shard_size)
    gradients = make_gradients(sizes)
    # Shared by all: equal memory, equal pages.
    arrays = [[np.zeros(size, np.float32) for size in sizes] for _ in range(3)]

    def bandwidth_loop(num_arrays: int) -> Contender:
        return timed(arrays[:num_arrays], gradients, lambda own, g: _kernels.bandwidth(own, g[0].data), num_gradients=1)

    contenders = {bandwidth_name(num): bandwidth_loop(num) for num in (1, 2, 3)}
    for name, rule in RULES.items():
        for num_gradients, text in ((1, name), (4, f"{name}, mean of 4")):
            own = arrays[: 1 + len(rule.slot_names)]
            contenders[text] = timed(own, gradients, update_of(rule), num_gradients=num_gradients)
    return contenders


def bandwidth_name(num_arrays: int) -> str:
    return f"bandwidth loop, {num_arrays} array{'s' * (num_arrays > 1)}"


def update_of(rule: UpdateRule) -> Callable[[list[np.ndarray], list[np.ndarray]], None]:
    settings = validate(rule, {})

    def update(own: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        slots = dict(zip(rule.slot_names, own[1:], strict=True))
        weighted = [WeightedGradient(g.data, _kernels.FLOAT32, 1.0 / len(gradients)) for g in gradients]
        rule.apply(own[0], slots, weighted, rate=RATE, version=10, hyperparameters=settings)

    return update


def timed(
    arrays: list[list[np.ndarray]],
    gradients: list[np.ndarray],
    update: Callable[[list[np.ndarray], list[np.ndarray]], None],
    *,
    num_gradients: int,
) -> Contender:
    """Returns a pass of `update` over all shards; the gradients beside a shard's own are other shards'."""

    def run() -> float:
        for slots in arrays[1:]:
            for slot in slots:
                slot.fill(1.0)
        seconds = 0.0
        for index, gradient in enumerate(gradients):
            equals = [g for g in gradients if g.size == gradient.size]
            summed = [gradient, *(equals[(index + k) % len(equals)] for k in range(1, num_gradients))]
            own = [shards[index] for shards in arrays]
            start = time.perf_counter()
            update(own, summed)
            seconds += time.perf_counter() - start
        return seconds

    return run


def shard_sizes(shard_size: int) -> list[int]:
    whole, rest = divmod(NUM_PARAMETERS, shard_size)
    return [shard_size] * whole + [rest] * (rest > 0)


def make_gradients(sizes: list[int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(size, np.float32) for size in sizes]


def bandwidth(p: np.ndarray, a: np.ndarray, g: bytes, codec: int) -> None:
    _kernels.bandwidth([p, a], g)


def adagrad(p: np.ndarray, a: np.ndarray, g: bytes, codec: int) -> None:
    _kernels.adagrad(p, a, [(g, codec, 1.0)], rate=RATE, eps=EPS)


def guarded_adagrad(p: np.ndarray, a: np.ndarray, g: bytes, codec: int) -> None:
    assert _kernels.first_non_finite(g, codec) == -1
    _kernels.adagrad(p, a, [(g, codec, 1.0)], rate=RATE, eps=EPS)


def guarded_sgd(p: np.ndarray, a: np.ndarray, g: bytes, codec: int) -> None:
    assert _kernels.first_non_finite(g, codec) == -1
    _kernels.sgd(p, [(g, codec, 1.0)], rate=RATE)


def torch_adagrad(gradients: list[np.ndarray], **implementation: bool) -> Contender:
    parameters = [torch.zeros(gradient.size, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient)
    optimizer = torch.optim.Adagrad(parameters, lr=RATE, eps=EPS, **implementation)

    def run() -> float:
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    return run


def measure(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(contenders[name]())
    return seconds


def print_header(shard_size: int, rounds: int) -> None:
    print(f"{processor()}; {platform.system()} {platform.machine()}; {_kernels.isa()}; one thread")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}")
    print(f"{NUM_PARAMETERS:,} parameters in shards of {shard_size:,}; medians of {rounds} rounds")
    print()


def print_table(seconds: dict[str, list[float]]) -> None:
    print(f"{'':28} {'ms':>7} {'ns/parameter':>13} {'speed: of bandwidth loop':>25} {'of torch fused':>15}")
    for name, own in seconds.items():
        median = statistics.median(own)
        of_bandwidth = speed(own, seconds["bandwidth loop"])
        of_torch = speed(own, seconds["torch Adagrad, fused"])
        print(
            f"{name:28} {median * 1e3:7.1f} {median / NUM_PARAMETERS * 1e9:13.3f} {of_bandwidth:25.2f} {of_torch:15.2f}"
        )


def print_rules(seconds: dict[str, list[float]]) -> None:
    print(f"{'':28} {'ms':>7} {'ns/parameter':>13} {'GB/s':>7} {'of bandwidth loop':>18}")
    for name, rule in RULES.items():
        num_arrays = 1 + len(rule.slot_names)
        for text, num_gradients in ((name, 1), (f"{name}, mean of 4", 4)):
            own, loop = seconds[text], seconds[bandwidth_name(num_arrays)]
            # Each array is read and written, each gradient read.
            bytes_moved, bytes_of_loop = 8 * num_arrays + 4 * num_gradients, 8 * num_arrays + 4
            nanoseconds = statistics.median(own) / NUM_PARAMETERS * 1e9
            print(
                f"{text:28} {statistics.median(own) * 1e3:7.1f} {nanoseconds:13.3f}"
                f" {bytes_moved / nanoseconds:7.1f} {speed(own, loop) * bytes_moved / bytes_of_loop:18.2f}"
            )


def speed(own: list[float], other: list[float]) -> float:
    """Returns how many times as fast as the other; above 1 is faster."""
    return statistics.median(theirs / mine for mine, theirs in zip(own, other, strict=True))


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
