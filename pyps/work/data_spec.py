"""What a data set is, as far as the queue of its portions is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pyps_wire.errors import BadRequest

# Every portion of a pass is remembered until the pass is over.
PORTIONS_MAX = 1_000_000
NAME_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A data set, and how it is cut. BadRequest where a field makes no sense."""

    # For people: "train".
    name: str = ""
    num_examples: int = 0
    # Examples in a portion; 0 leaves it to the queue.
    portion_examples: int = 0
    # Examples in a minibatch; 0 where that is the worker's business, or the server's.
    batch_size: int = 0
    # Whether a portion is a range of places in each pass's permutation, and what the permutations are made of.
    shuffle: bool = False
    seed: int = 0
    # Whether a coordinator begins the passes; else each begins when the one before it is done.
    coordinated: bool = False

    def __post_init__(self) -> None:
        if len(self.name) > NAME_LENGTH_MAX:
            raise BadRequest(
                f"the data set's name has {len(self.name)} characters; expected {NAME_LENGTH_MAX} at most: shorten it"
            )
        if self.num_examples < 1:
            raise BadRequest(
                f"the data set {self.name!r} has {self.num_examples} examples; expected 1 at least:"
                " look where it is loaded"
            )
        for name in ("portion_examples", "batch_size", "seed"):
            if getattr(self, name) < 0:
                raise BadRequest(f"{name} is {getattr(self, name)}; expected 0 or more")

    def require_same(self, other: DataSpec, *, worker_id: str) -> None:
        """Raises BadRequest, naming the first field in which `other`, the worker's word, differs."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                raise BadRequest(
                    f"worker {worker_id!r} says {field.name} {theirs!r} of the data set, but the run's has {ours!r}:"
                    " give all workers one data set and the same settings, or start another run"
                )

    def to_json(self) -> dict[str, Any]:
        """The data set as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> DataSpec:
        """The data set of plain values; BadRequest where they are none."""
        names = {field.name for field in fields(cls)}
        if set(plain) != names:
            raise BadRequest(f"a data set has the fields {sorted(names)}; these came: {sorted(plain)}")
        return cls(**plain)
