"""How heavy each side is: the calls and files of a server's round and of a worker's step, lines, shape of imports.

python scripts/weight.py [--side server|client] [--rounds 200] [--markdown]

A step is that of a RemoteOptimizer over a model of one shard on one server, background threads included; a round is
what the server does for it: a push, its update by Adagrad and a pull. Both run under `sys.setprofile`, the server in a
process of its own; what is counted are calls of Python functions of ours, generated code left out. Up to Python 3.11 a
comprehension is a call, and so is each resume of a generator.
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
# Each side's package, the folder that it lies in, and what of it runs besides.
SIDES = {"server": ("pyps", ROOT), "client": ("pyps_client", ROOT / "client")}
WIRE = f"{ROOT}/client/pyps_wire/"
CORE = f"{ROOT}/pyps/core/"
SHARD = f"{CORE}shard.py"
SMALL = 70
TRANSPORTS = {"gRPC": "grpc", "shared memory": "shm"}
# Longer than what a step leaves to background threads takes.
BACKGROUND_SECONDS = 0.01
# Steps before those that are counted.
WARM_UP = 20


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
    """What one side calls, and which locks it takes, while this is on."""

    def __init__(self, side: str) -> None:
        package, folder = SIDES[side]
        self._ours = (f"{folder}/{package}/", WIRE)
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.climbs: Counter[str] = Counter()
        self.locks: Counter[str] = Counter()
        self._held = threading.local()

    def watch_locks(self) -> None:
        """Watches every lock that we make from now on."""
        threading.Lock = self._maker(threading.Lock)  # type: ignore[assignment]
        threading.RLock = self._maker(threading.RLock)  # type: ignore[assignment]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches this thread, and all that begin meanwhile."""
        sys.setprofile(self._note)
        threading.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        """Counts from nothing on."""
        for counter in (self.calls, self.climbs, self.locks):
            counter.clear()
        self.on = True

    def taken(self, site: str, change: int) -> None:
        """Notes that this thread takes a lock or lets it go."""
        held = self._held.__dict__
        held[site] = held.get(site, 0) + change
        if self.on and change > 0:
            self.locks[site] += 1

    def report(self, rounds: int) -> dict[str, Any]:
        """The figures of so many rounds."""
        # What comes by the clock, such as a heartbeat, is no part of them.
        often = {place for place, count in self.calls.items() if count >= rounds / 2}
        return {
            "calls": round(sum(self.calls[place] for place in often) / rounds),
            "functions": sorted(f"{Path(file).relative_to(ROOT)}:{function}" for file, function in often),
            "files": sorted({f"{Path(file).relative_to(ROOT)}" for file, _ in often}),
            "climbs": sorted(edge for edge, count in self.climbs.items() if count >= rounds),
            "locks": {site: round(count / rounds, 1) for site, count in self.locks.items() if count >= rounds},
        }

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self.on or not code.co_filename.startswith(self._ours) or "_pb2" in code.co_filename:
            return
        self.calls[code.co_filename, code.co_qualname] += 1
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(CORE):
            under_lock = any(n and site.startswith(SHARD) for site, n in self._held.__dict__.items())
            if under_lock and code.co_filename.startswith(self._ours[0]) and not code.co_filename.startswith(CORE):
                self.climbs[f"{caller.f_code.co_qualname} -> {code.co_qualname}"] += 1

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
    """A server that counts between two lines of stdin and tells what it counted, and ends with its input."""
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
        """Counts from here on."""
        self._say("begin")
        self._line("counting")

    def counted(self, rounds: int) -> dict[str, Any]:
        """What was counted since, for one of so many rounds."""
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
    """Starts a server."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Server(process)


def steps_of(
    server: Server, transport: str, rounds: int, *, overlap: Literal["off", "step"] = "off"
) -> dict[str, dict[str, Any]]:
    """Makes that many steps in this process, and returns what each side counted."""
    import torch

    from pyps_client import RemoteOptimizer

    profile = Profile("client")
    model = torch.nn.Linear(10, 10, bias=False)
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with (
        profile.watching(),
        RemoteOptimizer(
            *(model, adagrad, server.address), run_id="weight", transport=transport, overlap=overlap
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
    """Returns the modules of a side's package, packages by their own names."""
    package, folder = SIDES[side]
    found = {}
    for path in folder.glob(f"{package}/**/*.py"):
        found[".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(names: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yields who imports whom among these modules, be it for types only or late in a function.

    Of a package itself only what it loads at once: the rest are names that it hands on when they are asked for.
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


def circles_in_words(edges: Mapping[str, set[str]]) -> str:
    """How many circles there are, and of which modules."""
    found = circles(edges)
    return f"{len(found)}  {'; '.join(', '.join(sorted(group)) for group in found)}"


def calls_in_words(counted: Mapping[str, Any]) -> str:
    """The calls of a round or step, and where they are."""
    return f"{counted['calls']}: {len(counted['functions'])} functions in {len(counted['files'])} files"


def edges_of(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """Returns whom each of these modules imports."""
    edges: dict[str, set[str]] = defaultdict(set)
    for importer, imported in imports(names):
        edges[importer].add(imported)
    return edges


def of_server(rounds: int) -> Iterator[tuple[str, str]]:
    """Yields the server's measures with their values."""
    with started() as server:
        for name, transport in TRANSPORTS.items():
            counted = steps_of(server, transport, rounds)["server"]
            yield f"calls a round, {name}", calls_in_words(counted)
            yield f"climbs under a shard's lock, {name}", f"{len(counted['climbs'])}  {', '.join(counted['climbs'])}"
            places = (f"{Path(site).relative_to(ROOT)} {often:g}" for site, often in sorted(counted["locks"].items()))
            yield f"kinds of locks taken a round, {name}", f"{len(counted['locks'])}  {', '.join(places)}"
    names = sources("server")
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in names.values()]
    yield "lines of pyps/", str(sum(sizes))
    yield f"files; below {SMALL} lines", f"{len(sizes)}; {sum(size < SMALL for size in sizes)}"
    edges = edges_of(names)
    yield "import circles", circles_in_words(edges)
    yield "floors of pyps/", str(floors(edges))


def of_client(rounds: int) -> Iterator[tuple[str, str]]:
    """Yields the client's measures with their values."""
    with started() as server:
        for name, transport in TRANSPORTS.items():
            yield f"calls a step, {name}", calls_in_words(steps_of(server, transport, rounds)["client"])
            counted = steps_of(server, transport, rounds, overlap="step")["client"]
            yield f"calls a step, {name}, overlap", calls_in_words(counted)
    names = sources("client")
    texts = [path.read_text(encoding="utf-8") for path in names.values()]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    found = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]
    yield "lines of pyps_client/; of imports", f"{sum(len(text.splitlines()) for text in texts)}; {sum(lines)}"
    edges = edges_of(names)
    importers = Counter(imported for others in edges.values() for imported in others)
    lonely = sorted(name for name, often in importers.items() if often == 1 and names[name].name != "__init__.py")
    yield "files; with one importer", f"{len(names)}; {len(lonely)}  {', '.join(lonely)}"
    views = sorted(
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
    )
    yield "Protocol classes", f"{len(views)}  {', '.join(views)}"
    yield "import circles", circles_in_words(edges)


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
    for side, measures in (("server", of_server), ("client", of_client)):
        if options.side in (None, side):
            for measure, value in measures(options.rounds):
                print(f"| {measure} | {value} |" if options.markdown else f"{measure:40} {value}")


if __name__ == "__main__":
    main()
