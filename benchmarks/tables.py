"""Tables of rows: the speed of the server's own, of a worker's steps beside the peers, and rows beyond a limit.

    python benchmarks/tables.py [--only kernel,workers,large,clicks] [--subjects NAME,NAME] [--dims 64,16] [--seconds 5]
        [--json FILE]

* kernel: a table of a million rows of any ids, on one thread, in CPU time: rows a second that are looked up, and that
  are updated with row-wise Adagrad, in batches of the unique ids of 8,192. Beside it stands torch, one thread too, with
  rows by their places, so that it need not find them: `index_select`, and a step of Adagrad with a sparse gradient.
* workers: steps a second with 26 tables (`tables_worker.py`). Redis and torch RPC keep tables outside the worker, as
  servers do; the others in its own memory, so these show what is possible. Processes that others have to run beside
  compute on one thread each; torch RPC is measured with two threads too, which suits it better on an idle machine.
* large: ten million rows of 64 numbers on two servers, pushed by a worker that may have half of their bytes for its
  data (RLIMIT_DATA, from its start), and what becomes of nn.EmbeddingBag in a process with that limit.
* clicks: the AUC to which examples/dlrm.py comes on two servers with three workers, beside one process alone.

Redis is measured if `redis-server` is there, its client and torchrec under the Pythons that PEERS_PYTHON_REDIS and
PEERS_PYTHON_TORCHREC name; what is missing is left out, by name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peers
import torch
from measure import exit_on_sigterm, machine, memory_bytes, write_results
from processes import Processes
from rich.console import Console
from rich.table import Table
from rounds import Row
from tables_worker import BATCH, LARGE_DIM, TABLES, Ids, drawn
from trial import Failed, Server

from pyps import _kernels
from pyps_wire.codecs import FLOAT32
from training import free_port

SCRIPT = Path(__file__).with_name("tables_worker.py")
EXAMPLE = SCRIPT.parent.parent / "examples" / "dlrm.py"
PARTS = ("kernel", "workers", "large", "clicks")
DIMS, LAWS = (64, 16), ("power", "uniform")
KERNEL_ROWS, KERNEL_BATCHES, KERNEL_ROUNDS = 1_000_000, 64, 7
RATE = 0.05
LARGE_ROWS = 10_000_000
LIMIT_SECONDS = 240.0


@dataclass(frozen=True)
class Subject:
    """A way to train the tables of a worker."""

    name: str
    way: str
    # What stands for "tcp" in PYPS_TRANSPORT.
    transport: str = ""
    # Its processes besides the first: arguments of the script, or "redis-server".
    others: tuple[str, ...] = ()
    num_workers: int = 1
    # 0 for as many as torch takes by itself.
    num_threads: int = 1
    # What its Python must have, where that may be another than ours.
    module: str = ""
    # Whether the tables are outside the worker.
    outside: bool = False

    @property
    def python(self) -> str | None:
        return peers.python_with(self.module, self.variable) if self.module else sys.executable

    @property
    def variable(self) -> str:
        return f"PEERS_PYTHON_{self.module.upper()}"


SERVER = "--way=rpc_server"
SUBJECTS = (
    Subject("pyps lane", "pyps", "tcp"),
    Subject("pyps lane, next rows ahead", "pyps_ahead", "tcp"),
    Subject("pyps shared memory", "pyps", "shm"),
    Subject("Redis", "redis", others=("redis-server",), module="redis", outside=True),
    Subject("torch RPC", "rpc", others=(SERVER,), outside=True),
    Subject("torch RPC, 2 threads", "rpc", others=(SERVER,), num_threads=0, outside=True),
    Subject("DDP gloo, 2 workers", "ddp", others=("--index=1",), num_workers=2),
    Subject("torchrec, one process", "torchrec", num_threads=0, module="torchrec"),
    Subject("SparseAdam, one process", "one_process", num_threads=0),
)


def main() -> int:
    options = arguments()
    console = Console(width=140)
    exit_on_sigterm()
    print(machine(), flush=True)
    rows: list[Row] = []
    absent = left_out()
    for name, reason in absent.items():
        console.print(f"{name} is left out: {reason}", highlight=False)
    chosen = [of for of in SUBJECTS if of.name.startswith(tuple(options.subjects.split(","))) and of.name not in absent]
    measurements: dict[str, Iterator[Row]] = {
        "kernel": kernel(),
        "workers": workers(chosen, options.dims, options.seconds),
        "large": large(options.rows),
        "clicks": clicks(),
    }
    for part in options.only:
        for row in measurements[part]:
            rows.append({"part": part, **row})
            # After each, so that an end midway loses one only.
            write_results(options.json, rows, left_out=absent)
        console.print(table_of(part, [row for row in rows if row["part"] == part]), highlight=False)
    for row in rows:
        if said := row.get("error") or row.get("refused"):
            print(f"{row['subject']}: {said}", file=sys.stderr)
    return 1 if any("error" in row for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--subjects", default="", help="those of workers, by the beginnings of their names")
    parser.add_argument("--dims", type=lambda text: [*map(int, text.split(","))], default=DIMS, help="theirs")
    parser.add_argument("--seconds", type=float, default=5.0, help="that each of them is timed for")
    parser.add_argument("--rows", type=int, default=LARGE_ROWS, help="of the large table")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    return parser.parse_args()


def left_out() -> dict[str, str]:
    """The subjects that this machine does not have, and why."""
    found = {of.name: peers.lacking(of.module, of.variable) for of in SUBJECTS if of.python is None}
    if not shutil.which("redis-server"):
        found["Redis"] = "redis-server is not installed"
    return found


# The server's own table.


def kernel() -> Iterator[Row]:
    torch.set_num_threads(1)
    for dim in DIMS:
        ours, theirs = KernelTable(dim), TorchTable(dim)
        for law in LAWS:
            random = np.random.default_rng(0)
            batches = [np.unique(drawn(law, KERNEL_ROWS, BATCH, random)) for _ in range(KERNEL_BATCHES)]
            row: Row = {"subject": "table", "dim": dim, "law": law, "bytes_x": ours.bytes_a_row / (4 * (dim + 1))}
            for subject, of in (("", ours), ("torch_", theirs)):
                for what, rate in of.rates(batches).items():
                    row[f"{subject}{what}"] = rate
            yield row


def best_rate(batches: list[Ids], use: Callable[[int], object]) -> float:
    """Rows a second of CPU time, of the best of some rounds: others may use the machine's caches meanwhile."""
    seconds = []
    for _ in range(KERNEL_ROUNDS):
        began = time.thread_time()
        for index in range(len(batches)):
            use(index)
        seconds.append(time.thread_time() - began)
    return sum(map(len, batches)) / min(seconds)


