"""The peers: what people would pick instead, run from the folder of their scripts under our rules (peers_common.py).

A peer runs under the Python that its variable names (PEERS_PYTHON_RAY=/path/to/python), since their versions
clash, or else under ours where that has it; otherwise it is left out, by name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network import INTERFACE, Link
from trial import Failed
from work import SIZES, Size

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Peer:
    """One script with its arguments."""

    name: str
    script: str
    arguments: tuple[str, ...]
    # The module that its Python must have, and the variable that names such a Python.
    module: str
    variable: str
    # What is replaced in the copy of its script: always, and where server and workers are joined by a link.
    edits: tuple[tuple[str, str], ...] = ()
    link_edits: tuple[tuple[str, str], ...] = ()
    # Why it does not go over a link; empty where it does.
    no_link: str = ""
    # Names of the models that it is measured with.
    sizes: tuple[str, ...] = tuple(SIZES)

    def python(self) -> str | None:
        """The Python to run it with; None where there is none."""
        return python_with(self.module, self.variable)


_SERVER = (("127.0.0.1", Link.server_address),)
_WORKER_OF_TENSORFLOW = (
    ('"worker": [f"127.0.0.1:', f'"worker": [f"{Link.worker_address}:'),
    ('"ps": [f"127.0.0.1:', f'"ps": [f"{Link.server_address}:'),
)
PEERS = (
    Peer(
        "torch RPC auto",
        "torch_rpc_ps.py",
        ("--transport", "auto"),
        "torch",
        "PEERS_PYTHON_TORCH",
        no_link="over a network it is torch RPC tcp",
    ),
    Peer(
        "torch RPC tcp",
        "torch_rpc_ps.py",
        ("--transport", "tcp"),
        "torch",
        "PEERS_PYTHON_TORCH",
        link_edits=(*_SERVER, ('"lo"', f'"{INTERFACE}"')),
    ),
    Peer(
        "TensorFlow gRPC",
        "tf_grpc_ps.py",
        (),
        "tensorflow",
        "PEERS_PYTHON_TF",
        link_edits=_WORKER_OF_TENSORFLOW,
    ),
    # Each actor takes one of Ray's CPUs, which are counters: four would leave a fourth worker waiting for ever.
    Peer(
        "Ray",
        "ray_ps.py",
        ("--arrays", "numpy"),
        "ray",
        "PEERS_PYTHON_RAY",
        edits=(("num_cpus=4", "num_cpus=16"),),
        no_link="its processes are started by a daemon of its own, in one network namespace",
    ),
    Peer(
        "naive gRPC",
        "naive_grpc_ps.py",
        ("--socket", "tcp"),
        "grpc_tools",
        "PEERS_PYTHON_NAIVE",
        # A round of the big model takes it a second and more.
        no_link="the big model takes it too long",
        sizes=("small", "mid"),
    ),
)


def python_with(module: str, variable: str) -> str | None:
    """The Python that the variable names, or ours where that has the module; None where there is neither."""
    if named := os.environ.get(variable):
        return named
    return sys.executable if importlib.util.find_spec(module) else None


def available(folder: Path | None, *, over_link: bool = False) -> tuple[list[Peer], dict[str, str]]:
    """Peers that can be measured here, and why the others cannot."""
    if folder is None:
        return [], {"every peer": "no folder of their scripts was named (PEERS=)"}
    found, left_out = [], {}
    for peer in PEERS:
        if over_link and peer.no_link:
            left_out[peer.name] = peer.no_link
        elif not (folder / peer.script).exists():
            left_out[peer.name] = f"{peer.script} is not in {folder.name}"
        elif peer.python() is None:
            left_out[peer.name] = lacking(peer.module, peer.variable)
        else:
            found.append(peer)
    return found, left_out


def lacking(module: str, variable: str) -> str:
    return f"{module} is not installed; {variable} may name a Python that has it"


def run(folder: Path, peer: Peer, size: Size, num_workers: int, *, link: Link | None = None) -> dict[str, Any]:
    """One measurement of a peer, in the words of ours. Raises Failed."""
    environment = os.environ | {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore::UserWarning"}
    if size.pinned:
        environment["PYPS_BENCH_PINNED"] = "1"
    if link is not None:
        environment["PYPS_BENCH_SERVER_NAMESPACE"] = link.server_namespace
        environment["PYPS_BENCH_WORKER_NAMESPACE"] = link.worker_namespace
    with tempfile.TemporaryDirectory(prefix="pyps-peers-") as copy:
        _copy_scripts(folder, Path(copy), peer, edits=peer.edits + (peer.link_edits if link else ()))
        command = [str(peer.python()), str(Path(copy) / peer.script), *peer.arguments, "--params", str(size.params)]
        command += ["--keys", str(size.keys), "--rounds", str(size.rounds), "--warmup", str(size.warmup)]
        output = _output(peer, [*command, "--workers", str(num_workers)], environment)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed(f"{peer.name} printed no result: {output[-1000:]}")
    return _in_our_words(json.loads(lines[-1]), size)


def _copy_scripts(folder: Path, copy: Path, peer: Peer, *, edits: tuple[tuple[str, str], ...]) -> None:
    shutil.copyfile(folder / "_common.py", copy / "_common_original.py")
    shutil.copyfile(HERE / "peers_common.py", copy / "_common.py")
    text = (folder / peer.script).read_text(encoding="utf-8")
    for old, new in edits:
        if old not in text:
            raise Failed(f"{peer.script} has no {old!r} to replace by {new!r}: it has changed")
        text = text.replace(old, new)
    (copy / peer.script).write_text(text, encoding="utf-8")


def _output(peer: Peer, command: list[str], environment: dict[str, str]) -> str:
    """What the script prints; it and its children are ended when it takes too long."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise Failed(f"{peer.name} took longer than {LIMIT_SECONDS:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise Failed(f"{peer.name} failed ({process.returncode}): {errors[-1000:]}")
    return output


def _in_our_words(reported: dict[str, Any], size: Size) -> dict[str, Any]:
    """The peers' line by our names; their MB are MiB."""
    same = ("rounds_per_s", "p50_ms", "p99_ms", "server_cpu_s_per_gb", "worker_cpu_s_per_gb", "versions")
    peak = reported["server_peak_rss_mb"] * 2**20
    return {name: reported[name] for name in same} | {
        "server_base_mb": reported["server_base_rss_mb"] * 2**20 / 1e6,
        "server_peak_mb": peak / 1e6,
        "server_peak_x": peak / size.nbytes,
        "verified": reported["verified"],
    }
