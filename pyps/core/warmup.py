"""Warm start: serial or hardsync for a shard's first updates, then the configured protocol (Dean et al. 2012, 4.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from pyps.core import protocols, spec
from pyps.core.pacing import Pacer, StagedPacer
from pyps.core.protocols.barrier import Hardsync
from pyps.core.protocols.base import Aggregation, Arrival, Decision
from pyps.core.protocols.paced import Serial
from pyps_wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The protocol of the first `updates` versions, and how workers are admitted afterwards.

    The worker of rank r, in the order of joining, begins its first step of the main protocol no sooner than
    r * release_every updates after the warm-up; 0 admits all at once.
    """

    updates: int = 0
    protocol: str = "serial"
    release_every: int = 0
    # Of the name `protocol`.
    stage: Aggregation = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise InvalidArgument(f"warmup's updates is {self.updates}; expected at least 1, as in updates=200")
        if self.release_every < 0:
            raise InvalidArgument(f"warmup's release_every is {self.release_every}; expected updates, or 0 for none")
        object.__setattr__(self, "stage", protocols.parse(self.protocol))
        if not isinstance(self.stage, Serial | Hardsync):
            raise InvalidArgument(f"warmup's protocol is {self.protocol!r}; expected serial or hardsync")

    @classmethod
    def parse(cls, text: str) -> WarmUp:
        """Return the warm-up of "updates=200,protocol=hardsync,release_every=50"."""
        return spec.build(cls, text, what="warmup")

    @property
    def text(self) -> str:
        return spec.spell_settings(self)


@dataclass(frozen=True, slots=True)
class Staged(Aggregation):
    """One protocol for a shard's first versions, another from then on; each shard changes at its own version.

    No gradient is pending then: serial keeps none, and hardsync's last update applies all.
    """

    name: ClassVar[str] = "staged"
    warm_up: WarmUp
    main: Aggregation

    def __post_init__(self) -> None:
        if self.main.coordinated:
            raise InvalidArgument(
                f"warmup makes a run's first updates from pushes, and under {self.main.text} nobody pushes"
            )
        if self.warm_up.release_every and self.main.barrier:
            raise InvalidArgument(
                f"warmup's release_every lets the workers in one after the other, and {self.main.text} waits for"
                " the gradients of the others; leave release_every out"
            )

    def at(self, version: int) -> Aggregation:
        return (self.warm_up.stage if version < self.warm_up.updates else self.main).at(version)

    def decide(self, arrival: Arrival) -> Decision:
        return self.at(arrival.version).decide(arrival)

    def pacer(self) -> Pacer | None:
        warm_up, main = self.warm_up.stage.pacer(), self.main.pacer()
        if warm_up is None and main is None and not self.warm_up.release_every:
            return None
        return StagedPacer(warm_up, main, updates=self.warm_up.updates, release_every=self.warm_up.release_every)

    def check(self, num_workers: int) -> None:
        self.warm_up.stage.check(num_workers)
        self.main.check(num_workers)

    def check_servers(self, num_servers: int) -> None:
        self.main.check_servers(num_servers)

    def check_worker(self, worker_id: str, parts: tuple[int, ...], replica: str) -> None:
        self.main.check_worker(worker_id, parts, replica)

    def warnings(self, num_workers: int) -> tuple[str, ...]:
        return self.main.warnings(num_workers)

    @property
    def text(self) -> str:
        """Both protocols, for people."""
        return f"{self.main.text} after {self.warm_up.text}"

    @property
    def barrier(self) -> bool:
        return self.warm_up.stage.barrier or self.main.barrier

    @property
    def whole_model(self) -> bool:
        return self.main.whole_model

    @property
    def accumulate(self) -> int:
        return self.main.accumulate
