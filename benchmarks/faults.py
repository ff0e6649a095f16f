"""What each fault costs a run: who notices, how long it stands still, and which acknowledged pushes are lost.

    python benchmarks/faults.py [--protocols async,hardsync] [--faults "server 0,link"] [--json FILE]     (as root)

Two servers and three workers are processes in network namespaces, a link each (`network.py`); servers, workers and the
coordinator are started again a second after they were killed, as by an engine. Servers write a checkpoint every two
seconds, and a log of updates, in which each acknowledged push is looked for afterwards. Leases are short
(`LEASE_SECONDS`): what a lease finds takes as much longer as `--lease-seconds` is longer.

The faults named "digits" kill each server twice and each of four workers once, at random (`--seed`), while they train
on scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from measure import exit_on_sigterm, machine, write_results
from network import INTERFACE, Switch, unavailable

HERE = Path(__file__).resolve().parent
PYPS = (sys.executable, "-P", "-m", "pyps")
PROTOCOLS = {
    "async": "async",
    "hardsync": "hardsync",
    "softsync": "softsync:n=1",
    "backup": "backup:b=1",
    "ssp": "ssp:s=3",
    "serial": "serial",
    "sandblaster": "sandblaster",
}
NUM_SERVERS, NUM_WORKERS = 2, 3
LEASE_SECONDS, STANDBY_LEASE_SECONDS, CHECKPOINT_SECONDS = 6.0, 3.0, 2.0
STOPPED_SECONDS, CUT_SECONDS, SLOW_SECONDS, FULL_SECONDS = 15.0, 40.0, 30.0, 10.0
RESTART_SECONDS = 1.0
START_SECONDS, AGAIN_SECONDS, END_SECONDS = 120.0, 120.0, 120.0
# Steps of each worker before the fault, and after it.
STEPS = 20
# A worker that takes longer for a step stands still.
STILL_SECONDS = 0.5
SOON_SECONDS = 2.0
SENT = ("worker_id", "incarnation", "sequence")
# Between two kills of the digits' servers and workers, and how often each server is killed.
PAUSE_SECONDS, KILLS_EACH = (2.0, 8.0), 2
ACCURACY_MIN = 0.95
# Room for a dozen checkpoints.
DISK_BYTES = 16 * 2**20
ITERATIONS = 100
# A line that tells of a fault, of servers, workers or the launcher.
NOTICED = re.compile(
    r"WARN|ERROR|waiting for|no word from|expired|not answer|does not|cannot|killed by|ended with|gone"
)


class Child:
    """A process with a group of its own, whose lines are noted with their time."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], lines: list[tuple[float, str, str]]
    ):
        self.name, self.command, self.environment, self._lines = name, command, environment, lines
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self.command,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append((time.monotonic(), self.name, line.rstrip()))

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and what it started, for good."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def start_again(self, *flags: str) -> None:
        """Start it again, with more flags if there are some."""
        self._process.wait()
        time.sleep(RESTART_SECONDS)
        self.command = [*self.command, *flags]
        self._start()

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


