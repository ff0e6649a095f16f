"""Runs that serve a model without a server, and workers that push to them, for unit tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyps.config import resolve
from pyps.core.gradient import Codec, Gradient
from pyps.core.receipt import Receipt
from pyps.run import Greeting, Run
from pyps.run.initialization import Opening
from pyps_wire.partition import Model, Tensor, partition

SHARD_SIZE = 16
MODEL = Model((Tensor("x", (2 * SHARD_SIZE,)),), shard_size=SHARD_SIZE)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_run(*, recorder: Any = None, clock: Any = None, **flags: str) -> Run:
    """A run that nobody has joined: SGD with learning rate 1 and no staleness policy unless told otherwise."""
    flags = {"optimizer": "sgd:learning_rate=1", "staleness": "none", **flags}
    more = {} if clock is None else {"clock": clock}
    return Run(resolve(flags, {}, warn=print), recorder=recorder, **more)


def serving(*names: str, model: Model = MODEL, **settings: Any) -> Run:
    """A run with these workers, "a" unless told otherwise, that serves zeros."""
    run = make_run(**settings)
    names = names or ("a",)
    terms = [
        run.hello(Greeting("r", name, 1, 1, "test", False, 0, 1, model, None, "", "", 0, "")).term for name in names
    ]
    initialization = run.begin_initialize(Opening("r", names[0], 1, terms[0], model, None, 0, 1))
    assert initialization is not None
    for shard in partition(model, num_servers=1).of_server(0):
        initialization.add(shard.shard_id, Codec.FLOAT32, memoryview(bytes(4 * shard.length)))
    run.commit(initialization)
    return run


class Crew:
    """A run that serves MODEL, and pushes of its workers."""

    def __init__(self, *names: str, **flags: str) -> None:
        self.clock = Clock()
        self.run = serving(*names, clock=self.clock, **flags)
        self._sequences = dict.fromkeys(names, 0)

    def push(self, name: str, value: float = 1.0, base_version: int = 0, shard_id: int = 0, **fields: Any) -> Receipt:
        self._sequences[name] += 1
        payload = np.full(self.run.shards[shard_id].length, value, np.float32).tobytes()
        fields = {"example_count": 1, **fields}
        gradient = Gradient(name, 1, self._sequences[name], base_version, 0, Codec.FLOAT32, payload, **fields)
        return self.run.push(gradient, shard_id, run_id="r")

    def may_proceed(self, name: str, clock: int = 0, **call: Any) -> bool:
        return self.run.may_proceed("r", name, 1, clock=clock, **{"wake": lambda: None, **call})

    def pass_seconds(self, seconds: int, *alive: str) -> None:
        """Lets time pass, in which the server looks round and these workers give signs of life."""
        for _ in range(seconds):
            self.clock.now += 1.0
            for name in alive:
                self.run.heartbeat("r", name, 1, clock=0, scalars={})
            self.run.tick()

    def versions(self) -> list[int]:
        return [shard.version for shard in self.run.shards.values()]

    def events(self, kind: str) -> list[str]:
        """What people are told of such events."""
        return [event.message for event in self.run.events if event.kind == kind]
