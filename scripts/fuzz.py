"""Fuzz the C++ that reads bytes of others (csrc/fuzz), with the address and undefined-behaviour sanitizers.

python scripts/fuzz.py [--seconds 60] [TARGET ...]

Builds the targets with clang and its libFuzzer, writes real messages and encodings as seeds, and mutates them for so
many seconds, all targets together. Exits with 1 where one fails: its log names the input, which
`build/fuzz/fuzz_TARGET INPUT` repeats. What reached new code stays in build/fuzz/corpus for the next time.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyps_wire import codecs, framing
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import Sender

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "fuzz"
# Some numbers of a block, several blocks, more than a chunk.
COUNTS = (1, 33, 1025, 4100)
# An input of 4,100 float32, or of two messages.
BYTES_MAX = 17_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", default=["framing", "codings", "kernels"])
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    if shutil.which("clang++") is None:
        print("fuzz: needs clang++ and its sanitizers (on Debian: apt-get install clang)", file=sys.stderr)
        return 1
    configure = ("cmake", "-S", ROOT, "-B", BUILD, "-DCMAKE_CXX_COMPILER=clang++", "-DPYPS_BINDINGS=OFF")
    subprocess.run([*configure, "-DPYPS_FUZZ=ON", "-Wno-dev"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    running = {target: started(target, options.seconds) for target in options.targets}
    failed = [target for target, process in running.items() if process.wait() != 0]
    for target in running:
        lines = (BUILD / f"{target}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        outcome, shown = ("FAILED", 60) if target in failed else ("nothing found", 5)
        print(f"{target}: {outcome}", *lines[-shown:], sep="\n  ")
    return 1 if failed else 0


def started(target: str, seconds: int) -> subprocess.Popen[bytes]:
    corpus = BUILD / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate({"framing": messages, "codings": encodings, "kernels": gradients}[target]()):
        (corpus / f"seed-{index}").write_bytes(seed)
    limits = (f"-max_total_time={seconds}", f"-max_len={BYTES_MAX}", "-timeout=20", "-print_final_stats=1")
    with (BUILD / f"{target}.log").open("wb") as log:
        program = [f"{BUILD}/fuzz_{target}", str(corpus), *limits, f"-artifact_prefix={BUILD}/{target}-"]
        return subprocess.Popen(program, stdout=log, stderr=log)


def messages() -> Iterator[bytes]:
    """The number of the payload's field, and a message."""
    sender = Sender(run_id="run", worker_id="worker-0", incarnation=7, secret=b"0" * 16)
    push = wire.PushRequest(sender=sender, sequence=3, base_version=2, num_shards=2, example_count=8)
    wants = [wire.PullRequest.Want(shard_id=shard, held_version=-1, min_version=5) for shard in range(3)]
    pull = wire.PullRequest(sender=sender, wants=wants, wait_milliseconds=100)
    for message in (push, pull, wire.HelloRequest(sender=sender, parts=[0, 1], software="test")):
        for payload in (b"", bytes(300)):
            yield struct.pack("<H", framing.PAYLOAD_FIELD - 1) + framing.join(message, payload)


def encodings() -> Iterator[bytes]:
    """Codec, what to do, setting and count, then a payload to decode or numbers to encode."""
    for choice, codec in enumerate((*SPARSE, codecs.INT8, codecs.INT4, codecs.ONEBIT)):
        for count in COUNTS:
            values = numbers(count)
            yield struct.pack("<4H", choice, 0, 9, count) + codec.encode(values)
            yield struct.pack("<4H", choice, 1, 9, count) + values.tobytes()


def gradients() -> Iterator[bytes]:
    """Codec, rule and count less one, then a payload."""
    for choice, codec in enumerate(sorted(set(codecs.CODECS.values()) - {*SPARSE, codecs.DELTA})):
        for rule in range(12):
            for count in COUNTS[:3]:
                yield struct.pack("<3H", choice, rule, count - 1) + codec.encode(numbers(count))


SPARSE = (codecs.THRESHOLD, codecs.TOPK, codecs.TOPK2BIT)


def numbers(count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(count).standard_normal(count, np.float32)


if __name__ == "__main__":
    sys.exit(main())