@dataclass
class Cluster:
    """Servers, workers and a coordinator, each in its place; or one `pyps run` on loopback."""

    protocol: str
    folder: Path
    switch: Switch
    launched: bool
    fault: Fault
    seed: int
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    children: dict[str, Child] = field(default_factory=dict)

    def __enter__(self) -> Cluster:
        disk = self.folder / "disk"
        disk.mkdir()
        # Before the processes: each has the mounts of its start.
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
        self._start_launcher() if self.launched else self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children.values():
            child.signal(signal.SIGCONT)
        (self.folder / "end").touch()
        for name in self._names("worker", "coordinator", "launcher"):
            self.children[name].wait(END_SECONDS if error is None else 0)
        for name in self._names("server", "standby"):
            self.children[name].signal(signal.SIGTERM)
            self.children[name].wait(END_SECONDS if error is None else 0)
        for child in self.children.values():
            child.kill()
        subprocess.run(["umount", "--lazy", self.folder / "disk"], check=False)

    @property
    def flags(self) -> list[str]:
        return ["--protocol", PROTOCOLS[self.protocol], "--staleness", "none"]

    @property
    def settings(self) -> dict[str, str]:
        return {
            "PYPS_CHECKPOINT_SECONDS": f"{CHECKPOINT_SECONDS:g}",
            "PYPS_LEASE_SECONDS": f"{LEASE_SECONDS:g}",
            "PYPS_STANDBY_LEASE_SECONDS": f"{STANDBY_LEASE_SECONDS:g}",
            "PYPS_HEARTBEAT_SECONDS": "1",
            "PYPS_DURABILITY": self.fault.durability,
            "PYPS_PROCESS_HOOKS": "1",
            "OMP_NUM_THREADS": "1",
        }

    def _start(self) -> None:
        for index in range(NUM_SERVERS):
            self._start_server(f"server {index}")
        for index in range(self.fault.standbys):
            self._start_server(f"standby {index}", *self.following(f"server {index}"))
        addresses = ",".join(self.address(f"server {index}") for index in range(NUM_SERVERS))
        shared = {"PYPS_SERVERS": addresses, "PYPS_RUN_ID": "faults", "PYPS_WORKER_COUNT": str(self.num_workers)}
        if self.protocol == "sandblaster":
            work = ("--portions", "15", "--iterations", str(ITERATIONS), "--tolerance", "0", "--loss-tolerance", "0")
            self._add("coordinator", [*self.switch.on_server, *PYPS, "coordinate", *work], shared)
        for index, place in enumerate(self.switch.on_workers):
            own = {"PYPS_WORKER_INDEX": str(index), "PYPS_WORKER_KEY": f"key of worker {index:4}"}
            own["PYPS_WORKER_ID"] = f"worker-{index}"
            self._add(f"worker {index}", [*place, *self._worker(index)], shared | own)

    @property
    def num_workers(self) -> int:
        return len(self.switch.on_workers)

    def address(self, server: str) -> str:
        return f"{self.switch.server_address}:{port_of(server)}"

    def following(self, server: str) -> tuple[str, ...]:
        return ("--no-resume", "--standby-of", self.address(server))

    def _start_server(self, name: str, *flags: str) -> None:
        command = [*self.switch.on_server, *PYPS, "serve", "--insecure", *self.flags]
        command += ["--host", self.switch.server_address]
        ports = ("--port", "--control-port", "--metrics-port", "--lane-port")
        for number, flag in enumerate(ports, start=port_of(name)):
            command += [flag, str(number)]
        command += ["--run-id", "faults", "--expected-workers", str(self.num_workers)]
        command += ["--checkpoint-dir", str(self.folder / "disk" / name), "--resume", *flags]
        if self.protocol != "sandblaster":
            command += ["--update-log", str(self.folder / "logs" / name)]
        self._add(name, command, {})

    def _start_launcher(self) -> None:
        folder = self.folder
        command = [*PYPS, "run", "--servers", str(NUM_SERVERS), "--workers", str(NUM_WORKERS), *self.flags]
        command += ["--checkpoint-dir", str(folder / "disk"), "--resume"]
        command += ["--update-log", str(folder / "logs"), "--verbose"]
        journal = f"{sys.executable} {HERE / 'faults_worker.py'} {folder / 'end'} {folder}/journal-$PYPS_WORKER_INDEX"
        self._add("launcher", [*command, "--", "sh", "-c", f"exec {journal}"], {})

    def _worker(self, index: int) -> list[str]:
        what = ["--sandblaster", "--pace", "0.05"] * (self.protocol == "sandblaster") or self.fault.train
        command = [sys.executable, str(HERE / "faults_worker.py"), str(self.folder / "end")]
        return [*command, str(self.folder / f"journal-{index}"), *what]

    def _add(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.children[name] = Child(name, command, self.settings | environment, self.lines)

    def _names(self, *kinds: str) -> list[str]:
        return [name for name in self.children if name.startswith(kinds)]

    def steps(self, worker: int) -> list[dict[str, Any]]:
        """What the worker has noted so far; the last line may be half of one."""
        path = self.folder / f"journal-{worker}"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_steps(self, count: int, *, after: float = 0.0, seconds: float) -> bool:
        """Wait until each worker has so many steps that ended after a time, or has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            late = [
                worker
                for worker in range(self.num_workers)
                if sum(step["at"] > after for step in self.steps(worker)) < count and not self.ended(worker)
            ]
            if not late:
                return True
            time.sleep(0.2)
        return False

    def wait_for_checkpoints(self) -> None:
        """Wait until each server has begun a checkpoint, and ended it."""
        folders = [path for path in (self.folder / "disk").iterdir() if path.is_dir()]
        # The first may have begun before.
        wanted = {path: newest_checkpoint(path) + 2 for path in folders}
        deadline = time.monotonic() + AGAIN_SECONDS
        while any(newest_checkpoint(path) < number for path, number in wanted.items()):
            if time.monotonic() > deadline:
                raise TimeoutError("no checkpoint after a worker's end")
            time.sleep(0.1)

    def wait_for_standby(self, server: str) -> None:
        """Wait until the server's standby has all it has."""
        control = f"{self.switch.server_address}:{port_of(server) + 1}"
        command = [*self.switch.on_server, *PYPS, "status", "--servers", control]
        deadline = time.monotonic() + AGAIN_SECONDS
        while "follows" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no standby follows {server}")
            time.sleep(0.2)

    def ended(self, worker: int) -> bool:
        return not self.launched and self.children[f"worker {worker}"].returncode is not None


@contextlib.contextmanager
def killed(cluster: Cluster, name: str) -> Iterator[None]:
    cluster.children[name].signal(signal.SIGKILL)
    yield
    cluster.children[name].start_again()


@contextlib.contextmanager
def ended(cluster: Cluster, name: str) -> Iterator[None]:
    """Kill it for good."""
    cluster.children[name].signal(signal.SIGKILL)
    yield


@contextlib.contextmanager
def stopped(cluster: Cluster, name: str) -> Iterator[None]:
    cluster.children[name].signal(signal.SIGSTOP)
    yield
    cluster.children[name].signal(signal.SIGCONT)


@contextlib.contextmanager
def cut(cluster: Cluster, worker: int) -> Iterator[None]:
    # The first port is that of the servers.
    port = ("ip", "-n", cluster.switch.switch_namespace, "link", "set", f"port{worker + 2}")
    subprocess.run([*port, "down"], check=True)
    yield
    subprocess.run([*port, "up"], check=True)


@contextlib.contextmanager
def slow(cluster: Cluster, worker: int) -> Iterator[None]:
    # Both ends: each limits what it sends.
    ends = ((cluster.switch.on_workers[worker][-1], INTERFACE), (cluster.switch.switch_namespace, f"port{worker + 2}"))
    for rate in ("1mbit", cluster.switch.rate):
        for namespace, interface in ends:
            bucket = ("tbf", "rate", rate, "burst", "32kb" if rate == "1mbit" else "256kb", "latency", "400ms")
            subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket], check=True)
        if rate == "1mbit":
            yield


