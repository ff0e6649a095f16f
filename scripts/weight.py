"""Measure the weight of both sides: calls, files and locks of a push with a pull, lines of code, shape of imports.

python scripts/weight.py [--side server|client] [--rounds 200] [--markdown]

A step is that of a RemoteOptimizer over a model of one shard on one server, background threads included; a round is
the server's part of it: a push, its update by Adagrad and a pull. Both run under `sys.setprofile`, the server in a
process of its own. Counted are calls of our Python functions except generated code. Up to Python 3.11 a comprehension
is a call, and so is each resume of a generator.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
# Each side's package, and the folder that it lies in.
SIDES = {"server": ("pyps", ROOT), "client": ("pyps_client", ROOT / "client")}
WIRE = f"{ROOT}/client/pyps_wire/"
TRANSPORTS = {"gRPC": "grpc", "shared memory": "shm", "lane": "tcp"}
# Longer than background threads need for what a step hands to them.
BACKGROUND_SECONDS = 0.01
# Steps before those that are counted.
WARM_UP = 20


class CountedLock:
    """A lock that counts how often it is acquired, by the place where it was created."""

    def __init__(self, lock: Any, site: str, profile: Profile):
        self._lock, self._site, self._profile = lock, site, profile

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        """Acquire the lock, as threading.Lock does."""
        acquired: bool = self._lock.acquire(*arguments, **named)
        if acquired:
            self._profile.acquired(self._site)
        return acquired

    def release(self) -> None:
        """Release the lock, as threading.Lock does."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class Profile:
    """Counts the calls of one side, and the locks that it acquires, while `on`."""

    def __init__(self, side: str) -> None:
        package, folder = SIDES[side]
        self._ours = (f"{folder}/{package}/", WIRE)
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.locks: Counter[str] = Counter()

    def watch_locks(self) -> None:
        """Count the locks that our code creates from now on."""
        threading.Lock = self._maker(threading.Lock)  # type: ignore[assignment]
        threading.RLock = self._maker(threading.RLock)  # type: ignore[assignment]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Profile this thread, and the threads that start in the block."""
        sys.setprofile(self._note)
        threading.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        """Start counting at 0."""
        self.calls.clear()
        self.locks.clear()
        self.on = True

    def acquired(self, site: str) -> None:
        """Count a lock."""
        if self.on:
            self.locks[site] += 1

    def report(self, rounds: int) -> dict[str, Any]:
        """Return the figures of one of so many rounds."""
        # Rarer calls, such as heartbeats, are no part of a round.
        often = {place for place, count in self.calls.items() if count >= rounds / 2}
        return {
            "calls": round(sum(self.calls[place] for place in often) / rounds),
            "functions": sorted(f"{Path(file).relative_to(ROOT)}:{function}" for file, function in often),
            "files": sorted({f"{Path(file).relative_to(ROOT)}" for file, _ in often}),
            "locks": {site: round(count / rounds, 1) for site, count in self.locks.items() if count >= rounds},
        }

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and self.on and code.co_filename.startswith(self._ours) and "_pb2" not in code.co_filename:
            self.calls[code.co_filename, code.co_qualname] += 1

    def _maker(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(self._ours):
                frame = frame.f_back
            return (
                make() if frame is None else CountedLock(make(), f"{frame.f_code.co_filename}:{frame.f_lineno}", self)
            )

        return made


def serve() -> None:
    """Run a server that counts between two lines of stdin, prints its report, and ends with its input."""
    profile = Profile("server")
    profile.watch_locks()
    from pyps import _kernels
    from pyps.config import ServerConfig
    from pyps.service.server import Server

    config = ServerConfig(port=0, control_port=0, metrics_port=0)

    async def run() -> None:
        server = Server(config, instruction_set=_kernels.isa())
        loop = asyncio.get_running_loop()

        def obey() -> None:
            while sys.stdin.readline():
                profile.begin()
                print("counting", flush=True)
                rounds = int(sys.stdin.readline() or 1)
                profile.on = False
                print(json.dumps(profile.report(rounds)), flush=True)
            loop.call_soon_threadsafe(server.stop, "counted")

        threading.Thread(target=obey, daemon=True).start()
        await server.run(on_ready=lambda addresses: print(f"at {addresses.data}", flush=True))

    with profile.watching():
        asyncio.run(run())


class Server:
    """A server in a process of its own, which counts between `begin` and `counted`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._line("at ").removeprefix("at ")

    def begin(self) -> None:
        """Start counting."""
        self._say("begin")
        self._line("counting")

    def counted(self, rounds: int) -> dict[str, Any]:
        """Stop counting, and return the figures of one of so many rounds."""
        self._say(str(rounds))
        found: dict[str, Any] = json.loads(self._line("{"))
        return found

    def _say(self, text: str) -> None:
        print(text, file=self._process.stdin, flush=True)

    def _line(self, begins: str) -> str:
        assert self._process.stdout
        return next(line for line in self._process.stdout if line.startswith(begins)).strip()


@contextmanager
def started() -> Iterator[Server]:
    """Start a server."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Server(process)


def steps_of(
    server: Server, transport: str, rounds: int, *, overlap: Literal["off", "step"] = "off"
) -> dict[str, dict[str, Any]]:
    """Make that many steps in this process, and return the report of each side."""
    import torch

    from pyps_client import Launch, RemoteOptimizer

    profile = Profile("client")
    model = torch.nn.Linear(10, 10, bias=False)
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with (
        profile.watching(),
        RemoteOptimizer(
            model, adagrad, launch=Launch(server.address, run_id="weight", transport=transport), overlap=overlap
        ) as optimizer,
    ):
        for turn in range(rounds + WARM_UP):
            if turn == WARM_UP:
                server.begin()
                profile.begin()
            optimizer.zero_grad()
            model(torch.ones(1, 10)).sum().backward()
            profile.on = turn >= WARM_UP
            optimizer.step()
            if overlap != "off":
                time.sleep(BACKGROUND_SECONDS)
            profile.on = False
        return {"client": profile.report(rounds), "server": server.counted(rounds)}


def sources(side: str) -> dict[str, Path]:
    """Return the modules of a side's package by name."""
    package, folder = SIDES[side]
    found = {}
    for path in folder.glob(f"{package}/**/*.py"):
        found[".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(names: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield importer and imported among these modules, imports for types and inside functions included.

    Of a package's __init__ only the imports at its top count: the others load names on request.
    """
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body if path.name == "__init__.py" else ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            found = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                found = [
                    f"{node.module}.{each}" if f"{node.module}.{each}" in names else f"{node.module}" for each in found
                ]
            for other in found:
                # Importing a module imports its packages.
                parts = other.split(".")
                packages = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
                yield from (
                    (name, each) for each in packages if each in names and not f"{name}.".startswith(f"{each}.")
                )


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import one another, directly or not."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reached[start] = seen
    groups = {frozenset({a, *(b for b in reached[a] if a in reached.get(b, ()))}) for a in edges if a in reached[a]}
    return [set(group) for group in sorted(groups, key=len, reverse=True)]


def room_of(module: str) -> str:
    """Return the top package or module of a module; `__main__` belongs to the commands."""
    _, _, within = module.partition(".")
    return "cli" if within == "__main__" else within.split(".")[0]


def floors(edges: Mapping[str, set[str]]) -> int:
    """Return the longest chain of packages that import one another; a circle counts as one package."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, others in edges.items():
        for other in others:
            a, b = room_of(name), room_of(other)
            if a and b and a != b:
                rooms[a].add(b)
    circle = {room: min(group) for group in circles(rooms) for room in group}
    above: dict[str, set[str]] = defaultdict(set)
    for room, others in rooms.items():
        above[circle.get(room, room)] |= {circle.get(o, o) for o in others} - {circle.get(room, room)}

    def height(room: str) -> int:
        return 1 + max((height(other) for other in above.get(room, ())), default=0)

    return max(height(room) for room in rooms)


def edges_of(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each of these modules imports."""
    edges: dict[str, set[str]] = defaultdict(set)
    for importer, imported in imports(names):
        edges[importer].add(imported)
    return edges


def lines_of(pattern: str) -> int:
    """Return the lines of the Python files of a pattern, generated code left out."""
    files = [path for path in ROOT.glob(pattern) if "_pb2" not in path.name]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def measures(side: str, rounds: int) -> Iterator[tuple[str, str]]:
    """Yield the measures of a side with their values."""
    unit = {"server": "round", "client": "step"}[side]
    with started() as server:
        for name, transport in TRANSPORTS.items():
            counted = steps_of(server, transport, rounds)[side]
            places = f"{len(counted['functions'])} functions in {len(counted['files'])} files"
            yield f"calls a {unit}, {name}", f"{counted['calls']}: {places}"
            if side == "client":
                calls = steps_of(server, transport, rounds, overlap="step")[side]["calls"]
                yield f"calls a {unit}, {name}, overlap", f"{calls}"
                continue
            sites = (f"{Path(site).relative_to(ROOT)} {often:g}" for site, often in sorted(counted["locks"].items()))
            yield f"locks taken a {unit}, {name}", f"{len(counted['locks'])}: {', '.join(sites)}"
    edges = edges_of(sources(side))
    found = circles(edges)
    yield "import circles", f"{len(found)}  {'; '.join(', '.join(sorted(group)) for group in found)}"
    yield "floors of imports", str(floors(edges))
    if side == "server":
        yield "lines of pyps", str(lines_of("pyps/**/*.py"))
        yield "lines of tests", str(lines_of("tests/**/*.py"))
    else:
        yield "lines of pyps_client and pyps_wire by hand", str(lines_of("client/*/**/*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--side", choices=SIDES, help="the one side to measure; both by default")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    for side in [options.side] if options.side else SIDES:
        for measure, value in measures(side, options.rounds):
            print(f"| {measure} | {value} |" if options.markdown else f"{measure:42} {value}")


if __name__ == "__main__":
    main()
