"""Seeded faults of the product, one a promise, and which test finds each (scripts/mutants.toml lists them).

python scripts/mutants.py [NAME ...] [--whole] [--out TABLE.md]
python scripts/mutants.py --check

A mutant is one file with one text replaced. Its near-by tests run until the first fails, those of `make test` before
the extended ones; with --whole all tests run where none of these does. Exits with 1 where a mutant survives. Files are
restored whatever happens.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
# A test that hangs has found its mutant; so have near-by tests that do not end.
TEST_SECONDS = 60
NEAR_SECONDS = 900
PYTEST = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "-o", f"timeout={TEST_SECONDS}"]
# As `make test` has it.
ALL_TESTS = ["-n", "2", "--dist", "worksteal", "--ignore=tests/compose", "tests"]
TIERS = {"make test": "not extended", "make test-all": "extended"}
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
# Installed for good: each build in an environment of its own would begin from nothing.
BUILDERS = [*PIP, "--constraint", "constraints.txt", "scikit-build-core", "pybind11"]
REBUILD = [*PIP, "--no-deps", "--no-build-isolation", "--editable", "."]


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` stands once in `file`, and `new` breaks the promise."""

    name: str
    promise: str
    file: str
    old: str
    new: str
    # Tests to try first: files or folders.
    near: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file that it changes."""
        return ROOT / self.file

    @property
    def is_native(self) -> bool:
        """Whether the kernels have to be built anew."""
        return self.path.suffix in (".cpp", ".h")

    def wrong(self) -> str:
        """Why it cannot be seeded, in words; empty where it can."""
        count = self.path.read_text(encoding="utf-8").count(self.old) if self.path.exists() else 0
        if count != 1:
            return f"{self.name}: the old text stands {count} times in {self.file}; expected once"
        gone = [place for place in self.near if not (ROOT / place).exists()]
        return f"{self.name}: {', '.join(gone)} is no more; name the tests where they are now" if gone else ""

    def find(self, *, whole: bool) -> str:
        """The first test that fails under it and what runs that test, empty where it survives."""
        for tests in (self.near, ALL_TESTS) if whole else (self.near,):
            for tier, marked in TIERS.items():
                if found := _first_failure(
                    ["-m", marked, *tests], seconds=None if tests is ALL_TESTS else NEAR_SECONDS
                ):
                    return f"{found} | {tier}"
        return ""


def load() -> list[Mutant]:
    """All mutants of the table."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "near": tuple(entry["near"])}) for entry in entries]


def main(arguments: Sequence[str]) -> int:
    """Runs the mutants named, or all; returns the exit status."""
    parser = argparse.ArgumentParser(description="Seeds faults and says which test finds each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the mutants to run; all without")
    parser.add_argument(
        "--check", action="store_true", help="only see that old texts and tests are where they are named"
    )
    parser.add_argument("--whole", action="store_true", help="run all tests where no near-by one finds a mutant (long)")
    parser.add_argument("--out", type=Path, help="write a table, in Markdown")
    options = parser.parse_args(arguments)
    mutants = load()
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    problems = [wrong for mutant in mutants if (wrong := mutant.wrong())]
    problems += [f"there is no mutant {name!r}" for name in sorted(unknown)]
    if problems or options.check:
        print("\n".join(problems) or f"{len(mutants)} mutants can be seeded")
        return 1 if problems else 0
    if _output("git", "status", "--porcelain", "--untracked-files=no"):
        print("The working tree has changes: commit them first, since mutants change files in place.")
        return 1
    # So that files are restored then too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    chosen = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    near = sorted({place for mutant in chosen for place in mutant.near})
    if failed := _first_failure(["-m", "not extended", *near], seconds=None):
        print(f"{failed} fails without any mutant: it would be said to have found one.")
        return 1
    # One after the other those that need a build: one for each, and one at the end.
    chosen.sort(key=lambda mutant: mutant.is_native)
    try:
        survivors = _run(chosen, whole=options.whole, out=options.out)
    finally:
        _build_anew(any(mutant.is_native for mutant in chosen))
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were found, {survivors} survived")
    return 1 if survivors else 0


def _run(mutants: Sequence[Mutant], *, whole: bool, out: Path | None) -> int:
    """Tries mutants and tells of each; returns how many survive."""
    survivors = 0
    lines = ["| mutant | file | first test that found it | run by | seconds |", "|---|---|---|---|---|"]
    for mutant in mutants:
        began = time.monotonic()
        with _seeded(mutant):
            _build_anew(mutant.is_native)
            found = mutant.find(whole=whole)
        survivors += not found
        seconds = time.monotonic() - began
        lines.append(f"| {mutant.name} | {mutant.file} | {found or '**survived** | none'} | {seconds:.0f} |")
        print(f"{mutant.name}: {found or 'SURVIVED'} ({seconds:.0f} s)", flush=True)
        if out is not None:
            out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return survivors


@contextmanager
def _seeded(mutant: Mutant) -> Iterator[None]:
    """Keeps the fault in its file while the block runs."""
    original = mutant.path.read_bytes()
    try:
        mutant.path.write_text(
            mutant.path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8"
        )
        yield
    finally:
        mutant.path.write_bytes(original)


def _build_anew(native: bool) -> None:
    """Makes the kernels those of the sources as they are."""
    if native:
        for command in (BUILDERS, REBUILD):
            subprocess.run(command, cwd=ROOT, check=True)
        # So that `make` need not install anew.
        (ROOT / ".venv" / ".installed").touch()


def _first_failure(tests: Sequence[str], *, seconds: float | None) -> str:
    """Runs tests until one fails; its name, empty where none does."""
    # Compiled files of a mutant must not outlive it.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            [*PYTEST, *tests], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s"
    if ran.returncode in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.+?|\S+)(?: - .*)?$", ran.stdout, re.MULTILINE)
    begun = re.findall(r"^(\S+::\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode in (1, 2) and failed is not None:
        return failed[1]
    if ran.returncode < 0 and begun:
        return f"{begun[-1]} (it ended the interpreter)"
    raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}")


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