@contextlib.contextmanager
def full(cluster: Cluster) -> Iterator[None]:
    filler = cluster.folder / "disk" / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield
    filler.unlink()


def port_of(server: str) -> int:
    kind, _, index = server.partition(" ")
    return {"server": 7610, "standby": 7650}[kind] + 10 * int(index)


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.stem.rpartition("-")[2]) for path in folder.glob("checkpoint-*.json")), default=0)


@contextlib.contextmanager
def killed_at_random(cluster: Cluster) -> Iterator[None]:
    """Kill each server KILLS_EACH times and each worker once; a server that has a standby changes places with it."""
    draw = random.Random(cluster.seed)
    victims = [f"server {index}" for index in range(NUM_SERVERS)] * KILLS_EACH
    victims += [f"worker {index}" for index in range(cluster.num_workers)]
    draw.shuffle(victims)
    places = {f"server {index}": (f"server {index}", f"standby {index}") for index in range(cluster.fault.standbys)}
    back = 0.0
    for victim in victims:
        serving, following = places.get(victim, (victim, ""))
        is_worker = victim.startswith("worker")
        if following:
            cluster.wait_for_standby(serving)
        elif is_worker and not places:
            # What a worker keeps for a server that was away dies with it: by its next step all was sent.
            cluster.wait_for_steps(1, after=back, seconds=AGAIN_SECONDS)
        time.sleep(draw.uniform(*PAUSE_SECONDS))
        cluster.children[serving].signal(signal.SIGKILL)
        if following:
            places[victim] = following, serving
        cluster.children[serving].start_again(*(cluster.following(following) if following else ()))
        if not is_worker:
            back = time.monotonic()
        elif not places:
            cluster.wait_for_checkpoints()
    yield


