"""Runs the benchmarks one after the other, and makes the document of their results: what `make bench` does.

    python benchmarks/bench.py [--quick] [--peers FOLDER] [--only rounds,link] [--into out/bench]

Each benchmark prints its tables and leaves a JSON file in the folder; results.json holds them all, performance.md and
its pictures are made of that (document.py). Each has its time, 30 minutes all of them together (a GPU takes 3 more):
what it has measured by then counts. One that fails, or that this machine cannot run, says so, and the others go on;
`--only` repeats some and keeps what the folder has of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import document
from measure import exit_on_sigterm

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """One of the benchmarks, and what `make bench` gives it."""

    seconds: float
    takes_peers: bool = False
    # Runs only where it is named.
    by_name: bool = False
    # The script, where its name is another, and what else it gets.
    script: str = ""
    arguments: Sequence[str] = ()


# What there is to compare with encodings of few bits, over the links that need them.
FEW_BITS = (
    *("--cases", "1gbit,10gbit:3,100mbit,100mbit:3"),
    *("--only", "one process,pyps hardsync,pyps local,pyps async,DDP,torchft"),
)
# In this order.
PARTS = {
    "rounds": Part(610, takes_peers=True),
    "link": Part(230, takes_peers=True),
    "overlap": Part(120),
    "training": Part(760),
    "kernel": Part(70),
    "load": Part(70),
    "gpu": Part(180),
    "huge": Part(300, by_name=True),
    "tables": Part(900, by_name=True),
    "few_bits": Part(1500, by_name=True, script="training", arguments=FEW_BITS),
    "local_training": Part(1800, by_name=True),
}


def main() -> int:
    exit_on_sigterm()
    options = arguments()
    options.into.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only or [name for name, part in PARTS.items() if not part.by_name]:
        began = time.monotonic()
        print(f"\n=== {name}", flush=True)
        if not run(name, options):
            failed.append(name)
        print(f"=== {name}: {time.monotonic() - began:.0f} s", flush=True)
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.into.glob("*.json"))}
    results.pop("results", None)
    (options.into / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    document.write(results, options.into)
    print(f"\nThe document is {options.into / 'performance.md'}.")
    if failed:
        again = ",".join(failed)
        print(f"Failed, in part at least: {again}. `make bench BENCH={again}` repeats that alone.", file=sys.stderr)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a first impression, in minutes")
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    parser.add_argument("--only", type=_names, help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--into", type=Path, default=Path("out/bench"), help="folder for the results")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.replace(",", " ").split()
    if unknown := set(names) - PARTS.keys():
        known = ", ".join(PARTS)
        raise argparse.ArgumentTypeError(f"there is no benchmark {sorted(unknown)[0]!r}; there are {known}")
    return names


def run(name: str, options: argparse.Namespace) -> bool:
    """Runs one benchmark as a process of its own, as long as its time is; False where it failed."""
    part = PARTS[name]
    results: Path = options.into / f"{name}.json"
    # What an earlier run left is none of this one's, should it fail.
    results.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{part.script or name}.py"), "--json", str(results), *part.arguments]
    command += ["--quick"] * (options.quick and not part.by_name)
    command += ["--peers", str(options.peers)] if part.takes_peers and options.peers else []
    process = subprocess.Popen(command)
    try:
        return process.wait(part.seconds) == 0
    except subprocess.TimeoutExpired:
        print(f"=== {name} ends with its {part.seconds:.0f} s; what it has measured counts", flush=True)
        return results.exists()
    finally:
        # It ends what it has started, given the time.
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
