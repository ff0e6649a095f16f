"""The interfaces of an optimizer that never sees a parameter: servers that execute instructions, workers' passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pyps.core.vectors.program import GRADIENT, POINT, Instruction, Operation


@dataclass(frozen=True)
class ServerState:
    """The state of one server when the coordinator attached."""

    iteration: int  # of the last commit there; 0 before the first
    vectors: tuple[str, ...]  # their names


class Machine(Protocol):
    """All servers as one: each executes the same instructions on its part of every vector."""

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        """Execute one program on every server, one message each; return the answers of its instructions in order.

        An answer is the sum over servers in their order, in float64; for NORM_INF the largest, NaN if one is NaN.
        A program that commits goes to server 0 first, so that no server is ahead of the `state` saved there, and a
        restarted coordinator can repeat the commit. A server that has executed it skips it and answers no numbers.
        """

    def execute_on(self, server: int, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> None:
        """Execute a program on one server: at a restart they may have different vectors."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over the data set."""

    loss_sum: float  # over all examples; not finite if one portion's loss was not
    example_count: int
    stage_ids: tuple[int, ...]  # in the order to fold them; their sum is the sum of the gradients of all examples

    @property
    def loss(self) -> float:
        """The mean loss of an example; NaN without examples."""
        return self.loss_sum / self.example_count if self.example_count else math.nan


class Objective(Protocol):
    """The loss, as a pass of all workers over the data set."""

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        """Run one pass at the servers' parameters; its stages stay on the servers until the next call.

        `note` is shown to users: "iteration", "loss" (at the accepted point), "step_length" (of the trial),
        "gradient_norm".
        """


# Besides the accepted point and its gradient: the trial's gradient, the changes of both from the accepted point to the
# trial, and the search direction.
TRIAL_GRADIENT, POINT_CHANGE, GRADIENT_CHANGE, DIRECTION = "t", "s", "y", "d"
VECTORS = (POINT, GRADIENT, TRIAL_GRADIENT, POINT_CHANGE, GRADIENT_CHANGE, DIRECTION)


# Instructions by their operands, which are those of `Instruction` in order.
allocate = partial(Instruction, Operation.ALLOC)
copy = partial(Instruction, Operation.COPY)
dot = partial(Instruction, Operation.DOT, "")
norm1 = partial(Instruction, Operation.NORM1, "")
norm_inf = partial(Instruction, Operation.NORM_INF, "")
PUSH_HISTORY = Instruction(Operation.PUSH_HISTORY, left=POINT_CHANGE, right=GRADIENT_CHANGE)
DROP_OLDEST = Instruction(Operation.DROP_OLDEST)


def combine(target: str, names: Sequence[str], scalars: Sequence[float]) -> Instruction:
    return Instruction(Operation.COMBINE, target=target, names=tuple(names), scalars=tuple(scalars))


def products(names: Sequence[str], others: Sequence[str]) -> Instruction:
    return Instruction(Operation.GRAM, names=tuple(names), others=tuple(others))


def fold(target: str, stage_ids: Sequence[int], example_count: int) -> Instruction:
    return Instruction(Operation.FOLD, target=target, stage_ids=tuple(stage_ids), count=example_count)


def move(left: str, scalar: float = 0.0, right: str = "") -> Instruction:
    return Instruction(Operation.MOVE, left=left, scalar=scalar, right=right)
