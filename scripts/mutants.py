"""Seed faults into the product, and report which test finds each.

python scripts/mutants.py [NAME ...] [--whole] [--out TABLE.md]
python scripts/mutants.py --sample 40 --seed 1 [--out TABLE.md]
python scripts/mutants.py --check

Without --sample the faults are those of scripts/mutants.toml, one a promise: one text of a file replaced. Their near-by
tests run until the first fails, those of `make test` before the extended ones; with --whole all tests run where none of
these does. Exit with 1 where a mutant survives.

--sample draws one-node mutants at random from the code of a run: a comparison, constant, boolean operator, statement or
pair of arguments. `tests` in scripts/mutants.toml names the tests of each folder, the quick ones first. A sample of 40
takes about half an hour on 2 cores. Files are restored in any case.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
# A test that hangs has found its mutant; so have near-by tests that do not end.
TEST_SECONDS = 60
NEAR_SECONDS = 900
# For each stage of tests of a sampled mutant.
STAGE_SECONDS = 240
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
    """A fault of the table: `old` stands once in `file`, and `new` breaks the promise."""

    name: str
    promise: str
    file: str
    old: str
    new: str
    # Tests to run first: files or folders.
    near: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Return the file to change."""
        return ROOT / self.file

    @property
    def is_native(self) -> bool:
        """Return whether the kernels have to be built again."""
        return self.path.suffix in (".cpp", ".h")

    def wrong(self) -> str:
        """Return why it cannot be seeded, "" where it can."""
        count = self.path.read_text(encoding="utf-8").count(self.old) if self.path.exists() else 0
        if count != 1:
            return f"{self.name}: the old text stands {count} times in {self.file}; expected once"
        gone = [place for place in self.near if not (ROOT / place).exists()]
        return f"{self.name}: {', '.join(gone)} does not exist: name the tests where they are now" if gone else ""

    def seeded(self) -> str:
        """Return the text of the file with the fault."""
        return self.path.read_text(encoding="utf-8").replace(self.old, self.new)

    def find(self, *, whole: bool) -> str:
        """Return the first test that fails and the target that runs it, "" where the mutant survives."""
        for tests in (self.near, ALL_TESTS) if whole else (self.near,):
            for tier, marked in TIERS.items():
                if found := _first_failure(
                    ["-m", marked, *tests], seconds=None if tests is ALL_TESTS else NEAR_SECONDS
                ):
                    return f"{found} | {tier}"
        return ""


