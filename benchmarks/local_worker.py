"""One process of local_training.py: the transformer of training_worker.py learns Python's own source text.

It is a machine that takes PACE seconds for a batch, or so many times as long as it is slowed: what its computing takes
less than that, it sleeps. So several of them fit on few cores, and each is as fast alone as it is beside the others.

A worker prints "ready", waits for "go", and then prints a line an exchange: its index, when the exchange was done, and
the batches since the last one. The first worker keeps copies of its model meanwhile; when the time is over it prints
"over", scores them by held-out text and prints "scores" with a line of JSON: [time, loss] pairs.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import wait_for_line
from torch import nn
from training_worker import ALONE, WAYS, Place, Subject, Task, loss_of, model_of, say, serve_lighthouse

# Seconds that a batch takes a machine.
PACE = 0.1
TASK = Task("3 million", params=3_438_592, keys=54, rounds=0, width=256, layers=4, loss=2.3, seconds=60.0, sequences=4)
# Of the text so many blocks of so many characters, and every so manyth of them is held out.
BLOCKS, BLOCK, HELD_OUT_EVERY = 4000, 1024, 250
# Copies of the model in a run.
COPIES = 15
# Stretches of the held-out text that are scored at once.
SCORED_AT_ONCE = 64
STEPS = 32

JOINED = Subject("one process with joined batches", "alone")
SUBJECTS = {
    subject.name: subject
    for subject in (
        ALONE,
        JOINED,
        Subject("pyps async float32", "pyps", "async", overlap="step"),
        Subject("pyps hardsync float32", "pyps", overlap="backward"),
        Subject("pyps hardsync int4", "pyps", codec="int4", overlap="backward"),
        Subject("pyps local average topk2bit", "pyps", codec="topk2bit", parameter_codec="int4", sync_every=STEPS),
        Subject("pyps local average int4", "pyps", codec="int4", sync_every=STEPS),
        Subject("pyps local nesterov int4", "pyps", codec="int4", sync_every=STEPS, outer="nesterov"),
        Subject(
            "pyps local async nesterov int4",
            "pyps",
            "async",
            "int4",
            sync_every=STEPS,
            outer="delayed_nesterov:n={count}",
        ),
        Subject(
            "pyps local async int4", "pyps", "async", "int4", sync_every=STEPS, outer="sgd:learning_rate={rate:.1g}"
        ),
        Subject("pyps local auto int4", "pyps", "hardsync:weighting=by_speed", "int4", sync_every="auto"),
        Subject("DDP PowerSGD rank 4", "ddp", codec="powersgd"),
        Subject("torchft LocalSGD", "torchft", module="torchft", sync_every=STEPS, outer="average"),
        Subject("torchft DiLoCo", "torchft", module="torchft", sync_every=STEPS, outer="nesterov"),
        Subject("Hivemind local updates", "hivemind", module="hivemind", sync_every=STEPS),
    )
}


def standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """The source text of Python's standard library as numbers below 128: to train on, and held out."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts and len(text) < BLOCKS * BLOCK:
            text += path.read_bytes().decode("ascii", errors="ignore").encode()
    blocks = torch.frombuffer(text[: BLOCKS * BLOCK], dtype=torch.uint8).to(torch.int64).view(BLOCKS, BLOCK)
    held_out = torch.arange(BLOCKS) % HELD_OUT_EVERY == 0
    return blocks[~held_out].flatten(), blocks[held_out].flatten()


def batches_of(text: torch.Tensor, *, sequences: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Stretches from anywhere in the text, and what follows each character."""
    stretches = text.unfold(0, TASK.length + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = stretches[torch.randint(len(stretches), (sequences,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]


class Copies:
    """Copies of a model in training, by the times when they were made."""

    def __init__(self, model: nn.Module, *, every: float):
        self._model, self._every = model, every
        self._kept: list[tuple[float, dict[str, torch.Tensor]]] = []

    def keep_if_due(self, now: float) -> None:
        if not self._kept or now >= self._kept[0][0] + len(self._kept) * self._every:
            self._kept.append((now, {name: value.clone() for name, value in self._model.state_dict().items()}))

    def scores(self, held_out: torch.Tensor) -> list[tuple[float, float]]:
        """(time, mean loss of the held-out text) pairs."""
        stretches = torch.split(held_out.unfold(0, TASK.length + 1, TASK.length), SCORED_AT_ONCE)
        return [(when, self._score(state, stretches)) for when, state in self._kept]

    @torch.no_grad()
    def _score(self, state: dict[str, torch.Tensor], stretches: tuple[torch.Tensor, ...]) -> float:
        self._model.load_state_dict(state)
        losses = [loss_of(self._model, (some[:, :-1], some[:, 1:])).item() * len(some) for some in stretches]
        return sum(losses) / sum(map(len, stretches))


def train(subject: Subject, place: Place, *, seconds: float, slowed: float, seed: int) -> None:
    """Trains until it is killed; the first worker for that time, after which it scores its model."""
    training, held_out = standard_library()
    # One process that takes the batches of all in one needs the time of all.
    joined = place.count if subject is JOINED else 1
    source = batches_of(training, sequences=TASK.sequences * joined, seed=1000 * seed + place.index)
    model = model_of(TASK, seed)
    whole, optimizer = WAYS[subject.way](model, subject, place)
    if subject.way == "pyps":
        # Servers weigh what a worker trained by itself by its examples.
        optimizer.examples_in_batch = TASK.sequences  # type: ignore[attr-defined]
    loss_of(whole, next(source)).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    say("ready")
    wait_for_line("go")
    began = time.perf_counter()
    copies = Copies(model, every=seconds / COPIES)
    copies.keep_if_due(began)
    since, every = 0, rounds_steps(optimizer, subject)
    while (now := time.perf_counter()) < began + seconds or place.index:
        loss_of(whole, next(source)).backward()  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, now + PACE * slowed * joined - time.perf_counter()))
        optimizer.step()
        optimizer.zero_grad()
        since += 1
        if since >= every:
            now = time.perf_counter()
            say(f"{place.index} {now} {since * joined}")
            since, every = 0, rounds_steps(optimizer, subject)
            if place.index == 0:
                copies.keep_if_due(now)
    say("over")
    say(f"scores {json.dumps(copies.scores(held_out))}")
    threading.Event().wait()


def rounds_steps(optimizer: object, subject: Subject) -> int:
    """Steps that the next exchange comes after, where "auto" is a number meanwhile."""
    return int(getattr(optimizer, "sync_every", subject.sync_every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=[TASK.name])
    parser.add_argument("--subject", required=True, choices=SUBJECTS)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--address", default="", help="host:port where the workers find each other")
    parser.add_argument("--slowed", type=float, default=1.0, help="how many times as long a batch takes")
    parser.add_argument("--seconds", type=float, default=TASK.seconds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help="be torchft's lighthouse")
    options = parser.parse_args()
    place = Place(options.index, options.count, options.address)
    if options.serve:
        serve_lighthouse(place, least=1)
    torch.set_num_threads(1)
    subject = SUBJECTS[options.subject]
    train(subject, place, seconds=options.seconds, slowed=options.slowed, seed=options.seed)


if __name__ == "__main__":
    main()
