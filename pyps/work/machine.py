"""What an optimizer without access to parameters needs: servers that execute instructions, workers that make passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pyps.core.instructions import Instruction


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
