"""What an optimizer without access to parameters works with: servers that execute instructions, workers' passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyps.core.vectors.program import Instruction, Operation, Precision


@dataclass(frozen=True)
class ServerStanding:
    """Where one server stood when the coordinator came to it."""

    iteration: int  # of the last commit that was executed there; 0 before the first
    vectors: tuple[str, ...]  # names of the vectors there


class Machine(Protocol):
    """All servers as one: each executes the same instructions on its part of every vector."""

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        """Executes one program on every server, one message each; returns the answers of its instructions in order.

        An answer is the sum over servers in their order, in float64; for NORM_INF the largest, NaN if one is NaN.
        A program that commits goes to server 0 first, and to the others when server 0 has answered: then no server is
        ever ahead of what server 0 has written down in `state`, and a coordinator that comes back can have the others
        make the same commit. A server whose iteration is as large already skips it and answers with no numbers.
        """
        ...

    def execute_on(self, server: int, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> None:
        """Executes a program on one server; when a coordinator comes back, they need not all have the same vectors."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """What one pass over the data set gave."""

    loss_sum: float  # over all examples; not finite where one portion's loss was not
    example_count: int
    stage_ids: tuple[int, ...]  # to be folded in this order; together the sum of the gradients of all examples

    @property
    def loss(self) -> float:
        """The mean loss of an example; NaN where there was none."""
        return self.loss_sum / self.example_count if self.example_count else math.nan


class Objective(Protocol):
    """The loss, as a pass of all workers over the data set."""

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        """Makes one pass at the servers' parameters: BEGIN_PASS, the workers' portions, the end of the pass.

        The stages lie on the servers until the next call. `note` is for people who ask how far the work is:
        "iteration", "loss" (at the accepted point), "step_length" (of the trial), "gradient_norm".
        """
        ...


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