@dataclass(frozen=True)
class Fault:
    """What is done, whose own lines do not count as having noticed it, and for how long."""

    do: Callable[[Cluster], contextlib.AbstractContextManager[None]]
    victim: str = ""
    seconds: float = 0.0
    # How many servers have a standby.
    standbys: int = 0
    durability: str = "resend"
    num_workers: int = NUM_WORKERS
    # Flags of the workers.
    train: tuple[str, ...] = ()


def of_process(name: str) -> dict[str, Fault]:
    return {
        f"kill -9 {name}": Fault(lambda cluster: killed(cluster, name), name),
        f"SIGSTOP {name}": Fault(lambda cluster: stopped(cluster, name), name, STOPPED_SECONDS),
    }


FAULTS = {
    **of_process("server 0"),
    **of_process("server 1"),
    **of_process("worker 1"),
    **of_process("coordinator"),
    **of_process("launcher"),
    "cut worker 1's link": Fault(lambda cluster: cut(cluster, 1), "worker 1", CUT_SECONDS),
    "1 Mbit/s for worker 1": Fault(lambda cluster: slow(cluster, 1), "worker 1", SLOW_SECONDS),
    "full disk of servers": Fault(full, seconds=FULL_SECONDS),
    "kill -9 server 0, followed": Fault(lambda cluster: ended(cluster, "server 0"), "server 0", standbys=1),
    "SIGSTOP server 0, followed": Fault(
        lambda cluster: stopped(cluster, "server 0"), "server 0", STOPPED_SECONDS, standbys=1
    ),
    "kill -9 server 0, not resent": Fault(lambda cluster: killed(cluster, "server 0"), "server 0", durability="none"),
    **{
        f"{data} {how}": Fault(killed_at_random, standbys=standbys, num_workers=4, train=train)
        for how, standbys in (("resent", 0), ("followed", NUM_SERVERS))
        for data, train in (("digits", ("--digits",)), ("digits by portions", ("--digits", "--portions")))
    },
}


def main() -> int:
    options = arguments()
    exit_on_sigterm()
    print(machine(), flush=True)
    if reason := unavailable():
        print(f"faults: skipped, {reason}")
        write_results(options.json, [], skipped=reason)
        return 0
    earlier = (
        json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json and options.json.exists() else []
    )
    rows = {(row["protocol"], row["fault"]): row for row in earlier}
    failed = False
    for protocol in options.protocols.split(","):
        for name, fault in FAULTS.items():
            if applies(fault, protocol) and any(part in name for part in options.faults.split(",")):
                row = one(protocol, name, fault, seed=options.seed, keep=options.keep)
                print(json.dumps(row), flush=True)
                rows[protocol, name] = row
                write_results(options.json, [*rows.values()], lease_s=LEASE_SECONDS, checkpoint_s=CHECKPOINT_SECONDS)
                failed |= bool(row["applied_twice"]) or not row["goes_on"]
                failed |= bool(row["lost"]) and fault.durability == "resend"
                failed |= fault.num_workers != NUM_WORKERS and row.get("accuracy", 0.0) < ACCURACY_MIN
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="by default all")
    parser.add_argument("--faults", default="", help="those with one of these texts in their name")
    parser.add_argument("--seed", type=int, default=1, help="of whom the digits lose when")
    parser.add_argument("--keep", type=Path, help="keep the lines of all processes here, a file a run")
    parser.add_argument("--json", type=Path, help="also write every measurement here; what it has of others stays")
    return parser.parse_args()


def applies(fault: Fault, protocol: str) -> bool:
    """`pyps run` has no Sandblaster, only that has a coordinator, and what is about pushes is not about that."""
    if protocol == "sandblaster":
        return fault.victim != "launcher" and not fault.standbys and fault.durability != "none" and not fault.train
    return fault.victim != "coordinator" and (not fault.train or protocol == "async")


