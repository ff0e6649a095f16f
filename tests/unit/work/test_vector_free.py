"""The recursion on coefficients, apart from any vector."""

import numpy as np

from pyps.core.vectors.program import Instruction, Operation
from pyps.lbfgs import optimizer as module
from pyps.lbfgs.resume import Pair
from support import compensated_sum

PAIRS = tuple(Pair(k, 1.0 + k, 2.0 + k) for k in range(1, 6))


class Table:
    """A machine without vectors: any products, and the coefficients that come of them."""

    def __init__(self) -> None:
        self.coefficients: tuple[float, ...] = ()

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        first = instructions[0]
        if first.operation is Operation.GRAM:
            count = len(first.names) * len(first.others)
            return list(np.random.default_rng(1).standard_normal(count).tolist())
        self.coefficients = first.scalars
        return [1.0]


def coefficients() -> tuple[float, ...]:
    table = Table()
    assert module.quasi_newton(table, PAIRS) == 1.0
    return table.coefficients


def test_the_coefficients_have_the_same_bits_in_every_version_of_python(monkeypatch):
    before = coefficients()
    monkeypatch.setattr(module, "sum", compensated_sum, raising=False)
    assert coefficients() == before