@dataclass(frozen=True)
class Sampled:
    """A one-node mutant: `new` in place of the bytes from `start` to `end`."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str
    # Stages of tests.
    tests: tuple[tuple[str, ...], ...]
    is_native = False

    @property
    def path(self) -> Path:
        """Return the file to change."""
        return ROOT / self.file

    @property
    def name(self) -> str:
        """Return the change on one line."""
        old = self.path.read_bytes()[self.start : self.end].decode()
        return f"{self.file}:{self.line} {self.kind}: " + " ".join(f"{old} -> {self.new}".split())

    def seeded(self) -> str:
        """Return the text of the file with the fault."""
        text = self.path.read_bytes()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    def find(self, *, whole: bool) -> str:
        """Return a test that fails, also when it is repeated alone, "" where the mutant survives."""
        for stage, tests in enumerate(self.tests):
            spread = ["-n", "2"] if stage else []
            found = _first_failure([*spread, "-m", "not extended", *tests], seconds=STAGE_SECONDS)
            if found.startswith("no end"):
                continue
            if found and (not stage or " " in found or _first_failure([found], seconds=STAGE_SECONDS)):
                return f"{found} | stage {stage + 1}"
        return ""


_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
# Messages, annotations and what only people see are not mutated.
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.arg)
_SHOWN = re.compile(r"__(repr|str)__|logger|log|announce|typer|_events|_tell")


def one_node_mutants(tree: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield kind, node and replacement of every one-node mutant of a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _SKIPPED) or (isinstance(node, ast.FunctionDef) and _SHOWN.search(node.name)):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            # A bound or a pause that is a little different is no fault.
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from one_node_mutants(ast.Module([statement], []))
            continue
        if isinstance(node, ast.AnnAssign):
            yield from one_node_mutants(ast.Module([ast.Expr(node.value)] if node.value else [], []))
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield "comparison", node, ast.unparse(ast.Compare(left, [_COMPARISONS[type(operator)]], [right]))
            case ast.Constant(value=bool(value)):
                yield "constant", node, str(not value)
            case ast.Constant(value=int(value) | float(value)):
                yield "constant", node, repr(value + 1)
            case ast.BoolOp(op=ast.And(), values=values):
                yield "boolean", node, f"({ast.unparse(ast.BoolOp(ast.Or(), values))})"
            case ast.BoolOp(op=ast.Or(), values=values):
                yield "boolean", node, f"({ast.unparse(ast.BoolOp(ast.And(), values))})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "boolean", node, f"({ast.unparse(operand)})"
            case ast.Expr(value=ast.Call(func=function)) if not _SHOWN.search(ast.unparse(function)):
                yield "statement", node, "pass"
            case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete():
                yield "statement", node, "pass"
            case ast.Call(func=function, args=[first, second, *rest], keywords=keywords) if not (
                isinstance(first, ast.Starred)
                or isinstance(second, ast.Starred)
                or ast.unparse(function) in ("min", "max", "isinstance", "zip")
            ):
                yield "argument", node, ast.unparse(ast.Call(function, [second, first, *rest], keywords))
        if isinstance(node, ast.Call) and _SHOWN.search(ast.unparse(node.func)):
            continue
        yield from one_node_mutants(node)


def sample(count: int, seed: int) -> list[Sampled]:
    """Draw so many mutants, the kinds in turn, each at random from all folders that the table has tests for."""
    stages = {folder: tuple(map(tuple, tests)) for folder, tests in _table()["tests"].items()}
    by_kind: dict[str, list[Sampled]] = {}
    for folder in sorted(stages):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            file = str(path.relative_to(ROOT))
            if max((each for each in stages if file.startswith(f"{each}/")), key=len) != folder:
                continue
            text = path.read_bytes()
            starts = [0]
            for line in text.splitlines(keepends=True):
                starts.append(starts[-1] + len(line))
            for kind, node, new in one_node_mutants(ast.parse(text)):
                if not hasattr(node, "lineno"):
                    continue
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
                by_kind.setdefault(kind, []).append(Sampled(file, node.lineno, kind, start, end, new, stages[folder]))
    draw = random.Random(seed)
    kinds = sorted(by_kind)
    return [draw.choice(by_kind[kinds[index % len(kinds)]]) for index in range(count)]


def load() -> list[Mutant]:
    """Return the mutants of the table."""
    return [Mutant(**{**entry, "near": tuple(entry["near"])}) for entry in _table()["mutant"]]


def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def main(arguments: Sequence[str]) -> int:
    """Run the mutants named, all of the table, or a sample; return the exit status."""
    parser = argparse.ArgumentParser(description="Seed faults, and report which test finds each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the mutants to run; all without")
    parser.add_argument(
        "--check", action="store_true", help="only see that old texts and tests are where they are named"
    )
    parser.add_argument("--sample", type=int, default=0, metavar="COUNT", help="draw so many one-node mutants instead")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--whole", action="store_true", help="run all tests where no near-by one finds a mutant (long)")
    parser.add_argument("--out", type=Path, help="write a table, in Markdown")
    options = parser.parse_args(arguments)
    mutants = load()
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    problems = [wrong for mutant in mutants if (wrong := mutant.wrong())]
    problems += [f"there is no mutant {name!r}" for name in sorted(unknown)]
    named = {test for stages in _table()["tests"].values() for stage in stages for test in stage}
    problems += [f"there is no {test}" for test in sorted(named) if not list(ROOT.glob(test))]
    if options.check or (problems and not options.sample):
        print("\n".join(problems) or f"{len(mutants)} mutants can be seeded")
        return 1 if problems else 0
    if _output("git", "status", "--porcelain", "--untracked-files=no"):
        print("The working tree has changes: commit them first, since mutants change files in place.")
        return 1
    # So that files are restored then too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if options.sample:
        sampled = sample(options.sample, options.seed)
        survivors = _run(sampled, whole=False, out=options.out)
        print(f"{len(sampled) - survivors} of {len(sampled)} mutants were found, {survivors} survived")
        return 0
    chosen = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    near = sorted({place for mutant in chosen for place in mutant.near})
    if failed := _first_failure(["-m", "not extended", *near], seconds=None):
        print(f"{failed} fails without any mutant: it would be said to have found one.")
        return 1
    # The mutants of the kernels last: each needs a build, and the end another.
    chosen.sort(key=lambda mutant: mutant.is_native)
    try:
        survivors = _run(chosen, whole=options.whole, out=options.out)
    finally:
        _build_kernels(any(mutant.is_native for mutant in chosen))
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were found, {survivors} survived")
    return 1 if survivors else 0


def _run(mutants: Sequence[Mutant | Sampled], *, whole: bool, out: Path | None) -> int:
    """Run the tests under each mutant and print the result; return how many survive."""
    survivors = 0
    lines = ["| mutant | file | first test that found it | run by | seconds |", "|---|---|---|---|---|"]
    for mutant in mutants:
        began, name = time.monotonic(), mutant.name
        with _seeded(mutant):
            _build_kernels(mutant.is_native)
            found = mutant.find(whole=whole)
        survivors += not found
        seconds = time.monotonic() - began
        lines.append(f"| {name} | {mutant.file} | {found or '**survived** | none'} | {seconds:.0f} |")
        print(f"{name}: {found or 'SURVIVED'} ({seconds:.0f} s)", flush=True)
        if out is not None:
            out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return survivors


@contextmanager
def _seeded(mutant: Mutant | Sampled) -> Iterator[None]:
    """Keep the fault in its file while the block runs."""
    original = mutant.path.read_bytes()
    try:
        mutant.path.write_text(mutant.seeded(), encoding="utf-8")
        yield
    finally:
        mutant.path.write_bytes(original)


def _build_kernels(native: bool) -> None:
    """Build the kernels of the sources as they are."""
    if native:
        for command in (BUILDERS, REBUILD):
            subprocess.run(command, cwd=ROOT, check=True)
        # So that `make` need not install again.
        (ROOT / ".venv" / ".installed").touch()


def _first_failure(tests: Sequence[str], *, seconds: float | None) -> str:
    """Run tests until one fails; return its name, "" where none does."""
    # Compiled files of a mutant must not outlive it.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            [*PYTEST, *_existing(tests)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=seconds
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


def _existing(tests: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with patterns of files replaced by the files."""
    for each in tests:
        found = sorted(str(path) for path in ROOT.glob(each)) if "*" in each and "::" not in each else []
        yield from found or [each]


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
