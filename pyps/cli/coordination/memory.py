"""What a coordinator will need of the servers' memory, and how workers' sums of gradients are staged."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyps.work.formulas import VECTORS_FLOAT32, VECTORS_FLOAT64
from pyps_wire.errors import BadRequest
from pyps_wire.vector_machine_pb2 import AttachRequest

EXPECTED = "portion, or group:k=4 with any whole number k above 0"
GROUP_DEFAULT = 4


@dataclass(frozen=True)
class Fold:
    """Of how many claimed portions a worker sums the gradients before it stages them."""

    # The paper sends gradients "every few completed portions"; with 1 the sum of all has the same bits whichever worker
    # computed which portion.
    portions_per_stage: int = 1

    @classmethod
    def parse(cls, text: str) -> Fold:
        """Reads "portion", "group" or "group:k=4". Raises BadRequest."""
        name, _, rest = text.partition(":")
        key, _, number = rest.partition("=")
        if name == "portion" and not rest:
            return cls(1)
        if name == "group" and not rest:
            return cls(GROUP_DEFAULT)
        if name == "group" and key == "k" and number.isdecimal() and int(number) > 0:
            return cls(int(number))
        raise BadRequest(f"--fold is {text!r}; expected {EXPECTED}")

    def __str__(self) -> str:
        return "portion" if self.portions_per_stage == 1 else f"group:k={self.portions_per_stage}"

    def stages(self, num_portions: int, *, num_workers: int) -> int:
        """Staged sums at once, at most: with groups each worker's last one may be of fewer portions."""
        if self.portions_per_stage == 1:
            return num_portions
        return min(num_portions, math.ceil(num_portions / self.portions_per_stage) + num_workers)


@dataclass(frozen=True)
class MemoryPlan:
    """What L-BFGS keeps on the servers at most."""

    history: int
    num_portions: int
    num_workers: int
    fold: Fold

    def request(self) -> AttachRequest:
        """The plan as the servers are asked for it, without who asks."""
        return AttachRequest(
            history_pairs=self.history,
            vectors_float32=len(VECTORS_FLOAT32),
            vectors_float64=len(VECTORS_FLOAT64),
            stages=self.fold.stages(self.num_portions, num_workers=self.num_workers),
            num_portions=self.num_portions,
        )
