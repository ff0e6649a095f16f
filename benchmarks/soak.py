"""Servers over time while workers come and go: their memory, descriptors and threads, which should stay as they are.

    python benchmarks/soak.py [--minutes 20] [--servers 2] [--workers 4] [--json FILE] [--picture FILE]

Workers live for some seconds each, by any transport and encoding, and end in any way: finished, by SIGTERM, by kill -9.
Another comes at once, half the time under the same name. Servers write checkpoints all the while.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pictures
from measure import exit_on_sigterm, machine, memory_bytes, write_results

WORKER = Path(__file__).with_name("faults_worker.py")
START_SECONDS, END_SECONDS = 120.0, 120.0
LIVES_SECONDS = (4.0, 40.0)
# An encoding of few bits does not go by shared memory.
WAYS = (
    {"PYPS_TRANSPORT": "shm"},
    {"PYPS_TRANSPORT": "tcp"},
    {"PYPS_TRANSPORT": "grpc"},
    {"PYPS_TRANSPORT": "tcp", "PYPS_GRADIENT_CODEC": "int4", "PYPS_PARAMETER_CODEC": "int8"},
    {"PYPS_TRANSPORT": "grpc", "PYPS_GRADIENT_CODEC": "topk"},
)
ENDS = ("finished", "SIGTERM", "kill -9")
POINTS = 240
# The shares of the time whose medians are compared: once all is warm, and the end.
EARLY, LATE = (0.15, 0.35), (0.8, 1.0)


def main() -> int:
    options = arguments()
    exit_on_sigterm()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="pyps-soak-") as kept:
        rows, facts = soaked(Path(kept), options)
    facts |= {"minutes": options.minutes, "workers": options.workers, "summary": summary(rows)}
    print(json.dumps(facts, indent=1))
    write_results(options.json, rows, **facts)
    if options.picture is not None and (figure := pictures.soak({"soak": {"rows": rows}})):
        figure.savefig(options.picture, dpi=110, bbox_inches="tight")
    return 1 if facts["said"] or facts["failed"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=6, help="at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    parser.add_argument("--picture", type=Path, help="also draw them here")
    return parser.parse_args()


def soaked(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the servers had at each moment, and what became of the workers."""
    draw = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(folder, index)) for index in range(options.servers)]
        addresses = ",".join(address for _, address in servers)
        crew = Crew(folder, addresses, draw)
        stack.callback(crew.end)
        began = time.monotonic()
        rows: list[dict[str, Any]] = []
        while (now := time.monotonic() - began) < 60 * options.minutes:
            crew.fill(options.workers)
            if now >= len(rows) / len(servers) * 60 * options.minutes / POINTS:
                rows += [{"at_s": now, "server": index, **state_of(pid)} for index, (pid, _) in enumerate(servers)]
            time.sleep(0.1)
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.log"))]
    # Whatever a person would have to look into.
    said = [
        line for text in logs for line in text.splitlines() if "Traceback" in line or " ERROR " in line or "bug" in line
    ]
    return rows, {
        "lives": sum(crew.ended.values()),
        "ended": dict(crew.ended),
        "failed": crew.failed,
        "said": said[:20],
    }


@contextlib.contextmanager
def serving(folder: Path, index: int) -> Iterator[tuple[int, str]]:
    """A server process, as its process id and address."""
    ready, log = folder / f"server-{index}.json", folder / f"server-{index}.log"
    command = [sys.executable, "-P", "-m", "pyps", "serve", "--port", "0", "--control-port", "0", "--metrics-port", "0"]
    command += ["--run-id", "soak", "--ready-file", str(ready), "--checkpoint-dir", str(folder / f"server-{index}")]
    command += ["--checkpoint-seconds", "5", "--lease-seconds", "6", "--heartbeat-seconds", "1"]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {log.read_text(encoding='utf-8')[-1000:]}")
            time.sleep(0.05)
        yield process.pid, json.loads(ready.read_text(encoding="utf-8"))["data"]
    finally:
        process.terminate()
        process.wait(END_SECONDS)


@dataclass
class Life:
    """One life of a worker: how and when it is to end."""

    process: subprocess.Popen[bytes]
    name: str
    end: Path
    how: str
    ends_at: float
    told: bool = False


class Crew:
    """Workers, as many as are wanted at once."""

    def __init__(self, folder: Path, addresses: str, draw: random.Random):
        self._folder, self._draw = folder, draw
        self._environment = os.environ | {"PYPS_SERVERS": addresses, "PYPS_RUN_ID": "soak", "PYPS_PROCESS_HOOKS": "1"}
        self._lives: list[Life] = []
        self._count = 0
        self.ended: Counter[str] = Counter()
        # Statuses that a worker should not have ended with.
        self.failed: list[str] = []

    def fill(self, count: int) -> None:
        """End those whose time has come, and start others in their places."""
        for life in [*self._lives]:
            if life.process.poll() is None:
                if not life.told and time.monotonic() >= life.ends_at:
                    self._tell(life)
                continue
            # SIGTERM may come before the client is there.
            expected = {
                "finished": {0},
                "SIGTERM": {128 + signal.SIGTERM, -signal.SIGTERM},
                "kill -9": {-signal.SIGKILL},
            }
            if life.process.returncode not in expected[life.how]:
                self.failed.append(f"{life.name}, to be {life.how}: status {life.process.returncode}")
            self.ended[life.how] += 1
            self._lives.remove(life)
        while len(self._lives) < count:
            self._start()

    def end(self) -> None:
        """End all that are left."""
        for life in self._lives:
            life.process.kill()
            life.process.wait()

    def _start(self) -> None:
        self._count += 1
        # A name that was there before comes back with its key.
        earlier = {f"worker-{number}" for number in range(4)} - {life.name for life in self._lives}
        name = self._draw.choice(sorted(earlier)) if earlier and self._count % 2 else f"guest-{self._count}"
        end, journal = self._folder / f"end-{self._count}", Path(os.devnull)
        own = {"PYPS_WORKER_ID": name, "PYPS_WORKER_KEY": f"the key of {name:10}", **self._draw.choice(WAYS)}
        with (self._folder / "workers.log").open("a", encoding="utf-8") as log:
            command = [sys.executable, str(WORKER), str(end), str(journal)]
            process = subprocess.Popen(command, env=self._environment | own, stdout=log, stderr=log)
        lives = self._draw.uniform(*LIVES_SECONDS)
        how = self._draw.choice(ENDS)
        self._lives.append(Life(process, name, end, how, time.monotonic() + lives))

    def _tell(self, life: Life) -> None:
        life.told = True
        if life.how == "finished":
            life.end.touch()
        else:
            life.process.send_signal(signal.SIGTERM if life.how == "SIGTERM" else signal.SIGKILL)


def state_of(pid: int) -> dict[str, float]:
    """What a server holds now."""
    return {
        "memory_mb": memory_bytes(pid, "VmRSS") / 1e6,
        "descriptors": len([*Path(f"/proc/{pid}/fd").iterdir()]),
        "threads": len([*Path(f"/proc/{pid}/task").iterdir()]),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """The median of each early and late, over all servers."""
    length = max((row["at_s"] for row in rows), default=0.0)
    found = {}
    for what in ("memory_mb", "descriptors", "threads"):
        found[what] = [
            statistics.median(row[what] for row in rows if begin * length <= row["at_s"] <= end * length)
            for begin, end in (EARLY, LATE)
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
