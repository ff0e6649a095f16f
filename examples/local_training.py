"""Train over a slow link: each worker trains by itself for some steps, and then sends what it changed, in few bits.

The model guesses the next character of Python's standard library, as in char_lm.py, with 512 units instead of 64. The
script trains it for a minute in each of three ways, every one a job of its own, and draws their scores over time:

    python examples/local_training.py --picture local_training.png

A link of 100 Mbit/s between workers and server, for root, in a network of its own (Ctrl-D leaves it):

    unshare --net
    ip link set lo up && tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 50ms

Without it all meet on the loopback, where there is little to gain. What to copy into a script is `optimizer_of`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from char_lm import Network, Scores, loss_of, standard_library

from pyps_client import Launch, LocalTraining, RemoteOptimizer
from pyps_client.data import worker_sampler
from pyps_wire.errors import PypsError

UNITS = 512
LEARNING_RATE = 0.002
# Each way to train, and the protocol of its servers; one machine needs none.
WAYS = {"local training": "hardsync", "async": "async", "one machine": ""}


def optimizer_of(way: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    if way == "local training":
        # 4 bits a number both ways; the servers average what the workers changed.
        few_bits = Launch(gradient_codec="int4", parameter_codec="int4", transport="tcp")
        return LocalTraining(model, adam, sync_every=32, outer="average", launch=few_bits)
    if way == "async":
        return RemoteOptimizer(model, adam, overlap="step", launch=Launch(transport="tcp"))
    return adam


def main() -> None:
    arguments = parse_arguments()
    if arguments.way:
        train(arguments)
        return
    scores = {way: scores_of(way, arguments) for way in WAYS}
    for way, seen in scores.items():
        print(f"{way}: {seen[-1][1]:.3f} bits/char after {seen[-1][0]:.0f} s", flush=True)
    if arguments.picture is not None:
        draw(arguments.picture, scores)


def train(arguments: argparse.Namespace) -> None:
    """Train for the time as a worker; the first one writes its scores of held-out text into the file."""
    training, held_out = standard_library()
    torch.manual_seed(0)
    model = Network(units=arguments.units)
    optimizer = optimizer_of(arguments.way, model)
    loader = torch.utils.data.DataLoader(
        training, batch_size=16, sampler=worker_sampler(training, seed=1), drop_last=True
    )
    ends = time.monotonic() + arguments.seconds
    scores = Scores(model, held_out) if os.environ.get("PYPS_WORKER_INDEX", "0") == "0" else None
    while time.monotonic() < ends:
        for (text,) in loader:
            optimizer.zero_grad()
            loss_of(model, text).backward()
            optimizer.step()
            if scores is not None:
                scores.look_if_due()
            if time.monotonic() >= ends:
                break
    if scores is not None:
        scores.look(every=10)
        arguments.scores.write_text(json.dumps(scores.seen), encoding="utf-8")


def scores_of(way: str, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Train as a job of its own; return its (seconds, bits/char) pairs."""
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder) / "scores.json"
        script = [sys.executable, __file__, "--way", way, "--scores", str(scores)]
        script += ["--seconds", str(arguments.seconds), "--units", str(arguments.units)]
        job = [sys.executable, "-m", "pyps", "run", "--servers", "1", "--workers", "2", "--protocol", WAYS[way], "--"]
        if not WAYS[way]:
            job = []
        if subprocess.run([*job, *script], check=False).returncode:
            sys.exit(f"local_training.py: the job of {way} failed; its output is above.")
        return json.loads(scores.read_text(encoding="utf-8"))


def draw(path: Path, scores: dict[str, list[tuple[float, float]]]) -> None:
    """Draw the (seconds, bits/char) pairs of each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for way, seen in scores.items():
        axis.plot(*zip(*seen, strict=True), marker=".", label=way)
    axis.set(xlabel="seconds", ylabel="bits per held-out character", xlim=(0, None))
    axis.legend()
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares local training over a slow link with two other ways.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, each way")
    parser.add_argument("--units", type=int, default=UNITS, help="of the network")
    parser.add_argument("--picture", type=Path, help="where to draw bits per character over time")
    parser.add_argument("--quick", action="store_true", help="a small network for some seconds")
    parser.add_argument("--way", choices=WAYS, help="be a worker, or the one machine, that trains in this way")
    parser.add_argument("--scores", type=Path, help="where a worker writes its scores")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.units = 5.0, 32
    return arguments


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        # A refusal is a sentence, and needs no traceback.
        sys.exit(f"local_training.py: {error}")