def one(protocol: str, name: str, fault: Fault, *, seed: int, keep: Path | None) -> dict[str, Any]:
    """One run with one fault."""
    with tempfile.TemporaryDirectory(prefix="pyps-faults-") as kept, Switch("1gbit", fault.num_workers) as switch:
        folder = Path(kept)
        launched = fault.victim == "launcher"
        cluster = Cluster(protocol, folder, switch, launched, fault, seed)
        at = time.monotonic()
        try:
            with cluster:
                begun = cluster.wait_for_steps(STEPS, seconds=START_SECONDS)
                # A checkpoint of what they have trained, and training after it.
                time.sleep(2 * CHECKPOINT_SECONDS)
                at = time.monotonic()
                with fault.do(cluster):
                    time.sleep(fault.seconds)
                over = time.monotonic()
                goes_on = begun and cluster.wait_for_steps(STEPS, after=over, seconds=AGAIN_SECONDS)
        finally:
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                text = "".join(f"{when - at:8.2f} {who}: {line}\n" for when, who, line in cluster.lines)
                (keep / f"{protocol} {name.replace('/', ' in a ')} {seed}.log").write_text(text, encoding="utf-8")
        steps = [cluster.steps(worker) for worker in range(fault.num_workers)]
        ends = [[(step["at"], step["life"]) for step in of if not {"crc", "accuracy"} & step.keys()] for of in steps]
        others = [of for worker, of in enumerate(ends) if fault.victim not in {f"worker {worker}", "launcher"}]
        row = {"protocol": protocol, "fault": name, "begun": begun, "goes_on": goes_on}
        row |= noticed(cluster.lines, at, fault)
        # The longest step of a worker that was not hit itself, and when the last of all was back to its pace.
        row["still_s"] = max((length for length, _, is_step in gaps(others, at, over) if is_step), default=0.0)
        row["again_s"] = max((end - at for _, end, _ in gaps(ends, at, over)), default=0.0) if goes_on else None
        crcs = sorted({step["crc"] for of in steps for step in of if "crc" in step})
        accuracies = [step["accuracy"] for of in steps for step in of if "accuracy" in step]
        row |= {"crcs": crcs} if crcs else {}
        row |= {"accuracy": min(accuracies)} if accuracies else {}
        return row | kept_of(folder, steps)


def noticed(lines: Sequence[tuple[float, str, str]], at: float, fault: Fault) -> dict[str, Any]:
    """Who said first that something is wrong."""
    for when, who, line in lines:
        if when > at and who != fault.victim and NOTICED.search(line):
            return {"noticed_s": when - at, "noticed_by": who, "noticed": line}
    return {"noticed_s": None, "noticed_by": None, "noticed": None}


def gaps(ends: Sequence[Sequence[tuple[float, int]]], at: float, over: float) -> list[tuple[float, float, bool]]:
    """The length and the end of each long step that was under way while the fault lasted, or soon after.

    Between two lives of a worker is no step.
    """
    pairs = (pair for of in ends for pair in itertools.pairwise(of))
    soon = over + SOON_SECONDS
    return [
        (end - begin, end, life == before)
        for (begin, before), (end, life) in pairs
        if end > at and begin < soon and end - begin > STILL_SECONDS
    ]


def kept_of(folder: Path, steps: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Look for each acknowledged push in the updates of which the last parameters were made, and those yet to come."""
    acknowledged = {tuple(push) for of in steps for step in of for push in step.get("accepted", ())}
    applied: Counter[tuple[Any, ...]] = Counter()
    waiting: set[tuple[Any, ...]] = set()
    lives: dict[int, list[tuple[int, int, Path]]] = {}
    for path in folder.glob("logs/**/*.jsonl"):
        begin = next(lines_of(path))
        lives.setdefault(begin["shard_id"], []).append((begin["run"]["epoch"], begin["version"], path))
    for shard_id, of_shard in lives.items():
        of_shard.sort()
        for number, (_, _, path) in enumerate(of_shard):
            # A later life went on from its first version: what came after that in an earlier one is lost.
            limit = min((version for _, version, _ in of_shard[number + 1 :]), default=sys.maxsize)
            for line in lines_of(path):
                if number == len(of_shard) - 1:
                    pending = [line] * (line.get("outcome") == "pending")
                    pending += [one["gradient"] for one in line.get("pending", ())]
                    waiting |= {(shard_id, *(one[name] for name in SENT)) for one in pending}
                if "update" in line and line["version_after" if "version_after" in line else "version"] <= limit:
                    applied.update((shard_id, *(part[name] for name in SENT)) for part in line["update"]["parts"])
    # A push counts as lost where one of its shards is.
    return {
        "acknowledged": len({push[1:] for push in acknowledged}),
        "lost": len({push[1:] for push in acknowledged - applied.keys() - waiting}),
        "applied_twice": sum(count > 1 for count in applied.values()),
    }


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an update log; the last may be half of one."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
