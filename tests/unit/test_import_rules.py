"""Who may import what: the layers of ARCHITECTURE.md, checked on every module's syntax tree."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import weight

ROOT = Path(__file__).resolve().parents[2]
# The core is given time, bytes and numbers as arguments; it fetches none.
OUTSIDE_WORLD = (
    *("time", "datetime", "os", "pathlib", "io", "tempfile", "shutil", "socket", "asyncio"),
    *("subprocess", "signal", "multiprocessing", "logging"),
)
GRPC = ("grpc", "grpc_health", "grpc_reflection", "grpc_channelz", "grpc_status")
# The client's floors, the lowest first.
CLIENT_FLOORS = (
    *(
        tuple(f"pyps_client.{module}" for module in floor.split())
        for floor in (
            "log version fork vectors retry credentials places local_server replica.group",
            "transport launch",
            "leave run_state early_shards",
            "kept push pull join lease",
            "tables",
            "worker",
            "data arrays",
        )
    ),
    ("pyps_client",),
)
# What of the client needs torch.
ON_TORCH = (
    "pyps_client.torch",
    "pyps_client.integrations",
    *(f"pyps_client.replica.{module}" for module in ("processes", "dtensor")),
    *(f"pyps_client.lbfgs.{module}" for module in ("run", "gradient")),
)


@dataclass(frozen=True)
class Import:
    """One imported name, in full: `from a.b import c` is "a.b.c"."""

    importer: str
    line: int
    name: str
    lazy: bool  # Inside a function: it runs when the function is called.
    for_types: bool  # Under `if TYPE_CHECKING`: it never runs.

    def is_of(self, *packages: str) -> bool:
        return _within(self.name, packages)

    def is_by(self, *packages: str) -> bool:
        return _within(self.importer, packages)

    @property
    def is_ours(self) -> bool:
        return self.is_of("pyps", "pyps_wire", "pyps_client")

    @property
    def is_stdlib(self) -> bool:
        return self.name.split(".")[0] in sys.stdlib_module_names


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _floor(name: str) -> int:
    """The client's floor that a module is on; -1 of what is none of the client's."""
    return next((floor for floor, packages in enumerate(CLIENT_FLOORS) if _within(name, packages)), -1)


def modules() -> dict[str, ast.Module]:
    found = {}
    for root, package in ((ROOT, "pyps"), (ROOT / "client", "pyps_wire"), (ROOT / "client", "pyps_client")):
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def imports_of(importer: str, node: ast.AST, *, lazy: bool = False, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, child.lineno, alias.name, lazy, for_types)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                name = "." * child.level + ".".join(filter(None, (child.module, alias.name)))
                yield Import(importer, child.lineno, name, lazy, for_types)
        else:
            within_function = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            within_types = for_types or (
                isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            )
            yield from imports_of(importer, child, lazy=within_function, for_types=within_types)


# What the core takes from the wire.
WIRE = ("pyps_wire.codecs", "pyps_wire.errors")
# Programs of vectors, calls that wait, errors, and messages of the work queue, which are values.
OF_WORK = ("pyps.core.effects", "pyps.core.vectors.program", "pyps_wire.errors", "pyps_wire.work_pb2")
# A run, and what it is told of at its beginning.
OF_A_RUN = ("pyps.core", "pyps.run", "pyps.config", "pyps_wire.codecs", "pyps_wire.contract", "pyps_wire.partition")
OF_A_SIMULATION = ("pyps.simulation", "pyps.statistics", "pyps_client.vectors", "pyps_wire.errors")

RULES: dict[str, Callable[[Import], bool]] = {
    # True for an import that breaks the rule.
    "imports are absolute": lambda i: i.name.startswith("."),
    "core imports the standard library, numpy, the kernels, codecs and errors": lambda i: (
        i.is_by("pyps.core")
        and not (i.is_stdlib or i.is_of("numpy", "pyps._kernels", *WIRE, "pyps.core"))
        and not (i.for_types and i.is_of("typing_extensions"))
    ),
    "simulation imports numpy, the run, what a run is made from, and the client's encoder, and no clock": lambda i: (
        i.is_by("pyps.simulation")
        and not ((i.is_stdlib and not i.is_of(*OUTSIDE_WORLD)) or i.is_of("numpy", *OF_A_SIMULATION, *OF_A_RUN))
    ),
    "work and lbfgs import the standard library, numpy, programs, messages and errors, and no clock": lambda i: (
        i.is_by("pyps.work", "pyps.lbfgs")
        and not ((i.is_stdlib and not i.is_of(*OUTSIDE_WORLD)) or i.is_of("numpy", *OF_WORK, "pyps.work", "pyps.lbfgs"))
    ),
    "core knows no clock, file, process or network": lambda i: i.is_by("pyps.core") and i.is_of(*OUTSIDE_WORLD),
    "grpc stays in service, cli, control and the client's transport": lambda i: (
        i.is_of(*GRPC) and not i.is_by("pyps.service", "pyps.cli", "pyps.control", "pyps_client.transport.grpc")
    ),
    "the server's distribution imports torch only to read what torch saved, and to write it": lambda i: (
        i.is_of("torch") and i.is_by("pyps") and not (i.importer == "pyps.storage.parameter_file" and i.lazy)
    ),
    "pyps_wire imports neither torch nor the packages above it": lambda i: (
        i.is_by("pyps_wire") and i.is_of("torch", "pyps", "pyps_client")
    ),
    "nothing of the client loads what needs torch but what needs it itself": lambda i: (
        i.is_of("torch", *ON_TORCH) and not i.is_by(*ON_TORCH) and not (i.for_types or i.lazy)
    ),
    # The package itself asks for torch only to say in words that RemoteOptimizer lacks it.
    "torch is imported by name only where it is needed": lambda i: (
        i.is_of("torch")
        and not i.is_by(*ON_TORCH)
        and not (i.importer in ("pyps_client", "pyps.storage.parameter_file") and i.lazy)
    ),
    "nothing of the client's distribution imports the server's": lambda i: (
        i.is_by("pyps_wire", "pyps_client") and i.is_of("pyps")
    ),
    "the server's distribution imports the client to call servers, and its encoder to simulate": lambda i: (
        i.is_by("pyps")
        and i.is_of("pyps_client")
        and not i.is_by("pyps.cli", "pyps.control", "pyps.launcher", "pyps.ray", "pyps.watch")
        and not (i.is_by("pyps.simulation") and i.is_of("pyps_client.vectors"))
    ),
    "no module of the client imports from a floor above its own": lambda i: (
        i.is_by("pyps_client") and _floor(i.name) > _floor(i.importer)
    ),
    "watch knows a run by what its servers say, and by its log": lambda i: (
        i.is_by("pyps.watch")
        and i.is_of("pyps")
        and not i.is_of("pyps.watch", "pyps.control", "pyps.units", "pyps.core", "pyps.storage", "pyps.statistics")
    ),
    "nothing but cli imports cli or the server": lambda i: (
        i.is_of("pyps.cli", "pyps.service.server") and not i.is_by("pyps.cli", "pyps.service.server", "pyps.__main__")
    ),
    "the client imports no more than its distribution asks for": lambda i: (
        i.is_by("pyps_wire", "pyps_client")
        and not (i.is_ours or i.is_stdlib or i.is_of("numpy", "google.protobuf", "torch", *GRPC[:1]))
        and not (i.for_types and i.is_of("typing_extensions"))
        and not (i.is_by("pyps_client.integrations") and i.lazy and i.is_of("lightning", "transformers"))
        and not (i.is_by("pyps_client.torch.dynamicemb") and i.lazy and i.is_of("dynamicemb"))
    ),
}


def test_no_import_breaks_a_rule():
    found = modules()
    assert {"pyps", "pyps.core", "pyps_wire.framing", "pyps_client"} <= set(found)
    imports = [each for name, tree in found.items() for each in imports_of(name, tree)]
    broken = [f"{i.importer}, line {i.line}: {i.name} ({rule})" for rule in RULES for i in imports if RULES[rule](i)]
    assert not broken, "\n".join(broken)


def test_rules_find_what_breaks_them():
    for importer, text in (
        ("pyps.core.shard", "import grpc"),
        ("pyps.core.shard", "from time import time"),
        ("pyps.run", "def f():\n  import grpc.aio"),
        ("pyps_client", "import pyps_client.torch"),
        ("pyps_client.replica.group", "from pyps_client.replica.processes import Replica"),
        ("pyps_client.data.samplers", "def f():\n  import torch"),
        ("pyps_wire.codecs", "import torch"),
        ("pyps_client.arrays", "from pyps import run"),
        ("pyps_client.transport.memory", "def f():\n  from pyps_client.pull import Receiver"),
        ("pyps_client.push", "from pyps_client import worker"),
        ("pyps.run", "from pyps_client import Client"),
        ("pyps.watch.history", "from pyps.run.run import Run"),
    ):
        assert any(broken(found) for found in imports_of(importer, ast.parse(text)) for broken in RULES.values()), text


@pytest.mark.parametrize("side", weight.SIDES)
def test_no_modules_import_one_another(side):
    assert weight.circles(weight.edges_of(weight.sources(side))) == []


def test_what_is_not_used_is_not_loaded():
    of_client = [n for n in modules() if _within(n, ("pyps_wire", "pyps_client")) and not _within(n, ON_TORCH)]
    of_replicas = ("pyps_client.replica.processes", "pyps_client.lbfgs")
    for code, unused in (
        (f"import importlib\nfor name in {of_client}: importlib.import_module(name)", ("torch", "pyps")),
        ("import pyps_client", ("torch", "pyps_client.torch", *of_replicas)),
        ("import pyps_client.torch", ("pyps_client.replica.dtensor", *of_replicas)),
        (
            "from pyps.cli.main import app\nsys.argv = ['pyps', '--help']\ntry: app()\nexcept SystemExit: pass",
            ("numpy", "pyps._kernels", "grpc"),
        ),
    ):
        text = f"import sys\n{code}\nprint([name for name in {unused} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1:] == ["[]"], (code, done.stdout, done.stderr)


def test_no_module_hides_a_public_name_of_its_package():
    # Loading pyps_client.sandblaster, were there such a module, would put it in the function's place.
    found = modules()
    hidden = [
        name
        for package in ("pyps_client", "pyps_client.data", "pyps_client.torch")
        for name in importlib.import_module(package).__all__
        if f"{package}.{name}" in found
    ]
    assert hidden == []
