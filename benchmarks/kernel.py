"""How fast are the kernels, against memory itself and against torch's own optimizers?

One thread, 25.6 million parameters in shards. The first table has each rule in the ways that the server calls it:

    alone            one gradient is applied
    + reply          the new parameters are also written to where the answer to the pusher is made
    + guard          the shard's gradient is scanned for NaN before anything of the shard is written
    + both           guard and reply: a push with an answer over gRPC
    + shared         the same over shared memory: scanned, then copied block by block and scanned again
    mean of 4        four gradients are summed and applied

Below the milliseconds of `alone` stand shares: how many bytes a second that moves, of what a plain loop over the same
arrays moves. Each array is read and written, each gradient read, twice with the guard, and the reply written. The
loop does one addition per array. The last column is the speed of `alone` in multiples of torch's fused optimizer.

The second table has Adagrad, guarded and answered, with gradients and replies of each codec. "Received" means that
the payload was copied just before, outside the time, as it is when gRPC hands over a message.

The third table has the codecs whose numbers share bytes: how many GB of float32 a second are encoded with the residual,
decoded inside an update without an answer, and, for the published copy, encoded as a difference and added. `decoded`
stands beside the same update by float32, and the loop over the same arrays.

In each round every contender makes one pass over all shards, in an order that turns from round to round; the tables
show medians over the rounds, and medians of the ratios within a round. `--time cpu` counts the thread's own time, for
a machine that others use as well.

    python benchmarks/kernel.py [--rounds 11] [--quick] [--shard-size 1047552] [--isa avx2] [--time cpu]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import write_results

from pyps import _kernels
from pyps.core.arrays import aligned_copy, aligned_zeros
from pyps.core.gradient import NATIVE, Reply
from pyps.core.rules import RULES, UpdateRule, validate
from pyps_wire.codecs import CODECS, FLOAT32, Codec
from pyps_wire.partition import DEFAULT_SHARD_SIZE

NUM_PARAMETERS = 25_600_000
QUICK_ROUNDS = 5
RATE = 0.01
# A message's payload begins at any byte.
REPLY_OFFSET = 13
# The codecs that write each number by itself.
WORDS = [codec for codec in NATIVE if codec.dtype is not None]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}

# Makes one pass over all shards and returns the seconds that it took.
Contender = Callable[[], float]
Seconds = dict[str, list[float]]


class Way(NamedTuple):
    """How the server calls a rule."""

    reply: Codec | None = None
    guard: bool = False
    volatile: bool = False
    num_gradients: int = 1
    codec: Codec = FLOAT32
    received: bool = False

    def bytes_moved(self, num_arrays: int) -> int:
        """Bytes per parameter."""
        gradients = self.codec.max_bytes(1) * (self.num_gradients + self.guard)
        return 8 * num_arrays + gradients + (self.reply.max_bytes(1) if self.reply else 0)


WAYS = {
    "alone": Way(),
    "+ reply": Way(FLOAT32),
    "+ guard": Way(guard=True),
    "+ both": Way(FLOAT32, guard=True),
    "+ shared": Way(FLOAT32, guard=True, volatile=True),
    "mean of 4": Way(num_gradients=4),
}
TORCH: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATE, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9, fused=True),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=RATE, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=RATE, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATE, fused=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--shard-size", type=int, default=DEFAULT_SHARD_SIZE, help="parameters of a shard")
    parser.add_argument("--isa", choices=_kernels.available(), default=_kernels.isa())
    parser.add_argument("--time", choices=CLOCKS, default="wall", help="what is counted")
    parser.add_argument("--json", type=Path, help="also write every rule's figures here")
    options = parser.parse_args()
    if options.quick:
        options.rounds = QUICK_ROUNDS
    _kernels.select(options.isa)
    torch.set_num_threads(1)

    text = [header(options)]
    print(text[0], flush=True)
    memory = Memory(options.shard_size, CLOCKS[options.time])
    rules = measure(rule_contenders(memory), options.rounds)
    text.append(rules_text(rules))
    print(f"\n{text[1]}", flush=True)
    text.append(codecs_text(measure(codec_contenders(memory), options.rounds)))
    print(f"\n{text[2]}")
    text.append(few_bits_text(measure(few_bits_contenders(memory), options.rounds)))
    print(f"\n{text[3]}")
    write_results(options.json, rows(rules), quick=options.quick, isa=options.isa, text="\n\n".join(text))


class Memory:
    """The arrays, gradients and replies that all contenders share: equal memory, equal pages."""

    def __init__(self, shard_size: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        whole, rest = divmod(NUM_PARAMETERS, shard_size)
        self.sizes = [shard_size] * whole + [rest] * (rest > 0)
        self.num_whole = whole
        self.arrays = [[aligned_zeros(size) for size in self.sizes] for _ in range(3)]
        self.replies = [memoryview(bytearray(REPLY_OFFSET + 4 * size)) for size in self.sizes]
        random = np.random.default_rng(0)
        self.gradients = [aligned_copy(random.standard_normal(size, np.float32)) for size in self.sizes]
        self._encoded: dict[Codec, list[bytes]] = {}

    def payloads(self, codec: Codec, shard: int, num: int) -> list[memoryview]:
        """Returns the shard's gradient and, behind it, others of the same length."""
        if codec not in self._encoded:
            self._encoded[codec] = [_kernels.encode(gradient, codec) for gradient in self.gradients]
        size = codec.max_bytes(self.sizes[shard])
        indices = [shard, *((shard + k) % self.num_whole for k in range(1, num))]
        return [memoryview(self._encoded[codec][index])[:size] for index in indices]

    def timed(self, update: Callable[[int], Callable[[], object]]) -> Contender:
        """Returns a pass over all shards; what `update(shard)` returns is timed, not what makes it."""

        def run() -> float:
            # A rule's speed depends on numbers too small for full precision: the slots begin alike.
            for slot in (slot for slots in self.arrays[1:] for slot in slots):
                slot.fill(1.0)
            seconds = 0.0
            for shard in range(len(self.sizes)):
                call = update(shard)
                start = self.clock()
                call()
                seconds += self.clock() - start
            return seconds

        return run


