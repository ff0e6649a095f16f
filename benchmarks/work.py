"""The work that every subject of a comparison does: models of a few sizes, and how many rounds of each to time."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Size:
    """A model to measure with."""

    name: str
    # Float32 numbers, in `keys` equal tensors.
    params: int
    keys: int
    # Rounds that each worker is timed for, after `warmup` others.
    rounds: int
    warmup: int = 3
    # Whether server and workers get a core each: what counts there is latency, and its tail shows the scheduler else.
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        return self.params * 4

    @property
    def gigabytes_a_round(self) -> float:
        """What a worker's round moves, both ways."""
        return 2 * self.nbytes / 1e9

    def shortened(self, divisor: int) -> Size:
        """The same model for fewer rounds: a first impression instead of a measurement."""
        return replace(self, rounds=max(3, self.rounds // divisor))


SMALL = Size("small", params=10_000, keys=4, rounds=1000, warmup=50, pinned=True)
MID = Size("mid", params=1_000_000, keys=20, rounds=100)
BIG = Size("big", params=25_600_000, keys=160, rounds=20)
SIZES = {size.name: size for size in (SMALL, MID, BIG)}
