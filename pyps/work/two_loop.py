"""L-BFGS's direction by the two-loop recursion on vectors that lie on the servers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyps.work.formulas import DIRECTION, GRADIENT, add_scaled, copy, dot, norm1, scale
from pyps.work.lbfgs_state import Pair
from pyps.work.machine import Machine


def two_loop(machine: Machine, pairs: Sequence[Pair]) -> float:
    """Makes d = -H g from at least one pair, oldest first; returns its slope, d.g, or NaN where a scalar is not finite.

    Nocedal and Wright 2006, algorithm 7.4; H is the inverse Hessian that the m pairs stand for. 4m + 4 instructions in
    2m + 1 messages: each product depends on the one before.
    """
    alphas: list[float] = []
    program = [copy(DIRECTION, GRADIENT)]
    for pair in reversed(pairs):
        (product,) = machine.execute(*program, dot(pair.s, DIRECTION))
        alphas.append(product / pair.sy)
        program = [add_scaled(DIRECTION, -alphas[-1], pair.y)]
        if not math.isfinite(alphas[-1]):
            return math.nan
    gamma = pairs[-1].sy / pairs[-1].yy  # the scale of the first guess of H
    program.append(scale(DIRECTION, gamma))
    for pair in pairs:
        (product,) = machine.execute(*program, dot(pair.y, DIRECTION))
        share = alphas.pop() - product / pair.sy
        program = [add_scaled(DIRECTION, share, pair.s)]
        if not math.isfinite(share):
            return math.nan
    (slope,) = machine.execute(*program, scale(DIRECTION, -1.0), dot(DIRECTION, GRADIENT))
    return slope


def steepest(machine: Machine) -> tuple[float, float]:
    """Makes d = -g; returns its slope, d.g, and the sum of the elements of |g|."""
    slope, norm = machine.execute(
        copy(DIRECTION, GRADIENT), scale(DIRECTION, -1.0), dot(DIRECTION, GRADIENT), norm1(GRADIENT)
    )
    return slope, norm