def bandwidth_loop(memory: Memory, num_arrays: int) -> Contender:
    def update(shard: int) -> Callable[[], object]:
        arrays = [shards[shard] for shards in memory.arrays[:num_arrays]]
        return lambda: _kernels.bandwidth(arrays, memory.gradients[shard].data)

    return memory.timed(update)


def rule_pass(memory: Memory, rule: UpdateRule, way: Way) -> Contender:
    settings = validate(rule, {})

    def update(shard: int) -> Callable[[], object]:
        payloads: list[bytes | memoryview] = [*memory.payloads(way.codec, shard, way.num_gradients)]
        if way.received:
            payloads[0] = bytes(payloads[0])
        gradients = [(payload, way.codec, 1.0 / way.num_gradients) for payload in payloads]
        slots = {name: memory.arrays[1 + index][shard] for index, name in enumerate(rule.slot_names)}
        bound = rule.bind(memory.arrays[0][shard], slots, settings)
        reply = Reply(memory.replies[shard], REPLY_OFFSET, way.reply) if way.reply else None

        def call() -> None:
            if way.guard:
                assert _kernels.first_non_finite(payloads[0], way.codec, memory.sizes[shard]) == -1
            bound.apply(gradients, rate=RATE, version=10, reply=reply, guarded=way.volatile)

        return call

    return memory.timed(update)


