"""Runs all benchmarks one after the other, and makes the document of their results: what `make bench` does.

    python benchmarks/bench.py [--quick] [--peers FOLDER] [--only rounds,link] [--into out/bench]

Each benchmark prints its tables and leaves a JSON file in the folder; results.json holds them all, performance.md and
its pictures are made of that (document.py). A benchmark that this machine cannot run says so and is left out by name.
`--only` repeats some and keeps what the folder has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import document
from measure import exit_on_sigterm

HERE = Path(__file__).resolve().parent
# In this order; whether it takes the peers, and a short form.
BENCHMARKS = {
    "kernel": (False, True),
    "rounds": (True, True),
    "link": (True, True),
    "training": (False, True),
    "load": (False, True),
    "gpu": (False, True),
    "huge": (False, False),
}


def main() -> int:
    exit_on_sigterm()
    options = arguments()
    options.into.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only or BENCHMARKS:
        if options.quick and not BENCHMARKS[name][1]:
            print(f"\n=== {name}: left out of the short form", flush=True)
            continue
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
        print(f"Failed, or measured in part: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a first impression, in minutes")
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    parser.add_argument("--only", type=_names, help=f"some of {', '.join(BENCHMARKS)}")
    parser.add_argument("--into", type=Path, default=Path("out/bench"), help="folder for the results")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.replace(",", " ").split()
    if unknown := set(names) - BENCHMARKS.keys():
        known = ", ".join(BENCHMARKS)
        raise argparse.ArgumentTypeError(f"there is no benchmark {sorted(unknown)[0]!r}; there are {known}")
    return names


def run(name: str, options: argparse.Namespace) -> bool:
    """Runs one benchmark as a process of its own; True where it succeeded."""
    takes_peers, _ = BENCHMARKS[name]
    command = [sys.executable, str(HERE / f"{name}.py")]
    command += ["--json", str(options.into / f"{name}.json")]
    command += ["--quick"] * (options.quick and BENCHMARKS[name][1])
    command += ["--peers", str(options.peers)] if takes_peers and options.peers else []
    process = subprocess.Popen(command)
    try:
        return process.wait() == 0
    finally:
        # It ends what it has started, given the time.
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
