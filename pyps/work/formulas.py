"""Instructions written as their formulas, and the names of the vectors that the optimizer keeps on the servers."""

from __future__ import annotations

from collections.abc import Sequence

from pyps.core.instructions import Instruction, Operation, Precision

# The point last accepted, its gradient, a trial point's gradient, and the changes of both between the two.
POINT, GRADIENT, TRIAL_GRADIENT, POINT_CHANGE, GRADIENT_CHANGE = "x", "g", "t", "s", "y"
VECTORS_FLOAT32 = (POINT, GRADIENT, TRIAL_GRADIENT, POINT_CHANGE, GRADIENT_CHANGE)
# The search direction, which the recursion makes in place: errors of rounding would add up over 2m terms in float32.
DIRECTION = "d"
VECTORS_FLOAT64 = (DIRECTION,)


def allocate(target: str) -> Instruction:
    precision = Precision.FLOAT64 if target in VECTORS_FLOAT64 else Precision.FLOAT32
    return Instruction(Operation.ALLOC, target=target, precision=precision)


def copy(target: str, left: str) -> Instruction:
    return Instruction(Operation.COPY, target=target, left=left)


def scale(target: str, scalar: float) -> Instruction:
    return Instruction(Operation.SCALE, target=target, scalar=scalar)


def subtract(target: str, left: str, right: str) -> Instruction:
    return Instruction(Operation.SUB, target=target, left=left, right=right)


def add_scaled(target: str, scalar: float, left: str) -> Instruction:
    return Instruction(Operation.AXPY, target=target, scalar=scalar, left=left)


def dot(left: str, right: str) -> Instruction:
    return Instruction(Operation.DOT, left=left, right=right)


def norm1(left: str) -> Instruction:
    return Instruction(Operation.NORM1, left=left)


def norm_inf(left: str) -> Instruction:
    return Instruction(Operation.NORM_INF, left=left)


def products(names: Sequence[str], others: Sequence[str]) -> Instruction:
    return Instruction(Operation.GRAM, names=tuple(names), others=tuple(others))


def combine(target: str, names: Sequence[str], scalars: Sequence[float]) -> Instruction:
    return Instruction(Operation.COMBINE, target=target, names=tuple(names), scalars=tuple(scalars))


def fold(target: str, stage_ids: Sequence[int], example_count: int) -> Instruction:
    return Instruction(Operation.FOLD, target=target, stage_ids=tuple(stage_ids), count=example_count)


def push_history() -> Instruction:
    return Instruction(Operation.PUSH_HISTORY, left=POINT_CHANGE, right=GRADIENT_CHANGE)


def drop_oldest() -> Instruction:
    return Instruction(Operation.DROP_OLDEST)


def move(left: str, scalar: float = 0.0, right: str = "") -> Instruction:
    return Instruction(Operation.MOVE, left=left, scalar=scalar, right=right)
