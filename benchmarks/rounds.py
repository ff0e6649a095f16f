"""Push-and-pull rounds per second through a real server, by model size and workers, beside peers where given.

    python benchmarks/rounds.py [--peers FOLDER] [--sizes small,mid,big] [--workers 1,2] [--repeats 3]

In each round a worker rewrites its whole gradient and ends with the new parameters in its own torch parameters;
the peers do the same. Runs are interleaved (pyps, peer, peer, pyps, ...); cells are medians with the range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure import cpu_seconds, machine, peak_resident_bytes, percentile, spread
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0


@dataclass(frozen=True)
class Size:
    """A model to measure with: parameters in equal tensors, and how many rounds to time."""

    params: int
    keys: int
    rounds: int


SIZES = {
    "small": Size(params=10_000, keys=4, rounds=1000),
    "mid": Size(params=1_000_000, keys=20, rounds=100),
    "big": Size(params=25_600_000, keys=160, rounds=20),
}
PEERS = {
    "torch RPC auto": ["torch_rpc_ps.py", "--transport", "auto"],
    "torch RPC tcp": ["torch_rpc_ps.py", "--transport", "tcp"],
    "naive gRPC": ["naive_grpc_ps.py", "--socket", "tcp"],
}


class Server:
    """A `pyps serve` process on free ports, ended with the context."""

    def __init__(self, folder: Path):
        ready = folder / "ready.json"
        self._log = (folder / "server.log").open("w")
        command = [sys.executable, "-m", "pyps", "serve", "--port", "0", "--control-port", "0"]
        # Without a penalty for staleness every update is the full one, and the end can be checked against the formula.
        command += ["--metrics-port", "0", "--ready-file", str(ready), "--staleness", "none"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{(folder / 'server.log').read_text()}")
            time.sleep(0.02)
        self.address = str(json.loads(ready.read_text())["data"])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(START_SECONDS)
        self._log.close()


def run_pyps(size: Size, workers: int) -> dict[str, float]:
    """One measurement of ours: a server, `workers` processes, their timed rounds."""
    with tempfile.TemporaryDirectory(prefix="pyps-rounds-") as folder:
        server = Server(Path(folder))
        try:
            return measure(server, size, workers)
        finally:
            server.stop()


def measure(server: Server, size: Size, workers: int) -> dict[str, float]:
    """Starts the workers, lets all go at once, and sums up what they and the server's process tell."""
    command = [
        sys.executable,
        str(HERE / "round_worker.py"),
        "--params",
        str(size.params),
        "--keys",
        str(size.keys),
    ]
    command += ["--rounds", str(size.rounds), "--warmup", "3"]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "PYPS_SERVERS": server.address,
                "PYPS_RUN_ID": "rounds",
                "PYPS_WORKER_INDEX": str(index),
                "PYPS_WORKER_COUNT": str(workers),
            },
        )
        for index in range(workers)
    ]
    for process in processes:
        if read_line(process) != "ready":
            raise SystemExit("a worker failed before its rounds; its message stands above")
    cpu_before = cpu_seconds(server.process.pid)
    tell(processes, "go")
    timings = [json.loads(read_line(process)) for process in processes]
    cpu = cpu_seconds(server.process.pid) - cpu_before
    peak = peak_resident_bytes(server.process.pid)
    # One after the other, so that a worker's last pull holds a known number of updates.
    ends = []
    for process in processes:
        tell([process], "finish")
        ends.append(json.loads(read_line(process)))
    for process in processes:
        process.wait(START_SECONDS)
    wall = max(t["end"] for t in timings) - min(t["begin"] for t in timings)
    rounds = size.rounds * workers
    latencies = [value for t in timings for value in t["latencies"]]
    gigabytes = rounds * size.params * 8 / 1e9
    return {
        "rounds_per_s": rounds / wall,
        "p50_ms": percentile(latencies, 50) * 1e3,
        "p99_ms": percentile(latencies, 99) * 1e3,
        "server_cpu_s_per_gb": cpu / gigabytes,
        "server_peak_rss_x": peak / (size.params * 4),
        "verified": float(all(end["verified"] for end in ends)),
    }


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(processes: list[subprocess.Popen[str]], line: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


def run_peer(folder: Path, script: list[str], size: Size, workers: int) -> dict[str, float]:
    """One measurement of a peer; its JSON line has the same fields."""
    command = [sys.executable, str(HERE / "peers.py"), str(folder), *script, "--params", str(size.params)]
    command += ["--keys", str(size.keys), "--rounds", str(size.rounds), "--workers", str(workers)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        raise SystemExit(f"{script[0]} failed ({finished.returncode}):\n{finished.stderr[-2000:]}")
    return dict(json.loads(lines[-1]))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peers", type=Path, default=os.environ.get("PEERS"), help="folder of the peers' scripts")
    arguments.add_argument("--sizes", default="small,mid,big")
    arguments.add_argument("--workers", default="1,2")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--json", type=Path, help="also write every measurement here")
    options = arguments.parse_args()
    console = Console(width=150)
    console.print(machine("pyps", "torch", "grpcio", "protobuf", "numpy"), highlight=False)
    subjects: dict[str, list[str] | None] = {"pyps": None}
    if options.peers:
        subjects |= PEERS
    everything = []
    for size_name in options.sizes.split(","):
        for workers in map(int, options.workers.split(",")):
            size = SIZES[size_name]
            runs: dict[str, list[dict[str, float]]] = {subject: [] for subject in subjects}
            for repeat in range(options.repeats):
                for subject in list(subjects)[:: 1 if repeat % 2 == 0 else -1]:
                    script = subjects[subject]
                    run = run_pyps(size, workers) if script is None else run_peer(options.peers, script, size, workers)
                    runs[subject].append(run)
                    everything.append({"subject": subject, "size": size_name, "workers": workers, **run})
            console.print(table(f"{size_name}: {size.params:,} parameters, {workers} worker(s)", runs))
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


def table(title: str, runs: dict[str, list[dict[str, float]]]) -> Table:
    """One row a subject, with the ratio of our median speed to its."""
    drawn = Table(title=title, title_justify="left")
    for heading in (
        "",
        "rounds/s",
        "pyps is",
        "p50 ms",
        "p99 ms",
        "server CPU s/GB",
        "peak memory x model",
        "checked",
    ):
        drawn.add_column(heading, justify="left" if not heading else "right")
    ours = statistics.median(run["rounds_per_s"] for run in runs["pyps"])
    for subject, measured in runs.items():
        speeds = [run["rounds_per_s"] for run in measured]
        drawn.add_row(
            subject,
            spread(speeds),
            f"{ours / statistics.median(speeds):.2f} x",
            *(spread([run[name] for run in measured], 2) for name in ("p50_ms", "p99_ms", "server_cpu_s_per_gb")),
            spread([run["server_peak_rss_x"] for run in measured]),
            "yes" if all(run["verified"] for run in measured) else "NO",
        )
    return drawn


if __name__ == "__main__":
    main()