class KernelTable:
    """A table of as many rows, of ids that are spread over all int64, made in an order of their own."""

    def __init__(self, dim: int):
        random = np.random.default_rng(1)
        self._ids = random.integers(-(2**63), 2**63 - 1, KERNEL_ROWS)
        self._gradient = random.standard_normal((BATCH, dim), np.float32).reshape(-1)
        self._dim, self._version = dim, 0
        self._table = _kernels.Table(dim, "rowwise_adagrad", [0.0], seed=1, scale=0.01)
        numbers = {"rate": RATE, "eps": 1e-8, "weight_decay": 0.0}
        self._numbers = tuple(numbers[name] for name in self._table.numbers)
        for some in np.array_split(random.permutation(self._ids), KERNEL_ROWS // BATCH + 1):
            self._update(np.sort(some))

    def _update(self, ids: Ids) -> None:
        self._version += 1
        payload = self._gradient[: ids.size * self._dim].data.cast("B")
        self._table.update([(ids.data, payload, FLOAT32, 1.0)], self._numbers, self._version)

    @property
    def bytes_a_row(self) -> float:
        return self._table.stats()["bytes"] / KERNEL_ROWS

    def rates(self, batches: list[Ids]) -> dict[str, float]:
        batches = [np.sort(self._ids[places]) for places in batches]
        reply = memoryview(bytearray(4 * BATCH * self._dim))
        look_up = lambda index: self._table.lookup(batches[index].data, (reply, 0, FLOAT32))  # noqa: E731
        update = lambda index: self._update(batches[index])  # noqa: E731
        return {"lookups_per_s": best_rate(batches, look_up), "updates_per_s": best_rate(batches, update)}


class TorchTable:
    """The same rows by their places."""

    def __init__(self, dim: int):
        self._rows = torch.nn.Parameter(torch.empty(KERNEL_ROWS, dim).uniform_(-0.01, 0.01))
        self._gradient = torch.randn(BATCH, dim)
        self._optimizer = torch.optim.Adagrad([self._rows], lr=RATE)

    def rates(self, batches: list[Ids]) -> dict[str, float]:
        places = [torch.from_numpy(some) for some in batches]
        reply = torch.empty(BATCH, self._rows.shape[1])
        held = self._rows.detach()

        def look_up(index: int) -> None:
            torch.index_select(held, 0, places[index], out=reply[: len(places[index])])

        def update(index: int) -> None:
            some = places[index]
            self._rows.grad = torch.sparse_coo_tensor(
                some.unsqueeze(0),
                self._gradient[: len(some)],
                self._rows.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            self._optimizer.step()

        return {"lookups_per_s": best_rate(batches, look_up), "updates_per_s": best_rate(batches, update)}


# Workers.


def workers(chosen: list[Subject], dims: list[int], seconds: float) -> Iterator[Row]:
    for dim in dims:
        for law in LAWS:
            for subject in chosen:
                row: Row = {"subject": subject.name, "dim": dim, "law": law, "outside": subject.outside}
                try:
                    row |= steps_of(subject, dim, law, seconds)
                except Failed as error:
                    row["error"] = str(error)
                print(row["subject"], dim, law, row.get("steps_per_s"), flush=True)
                yield row


def steps_of(subject: Subject, dim: int, law: str, seconds: float) -> Row:
    """One measurement. Raises Failed."""
    address = f"127.0.0.1:{free_port()}"
    command = [str(subject.python), str(SCRIPT), f"--dim={dim}", f"--law={law}", f"--address={address}"]
    command += [f"--way={subject.way}", f"--seconds={seconds}"]
    environment = os.environ | dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
    environment |= {"PYPS_TRANSPORT": subject.transport or "auto", "PYTHONWARNINGS": "ignore"}
    if subject.num_threads:
        environment["OMP_NUM_THREADS"] = str(subject.num_threads)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyps-bench-")))
        if subject.way.startswith("pyps"):
            environment |= stack.enter_context(Server()).environment | {"PYPS_WORKER_COUNT": "1"}
        redis = ["redis-server", "--bind", "127.0.0.1", "--port", address.rpartition(":")[2], "--save", ""]
        others = [redis if other == "redis-server" else [*command, other] for other in subject.others]
        with Processes([command, *others], environment, folder / "log", limit_seconds=LIMIT_SECONDS) as processes:
            processes.go(subject.num_workers)
            return answer(processes)


def answer(processes: Processes) -> Row:
    """The line of JSON that one of the processes prints; nothing where they end without, which fails."""
    for line in processes.lines:
        if line.startswith("{"):
            found: Row = json.loads(line)
            return found
    return {}


# Rows beyond a limit.


def large(num_rows: int) -> Iterator[Row]:
    numbers = num_rows * (LARGE_DIM + 1) * 4
    limit = numbers // 2
    row: Row = {"subject": "nn.EmbeddingBag", "rows": num_rows, "limit_mb": limit / 1e6}
    yield row | limited("large_alone", num_rows, limit, {})
    with Server() as first, Server() as second:
        addresses = f"{first.address},{second.address}"
        environment = first.environment | {"PYPS_SERVERS": addresses, "PYPS_WORKER_COUNT": "1"}
        row = {"subject": "pyps on two servers", "rows": num_rows, "limit_mb": limit / 1e6}
        row |= limited("large", num_rows, limit, environment | {"OMP_NUM_THREADS": "1"})
        row["servers_peak_mb"] = sum(memory_bytes(server.pid, "VmHWM") for server in (first, second)) / 1e6
        counts = table_counts(addresses)
        row["servers_rows"] = sum(int(table["rows"]) for table in counts)
        row["bytes_x"] = sum(int(table["bytes"]) for table in counts) / numbers
        if row["servers_rows"] != num_rows:
            row["error"] = f"the servers have {row['servers_rows']} rows"
        yield row


def limited(way: str, num_rows: int, limit: int, environment: dict[str, str]) -> Row:
    command = [sys.executable, str(SCRIPT), f"--way={way}", f"--rows={num_rows}", f"--data-bytes-max={limit}"]
    with tempfile.TemporaryDirectory(prefix="pyps-bench-") as folder:
        log = Path(folder) / "log"
        try:
            with Processes([command], os.environ | environment, log, limit_seconds=LIMIT_SECONDS) as processes:
                processes.go(1)
                return answer(processes)
        except Failed as error:
            return {"error": str(error)}


def table_counts(addresses: str) -> list[Row]:
    """What the servers say of their parts of the table."""
    command = [sys.executable, "-m", "pyps", "status", "--json", "--servers", addresses]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [shard["table"] for server in told["servers"] for shard in server["shards"] if "table" in shard]


# A model of clicks.


def clicks() -> Iterator[Row]:
    example = [sys.executable, str(EXAMPLE)]
    job = [sys.executable, "-m", "pyps", "run", "--servers", "2", "--workers", "3"]
    for subject, command in (
        ("one process alone", [*example, "--alone"]),
        ("pyps, full rates", [*job, "--staleness", "none", "--", *example]),
        ("pyps, rates divided by staleness", [*job, "--", *example]),
    ):
        began = time.monotonic()
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=2 * LIMIT_SECONDS)
        found = [float(score) for score in re.findall(r"AUC ([\d.]+)", ended.stdout)]
        row: Row = {"subject": subject, "seconds": time.monotonic() - began, "aucs": found}
        yield row if found else row | {"error": ended.stderr[-500:]}


# What is shown.


def table_of(part: str, rows: list[Row]) -> Table:
    drawn = Table(title=TITLES[part], title_justify="left")
    for heading in HEADINGS[part]:
        drawn.add_column(heading, justify="left" if heading in ("", "ids") else "right")
    for row in rows:
        drawn.add_row(*CELLS[part](row, rows))
    return drawn


def kernel_cells(row: Row, rows: list[Row]) -> list[str]:
    cells = [str(row["dim"]), row["law"]]
    for what in ("lookups_per_s", "updates_per_s"):
        cells += [f"{row[what] / 1e6:.2f}", f"{row[what] / row[f'torch_{what}']:.2f}"]
    return [*cells, f"{row['bytes_x']:.3f}"]


def workers_cells(row: Row, rows: list[Row]) -> list[str]:
    where = "outside" if row["outside"] else "servers" if row["subject"].startswith("pyps") else "its memory"
    cells = [row["subject"], where, str(row["dim"]), row["law"]]
    if "error" in row:
        return [*cells, "failed", "", ""]
    like = [other for other in rows if (other["dim"], other["law"]) == (row["dim"], row["law"])]
    (ours,) = [other["steps_per_s"] for other in like if other["subject"] == SUBJECTS[0].name] or [None]
    ratio = f"{ours / row['steps_per_s']:.2f}" if ours else ""
    return [*cells, f"{row['steps_per_s']:.2f}", f"{row['worker_cpu_s']:.3f}", ratio]


def large_cells(row: Row, rows: list[Row]) -> list[str]:
    cells = [row["subject"], f"{row['rows']:,}", f"{row['limit_mb']:,.0f}"]
    if "first_loss" not in row:
        return [*cells, "no memory" if "refused" in row else "failed", *[""] * 5]
    cells += [f"{row['first_loss']:.3f} to {row['last_loss']:.3f}", f"{row['worker_peak_mb']:,.0f}"]
    cells += [f"{row['servers_peak_mb']:,.0f}", f"{row['bytes_x']:.3f}", f"{row['seconds']:.1f}"]
    return [*cells, f"{row['rows'] / row['seconds']:,.0f}"]


def clicks_cells(row: Row, rows: list[Row]) -> list[str]:
    if not row["aucs"]:
        return [row["subject"], "failed", "", ""]
    alone = rows[0]["aucs"][0]
    apart = max((score - alone for score in row["aucs"]), key=abs)
    return [
        row["subject"],
        ", ".join(f"{score:.4f}" for score in row["aucs"]),
        f"{apart:+.4f}",
        f"{row['seconds']:.0f}",
    ]


TITLES = {
    "kernel": f"A table of {KERNEL_ROWS:,} rows, one thread",
    "workers": f"Steps a second: {TABLES} tables, a batch of {BATCH:,}",
    "large": f"Rows of {LARGE_DIM} numbers, under a limit for the worker's data",
    "clicks": "The AUC of examples/dlrm.py",
}
HEADINGS = {
    "kernel": ("dim", "ids", "looked up, M rows/s", "x torch", "updated, M rows/s", "x torch", "bytes, x its numbers"),
    "workers": ("", "tables in", "dim", "ids", "steps/s", "worker's CPU, s a step", f"{SUBJECTS[0].name} is so many x"),
    "large": (
        *("", "rows", "limit, MB", "loss", "worker's peak, MB", "servers' peak, MB"),
        *("tables' bytes, x numbers", "seconds", "new rows/s"),
    ),
    "clicks": ("", "AUC, by each worker", "most apart from alone", "seconds"),
}
CELLS = {"kernel": kernel_cells, "workers": workers_cells, "large": large_cells, "clicks": clicks_cells}


if __name__ == "__main__":
    sys.exit(main())
