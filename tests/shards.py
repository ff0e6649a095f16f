"""Shards for tests: built in a line, pushed to from threads, with a log of what happened to them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.core import aggregation, schedule, staleness
from pyps.core.arrays import Floats
from pyps.core.batch_growth import BatchGrowth
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Codec, Gradient, PayloadKind
from pyps.core.ledger import Ledger
from pyps.core.receipt import Outcome, Receipt
from pyps.core.roster import Roster
from pyps.core.shard import Shard, ShardState
from pyps.core.update import Update
from pyps.core.update_rules import RULES
from pyps_wire.errors import BadRequest, PypsError
from support import DEADLINE_SECONDS


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def roster(*workers: str, missing: int = 0) -> Roster:
    """Returns a roster of these workers; one worker "a" unless told otherwise."""
    return Roster(tuple(sorted(workers or ("a",))), missing)


def crew(num_workers: int) -> Roster:
    """Returns a roster of w00, w01, ..."""
    return Roster(tuple(f"w{index:02d}" for index in range(num_workers)))


def make_behaviour(
    protocol: str | aggregation.Aggregation = "async",
    policy: str | staleness.StalenessPolicy = "none",
    *,
    rate_schedule: str | schedule.Schedule = "constant",
    clip_norm: float = 0.0,
    batch_growth: BatchGrowth | None = None,
) -> Behaviour:
    """Returns a behaviour of texts or of objects."""
    return Behaviour(
        aggregation=aggregation.parse(protocol) if isinstance(protocol, str) else protocol,
        staleness=staleness.parse(policy) if isinstance(policy, str) else policy,
        schedule=schedule.parse(rate_schedule) if isinstance(rate_schedule, str) else rate_schedule,
        clip_norm=clip_norm,
        batch_growth=batch_growth,
    )


def make_shard(
    parameters: npt.ArrayLike = (0.0, 0.0, 0.0, 0.0),
    *,
    rule: str = "sgd",
    settings: Mapping[str, float] | None = None,
    protocol: str | aggregation.Aggregation = "async",
    policy: str | staleness.StalenessPolicy = "none",
    behaviour: Behaviour | None = None,
    **others: Any,
) -> Shard:
    """Returns a shard; asynchronous, SGD with learning rate 1 unless told otherwise."""
    return Shard(
        others.pop("shard_id", 0),
        np.asarray(parameters, dtype=np.float32),
        rule=RULES[rule],
        hyperparameters={"learning_rate": 1.0} if settings is None else settings,
        behaviour=behaviour or make_behaviour(protocol, policy),
        **others,
    )


def restored(shard: Shard, state: ShardState, **others: Any) -> Shard:
    """Returns a shard of the same kind as `shard` that goes on from the state."""
    return make_shard(
        state.parameters,
        rule=shard.rule.name,
        settings=shard.hyperparameters,
        behaviour=others.pop("behaviour", shard.behaviour),
        version=state.version,
        slots=state.slots,
        ledger=Ledger(state.ledger),
        pending=state.pending,
        examples=state.examples,
        learning_rate=state.learning_rate,
        **others,
    )


def gradient(values: npt.ArrayLike, **fields: Any) -> Gradient:
    """Returns a float32 gradient of worker "a" on version 0; a later push of a test says its sequence."""
    identity = {"worker_id": "a", "incarnation": 1, "sequence": 0, "base_version": 0, "epoch": 0}
    payload = np.asarray(values, dtype=np.float32).tobytes()
    return Gradient(**{**identity, "codec": Codec.FLOAT32, "payload": payload, **fields})


def nothing(**fields: Any) -> Gradient:
    """Returns a push of a worker that had no gradient for the shard."""
    return gradient([], **{"kind": PayloadKind.NOTHING, **fields})


def contribution(worker_id: str = "a", values: npt.ArrayLike = (1.0,), **fields: Any) -> aggregation.Contribution:
    """Returns a fresh gradient as a protocol sees it."""
    return aggregation.Contribution(gradient(values, worker_id=worker_id, **fields), 0, staleness.Weighing())


def arrival(
    worker_id: str,
    *pending: aggregation.Contribution,
    workers: Roster,
    version: int = 0,
    **fields: Any,
) -> aggregation.Arrival:
    """Returns the arrival of a gradient on that version, unless the fields say otherwise, while others wait."""
    arrived = contribution(worker_id, **{"base_version": version, **fields})
    return aggregation.Arrival(arrived, pending, version, workers)


def push(shard: Shard, values: npt.ArrayLike, *, workers: Roster | None = None, **fields: Any) -> Receipt:
    """Pushes a gradient computed on the shard's present version, unless the fields say otherwise."""
    return shard.push(gradient(values, **{"base_version": shard.version, **fields}), roster=workers or roster())


