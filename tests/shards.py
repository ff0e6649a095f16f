"""Shards for tests: built in a line, pushed to from threads, with a log of what happened to them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.core import aggregation, staleness
from pyps.core.arrays import Floats
from pyps.core.gradient import Codec, Gradient
from pyps.core.ledger import Ledger
from pyps.core.receipt import Outcome, Receipt
from pyps.core.shard import Shard, ShardState
from pyps.core.update_rules import RULES

JOIN_SECONDS = 60.0


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def make_shard(
    parameters: npt.ArrayLike = (0.0, 0.0, 0.0, 0.0),
    *,
    rule: str = "sgd",
    settings: Mapping[str, float] | None = None,
    policy: str | staleness.StalenessPolicy = "none",
    **others: Any,
) -> Shard:
    """Returns an asynchronous shard; SGD with learning rate 1 unless told otherwise."""
    return Shard(
        others.pop("shard_id", 0),
        np.asarray(parameters, dtype=np.float32),
        rule=RULES[rule],
        hyperparameters={"learning_rate": 1.0} if settings is None else settings,
        aggregation=others.pop("aggregation", None) or aggregation.parse("async"),
        staleness=staleness.parse(policy) if isinstance(policy, str) else policy,
        **others,
    )


def restored(shard: Shard, state: ShardState, **others: Any) -> Shard:
    """Returns a shard of the same kind as `shard` that goes on from the state."""
    return make_shard(
        state.parameters,
        rule=shard.rule.name,
        settings=shard.hyperparameters,
        version=state.version,
        slots=state.slots,
        ledger=Ledger(state.ledger),
        pending=state.pending,
        **others,
    )


def gradient(values: npt.ArrayLike, **fields: Any) -> Gradient:
    """Returns a float32 gradient of worker "a" on version 0; a later push of a test says its sequence."""
    identity = {"worker_id": "a", "incarnation": 1, "sequence": 0, "base_version": 0, "epoch": 0}
    payload = np.asarray(values, dtype=np.float32).tobytes()
    return Gradient(**{**identity, "codec": Codec.FLOAT32, "payload": payload, **fields})


def push(shard: Shard, values: npt.ArrayLike, **fields: Any) -> Receipt:
    """Pushes a gradient computed on the shard's present version, unless the fields say otherwise."""
    return shard.push(gradient(values, **{"base_version": shard.version, **fields}), num_workers=1)


def pull(shard: Shard, worker_id: str | None = None) -> tuple[int, Floats]:
    """Returns the shard's version and a copy of its parameters."""
    return shard.read(lambda version, parameters: (version, parameters.copy()), worker_id=worker_id)


def digest(parameters: Floats) -> str:
    return hashlib.blake2b(parameters.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Pushed:
    gradient: Gradient
    receipt: Receipt


@dataclass(frozen=True)
class Pulled:
    worker_id: str
    version: int


@dataclass
class Log:
    """A recorder that keeps everything, by shard, in the order in which it happened."""

    events: dict[int, list[Pushed | Pulled]] = field(default_factory=dict)

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt) -> None:
        self.events.setdefault(shard_id, []).append(Pushed(gradient, receipt))

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        self.events.setdefault(shard_id, []).append(Pulled(worker_id, version))

    def pushes(self, shard_id: int) -> list[Pushed]:
        return [event for event in self.events[shard_id] if isinstance(event, Pushed)]

    def applied(self, shard_id: int) -> list[Pushed]:
        return [event for event in self.pushes(shard_id) if event.receipt.outcome == Outcome.APPLIED]


def replay(log: Log, shard: Shard) -> list[str]:
    """Pushes the shard's log into it, in order, and returns the digest of each version from the first."""
    digests = [digest(pull(shard)[1])]
    for event in log.pushes(shard.shard_id):
        receipt = shard.push(event.gradient, num_workers=event.receipt.num_workers)
        assert receipt == event.receipt
        if receipt.outcome == Outcome.APPLIED:
            digests.append(digest(pull(shard)[1]))
    return digests


def run_together(functions: Sequence[Callable[[], None]]) -> None:
    """Runs the functions in threads that start at once; raises the first error of any."""
    barrier = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            barrier.wait(JOIN_SECONDS)
            function()
        except BaseException as error:  # told to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), "a thread did not end in time"
    if errors:
        raise errors[0]