def torch_pass(memory: Memory, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Contender:
    parameters = [torch.zeros(size, requires_grad=True) for size in memory.sizes]
    for parameter, gradient in zip(parameters, memory.gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient)
    optimizer = make(parameters)

    def run() -> float:
        start = memory.clock()
        optimizer.step()
        return memory.clock() - start

    return run


def rule_contenders(memory: Memory) -> dict[str, Contender]:
    contenders = {loop_name(num): bandwidth_loop(memory, num) for num in (1, 2, 3)}
    for name, rule in RULES.items():
        contenders |= {f"{name} {text}": rule_pass(memory, rule, way) for text, way in WAYS.items()}
    return contenders | {f"torch {name}": torch_pass(memory, make) for name, make in TORCH.items()}


def codec_ways() -> dict[str, Way]:
    ways = {"the bandwidth loop": Way()}
    for codec in WORDS:
        for reply in (None, *WORDS):
            answer = f", reply {reply.name}" if reply else ""
            ways[f"{codec.name}{answer}"] = Way(reply, guard=True, codec=codec)
        ways[f"{codec.name}, received"] = Way(guard=True, codec=codec, received=True)
    return ways


def codec_contenders(memory: Memory) -> dict[str, Contender]:
    contenders = {name: rule_pass(memory, RULES["adagrad"], way) for name, way in codec_ways().items()}
    return contenders | {"the bandwidth loop": bandwidth_loop(memory, 2)}


FEW_BITS = [codec for codec in CODECS.values() if codec.stateful]


def few_bits_contenders(memory: Memory) -> dict[str, Contender]:
    contenders = {}
    for codec in (FLOAT32, *FEW_BITS):
        if codec in NATIVE:
            for rule in ("sgd", "adagrad"):
                contenders[f"{codec.name} {rule}"] = rule_pass(memory, RULES[rule], Way(codec=codec))
        if codec is not FLOAT32:
            contenders |= {f"{codec.name} {way}": coding(memory, codec, way) for way in CODINGS}
    return contenders | {f"loop {rule}": bandwidth_loop(memory, num) for num, rule in ((1, "sgd"), (2, "adagrad"))}


CODINGS = ("feedback", "difference", "add")


def coding(memory: Memory, codec: Codec, way: str) -> Contender:
    def update(shard: int) -> Callable[[], object]:
        values, held, lost = (memory.gradients[shard], *(arrays[shard] for arrays in memory.arrays[1:]))
        if way == "feedback":
            return lambda: codec.encode_feedback(values, held, lost)
        if way == "difference":
            return lambda: codec.encode_difference(values, held)
        payload = codec.encode(values)
        return lambda: codec.add_into(payload, held)

    return memory.timed(update)


def few_bits_text(seconds: Seconds) -> str:
    ways = ("sgd", "adagrad", *CODINGS)
    lines = [f"{'GB of float32 a second:':24}" + "".join(f"{way:>12}" for way in ways)]
    for name in ("loop", *(codec.name for codec in (FLOAT32, *FEW_BITS))):
        found = (seconds.get(f"{name} {way}") for way in ways)
        lines.append(f"{name:24}" + "".join(f"{speed_of(each):>12}" for each in found))
    return "\n".join(lines)


def speed_of(seconds: list[float] | None) -> str:
    return "" if seconds is None else f"{4 * NUM_PARAMETERS / statistics.median(seconds) / 1e9:.1f}"


def loop_name(num_arrays: int) -> str:
    return f"bandwidth loop, {num_arrays} array{'s' * (num_arrays > 1)}"


def measure(contenders: dict[str, Contender], rounds: int) -> Seconds:
    for run in contenders.values():
        run()
    seconds: Seconds = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(contenders[name]())
    return seconds


def header(options: argparse.Namespace) -> str:
    return (
        f"{processor()}; {platform.system()} {platform.machine()}; {_kernels.isa()}; one thread\n"
        f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}\n"
        f"{NUM_PARAMETERS:,} parameters in shards of {options.shard_size:,}; medians of {options.rounds} rounds,"
        f" {options.time} time"
    )


def rows(seconds: Seconds) -> list[dict[str, Any]]:
    """A row a rule: milliseconds alone, its shares of the bandwidth loop, its speed in multiples of torch's."""
    found = []
    for name, rule in RULES.items():
        loop, alone = seconds[loop_name(1 + len(rule.slot_names))], seconds[f"{name} alone"]
        shares = {text: share(seconds[f"{name} {text}"], loop, way, rule) for text, way in WAYS.items()}
        of_torch = speed(alone, seconds[f"torch {name}"]) if name in TORCH else None
        found.append({"subject": name, "ms": milliseconds(alone), "shares": shares, "of_torch": of_torch})
    return found


def rules_text(seconds: Seconds) -> str:
    lines = []
    for num_arrays in (1, 2, 3):
        loop = milliseconds(seconds[loop_name(num_arrays)])
        speed_of_loop = (8 * num_arrays + 4) * NUM_PARAMETERS / loop / 1e6
        lines.append(f"{loop_name(num_arrays)}: {loop:.1f} ms, {speed_of_loop:.1f} GB/s")
    headings = "".join(f"{text:>11}" for text in WAYS)
    lines += ["", f"{'share of the loop:':12} {'ms':>6}{headings}{'of torch':>10}"]
    for row in rows(seconds):
        torch_speed = f"{row['of_torch']:10.2f}" if row["of_torch"] is not None else ""
        shares = "".join(f"{value:11.2f}" for value in row["shares"].values())
        lines.append(f"{row['subject']:18} {row['ms']:6.1f}{shares}{torch_speed}")
    return "\n".join(lines)


def codecs_text(seconds: Seconds) -> str:
    lines = [f"{'guard + adagrad':36} {'ms':>6} {'share of the loop':>18}"]
    for name, way in codec_ways().items():
        of_loop = share(seconds[name], seconds["the bandwidth loop"], way, RULES["adagrad"])
        lines.append(f"{name:36} {milliseconds(seconds[name]):6.1f} {of_loop:18.2f}")
    return "\n".join(lines)


def milliseconds(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def share(own: list[float], loop: list[float], way: Way, rule: UpdateRule) -> float:
    """Return the bytes moved a second, as a share of the bandwidth loop's."""
    num_arrays = 1 + len(rule.slot_names)
    return speed(own, loop) * way.bytes_moved(num_arrays) / Way().bytes_moved(num_arrays)


def speed(own: list[float], other: list[float]) -> float:
    """Returns how many times as fast as the other; above 1 is faster."""
    return statistics.median(theirs / mine for mine, theirs in zip(own, other, strict=True))


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
