"""Instructions on vectors that lie on the servers, cut as the parameters are: Sandblaster's instruction set.

Dean et al. 2012, section 4.2: a coordinator without access to the parameters sends operations such as dot product,
scaling, coefficient-wise addition and multiplication; each shard executes them on its part.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["PARAMETERS", "Instruction", "Operation", "Precision"]

# The vector that stands for the shards' parameters: any operation may read it, MOVE alone writes it.
PARAMETERS = "parameters"


class Operation(enum.IntEnum):
    """What an instruction does; x, y, z and a are its left, right, target and scalar. The values are the protocol's."""

    ALLOC = 1  # makes z, zeroed; z must not exist
    FREE = 2  # forgets z
    FILL = 3  # z = a, in every element
    COPY = 4  # z = x
    SCALE = 5  # z = a z
    ADD = 6  # z = x + y
    SUB = 7  # z = x - y
    MUL = 8  # z = x y, element by element
    AXPY = 9  # z = z + a x
    DOT = 10  # answers with the sum of x y
    NORM1 = 11  # answers with the sum of |x|
    NORM_INF = 12  # answers with the largest |x|
    COMBINE = 13  # z = the sum of scalars[i] names[i]
    GRAM = 14  # answers with the sums of the products of each of names with each of others, row by row
    FOLD = 15  # z = the sum of the stages, in the order of stage_ids, divided by count
    PUSH_HISTORY = 16  # moves x and y into the history as its newest pair; x and y are gone then
    DROP_OLDEST = 17  # forgets the oldest pair
    MOVE = 18  # parameters = x + a y, and every version grows by one; y may be empty
    BEGIN_PASS = 19  # forgets all stages, and takes from now on those of pass count


class Precision(enum.IntEnum):
    """How the numbers of a vector are kept. The values are the protocol's."""

    FLOAT32 = 1
    FLOAT64 = 2


@dataclass(frozen=True)
class Instruction:
    """One operation, and what it needs; what an operation does not name above is ignored."""

    operation: Operation
    target: str = ""
    left: str = ""
    right: str = ""
    scalar: float = 0.0
    precision: Precision = Precision.FLOAT32
    names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    scalars: tuple[float, ...] = ()
    stage_ids: tuple[int, ...] = ()
    count: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Returns it as JSON can hold it, without what is at its default."""
        plain: dict[str, Any] = {"operation": self.operation.name}
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                plain[field.name] = value.name if isinstance(value, Precision) else _plain(value)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Instruction:
        """The reverse of `to_plain`."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        given["operation"] = Operation[given["operation"]]
        if "precision" in given:
            given["precision"] = Precision[given["precision"]]
        return cls(**given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