def pull(shard: Shard, worker_id: str | None = None) -> tuple[int, Floats]:
    """Returns the shard's version and a copy of its parameters."""
    return shard.read(lambda version, parameters: (version, parameters.copy()), worker_id=worker_id)


def refusal(call: Callable[..., object], *arguments: Any, error: type[PypsError] = BadRequest, **more: Any) -> str:
    """Returns the words with which a call is refused; fails with its arguments where it is not."""
    try:
        call(*arguments, **more)
    except error as refused:
        return str(refused)
    raise AssertionError(f"{call} took {arguments} {more}")


def digest(parameters: Floats) -> str:
    return hashlib.blake2b(parameters.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Pushed:
    gradient: Gradient
    receipt: Receipt
    roster: Roster


@dataclass(frozen=True)
class Completed:
    roster: Roster
    version: int


@dataclass(frozen=True)
class Configured:
    behaviour: Behaviour | None
    learning_rate: float | None
    roster: Roster
    version: int


@dataclass(frozen=True)
class Pulled:
    worker_id: str
    version: int


Event = Pushed | Completed | Configured | Pulled


@dataclass
class Log:
    """A recorder that keeps everything, by shard, in the order in which it happened."""

    events: dict[int, list[Event]] = field(default_factory=dict)
    # What each update made of the parameters.
    digests: dict[int, list[str]] = field(default_factory=dict)

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        self._keep(shard_id, Pushed(gradient, receipt, roster))

    def completed(self, shard_id: int, roster: Roster, version: int) -> None:
        self._keep(shard_id, Completed(roster, version))

    def configured(
        self,
        shard_id: int,
        behaviour: Behaviour | None,
        learning_rate: float | None,
        roster: Roster,
        version: int,
    ) -> None:
        self._keep(shard_id, Configured(behaviour, learning_rate, roster, version))

    def updated(self, shard_id: int, update: Update, parameters: Floats) -> None:
        self.digests.setdefault(shard_id, []).append(digest(parameters))

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        self._keep(shard_id, Pulled(worker_id, version))

    def _keep(self, shard_id: int, event: Event) -> None:
        self.events.setdefault(shard_id, []).append(event)

    def pushes(self, shard_id: int) -> list[Pushed]:
        return [event for event in self.events[shard_id] if isinstance(event, Pushed)]

    def applied(self, shard_id: int) -> list[Pushed]:
        return [event for event in self.pushes(shard_id) if event.receipt.outcome == Outcome.APPLIED]


def replay(log: Log, shard: Shard) -> list[str]:
    """Does with the shard what its log says, in order; returns the digest of each version from the first."""
    digests = [digest(pull(shard)[1])]
    for event in log.events[shard.shard_id]:
        version = shard.version
        if isinstance(event, Pushed):
            assert shard.push(event.gradient, roster=event.roster) == event.receipt
        elif isinstance(event, Completed):
            assert version == event.version
            shard.complete(event.roster)
        elif isinstance(event, Configured):
            assert version == event.version
            shard.configure(behaviour=event.behaviour, learning_rate=event.learning_rate, roster=event.roster)
        if shard.version > version:
            digests.append(digest(pull(shard)[1]))
    return digests


def run_together(functions: Sequence[Callable[[], None]]) -> None:
    """Runs the functions in threads that start at once; raises the first error of any."""
    barrier = threading.Barrier(len(functions))
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            barrier.wait(DEADLINE_SECONDS)
            function()
        except BaseException as error:  # told to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive(), "a thread did not end in time"
    if errors:
        raise errors[0]
