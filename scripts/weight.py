"""How heavy the server is: the calls, locks and files of one round, its lines, and the shape of its imports.

python scripts/weight.py [--rounds 200] [--markdown]

A round is a push, its update by Adagrad and a pull, of a model of one shard on one server. The server runs in a
process of its own under `sys.setprofile`; what is counted are calls of Python functions of ours, generated code left
out.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = (f"{ROOT}/pyps/", f"{ROOT}/client/pyps_wire/")
CORE = f"{ROOT}/pyps/core/"
SHARD = f"{CORE}shard.py"
SMALL = 70
TRANSPORTS = {"gRPC": "grpc", "shared memory": "shm"}


class CountedLock:
    """A lock that knows where it was made, and counts how often it is taken while rounds are counted."""

    def __init__(self, lock: Any, site: str, profile: Profile):
        self._lock, self._site, self._profile = lock, site, profile

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        """As of threading.Lock."""
        taken: bool = self._lock.acquire(*arguments, **named)
        if taken:
            self._profile.taken(self._site, 1)
        return taken

    def release(self) -> None:
        """As of threading.Lock."""
        self._profile.taken(self._site, -1)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class Profile:
    """What is called, and which locks are taken, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.climbs: Counter[str] = Counter()
        self.locks: Counter[str] = Counter()
        self._held = threading.local()

    def install(self) -> None:
        """Watches this thread and all that begin later, and every lock that we make from now on."""
        threading.Lock = self._maker(threading.Lock)  # type: ignore[assignment]
        threading.RLock = self._maker(threading.RLock)  # type: ignore[assignment]
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def taken(self, site: str, change: int) -> None:
        """Notes that this thread takes a lock or lets it go."""
        held = self._held.__dict__
        held[site] = held.get(site, 0) + change
        if self.on and change > 0:
            self.locks[site] += 1

    def report(self, rounds: int) -> dict[str, Any]:
        """The figures of so many rounds."""
        often = {place: count for place, count in self.calls.items() if count >= rounds}
        return {
            "calls": round(sum(self.calls.values()) / rounds),
            "functions": len(often),
            "files": len({file for file, _ in often}),
            "climbs": sorted(edge for edge, count in self.climbs.items() if count >= rounds),
            "locks": {site: round(count / rounds, 1) for site, count in self.locks.items() if count >= rounds},
        }

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self.on or not code.co_filename.startswith(OURS) or "_pb2" in code.co_filename:
            return
        self.calls[code.co_filename, code.co_qualname] += 1
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(CORE):
            under_lock = any(n and site.startswith(SHARD) for site, n in self._held.__dict__.items())
            if under_lock and code.co_filename.startswith(OURS[0]) and not code.co_filename.startswith(CORE):
                self.climbs[f"{caller.f_code.co_qualname} -> {code.co_qualname}"] += 1

    def _maker(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(OURS):
                frame = frame.f_back
            return (
                make() if frame is None else CountedLock(make(), f"{frame.f_code.co_filename}:{frame.f_lineno}", self)
            )

        return made


def serve() -> None:
    """A server that counts between two lines of stdin, and tells what it counted."""
    profile = Profile()
    profile.install()
    from pyps import _kernels
    from pyps.config import ServerConfig
    from pyps.service.server import Server

    config = ServerConfig(port=0, control_port=0, metrics_port=0)

    async def run() -> None:
        server = Server(config, token=None, instruction_set=_kernels.isa())
        loop = asyncio.get_running_loop()

        def obey() -> None:
            sys.stdin.readline()
            profile.on = True
            print("counting", flush=True)
            rounds = int(sys.stdin.readline())
            profile.on = False
            print(json.dumps(profile.report(rounds)), flush=True)
            loop.call_soon_threadsafe(server.stop, "counted")

        threading.Thread(target=obey, daemon=True).start()
        await server.run(on_ready=lambda addresses: print(f"at {addresses.data}", flush=True))

    asyncio.run(run())


def rounds_of(transport: str, rounds: int) -> dict[str, Any]:
    """Makes that many rounds with a server of its own, and returns what it counted."""
    import numpy as np

    from pyps_client import Client

    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin and server.stdout

        def line(begins: str) -> str:
            assert server.stdout
            return next(line for line in server.stdout if line.startswith(begins)).strip()

        def say(text: str) -> None:
            assert server.stdin
            print(text, file=server.stdin, flush=True)

        address = line("at ").removeprefix("at ")
        tensors = {"weights": np.zeros(1000, np.float32)}
        gradients = {"weights": np.ones(1000, np.float32)}
        with Client(tensors, servers=address, transport=transport) as client:
            for turn in range(rounds + 20):
                if turn == 20:
                    say("begin")
                    line("counting")
                client.exchange(gradients)
            say(str(rounds))
            counted: dict[str, Any] = json.loads(line("{"))
    return counted


def imports() -> Iterator[tuple[str, str]]:
    """Yields who imports whom among the modules of pyps, be it for types only or late in a function."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("pyps/**/*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            found = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                found = [
                    f"{node.module}.{each}" if f"{node.module}.{each}" in names else f"{node.module}" for each in found
                ]
            for other in found:
                # A module brings the packages that it lies in along.
                parts = other.split(".")
                packages = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
                yield from (
                    (name, each) for each in packages if each in names and not f"{name}.".startswith(f"{each}.")
                )


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Returns the groups of modules that reach one another."""
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
    """Returns the package, or the module beside them, that a module belongs to; `python -m pyps` is the commands'."""
    _, _, within = module.partition(".")
    return "cli" if within == "__main__" else within.split(".")[0]


def floors(edges: Mapping[str, set[str]]) -> int:
    """Returns how many packages stand on each other at most; those of a circle stand on one floor."""
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


def table(rounds: int) -> list[tuple[str, str]]:
    """Returns the measures with their values."""
    rows = []
    for name, transport in TRANSPORTS.items():
        counted = rounds_of(transport, rounds)
        rows.append(
            (
                f"calls a round, {name}",
                f"{counted['calls']}: {counted['functions']} functions in {counted['files']} files",
            )
        )
        rows.append(
            (f"climbs under a shard's lock, {name}", f"{len(counted['climbs'])}  {', '.join(counted['climbs'])}")
        )
        places = (f"{Path(site).relative_to(ROOT)} {often:g}" for site, often in sorted(counted["locks"].items()))
        rows.append((f"kinds of locks taken a round, {name}", f"{len(counted['locks'])}  {', '.join(places)}"))
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("pyps/**/*.py")]
    rows.append(("lines of pyps/", str(sum(sizes))))
    rows.append((f"files; below {SMALL} lines", f"{len(sizes)}; {sum(size < SMALL for size in sizes)}"))
    edges: dict[str, set[str]] = defaultdict(set)
    for importer, imported in imports():
        edges[importer].add(imported)
    found = circles(edges)
    rows.append(("import circles", f"{len(found)}  {'; '.join(', '.join(sorted(group)) for group in found)}"))
    rows.append(("floors of pyps/", str(floors(edges))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    for measure, value in table(options.rounds):
        print(f"| {measure} | {value} |" if options.markdown else f"{measure:40} {value}")


if __name__ == "__main__":
    main()
