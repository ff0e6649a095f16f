"""L-BFGS's direction by a recursion on coefficients alone, after one table of products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyps.work.formulas import DIRECTION, GRADIENT, combine, dot, products
from pyps.work.lbfgs_state import Pair
from pyps.work.machine import Machine


def vector_free(machine: Machine, pairs: Sequence[Pair]) -> float:
    """Makes the direction that `two_loop` makes, but for rounding; returns its slope, d.g,
    or NaN where a coefficient is not finite.

    Chen, Wang and Zhou 2014: every vector of the recursion is a combination of s_1..s_m, y_1..y_m and g, so it needs
    only their products. Those of two s never occur. 3 instructions in 2 messages, whatever m is.
    """
    num_pairs = len(pairs)
    columns = [*(pair.y for pair in pairs), GRADIENT]
    names = [*(pair.s for pair in pairs), *columns]
    scalars = machine.execute(products(names, columns))
    width = len(columns)
    table = [scalars[row * width : (row + 1) * width] for row in range(len(names))]
    s_products, y_products = table[:num_pairs], table[num_pairs:]
    # q = the sum of s_part[i] s_i, y_part[i] y_i and the last of y_part times g.
    s_part, y_part = [0.0] * num_pairs, [0.0] * num_pairs + [1.0]
    alphas = [0.0] * num_pairs
    for i in reversed(range(num_pairs)):
        alphas[i] = _sum_of_products(y_part, s_products[i]) / pairs[i].sy
        y_part[i] -= alphas[i]
    gamma = pairs[-1].sy / pairs[-1].yy  # the scale of the first guess of H
    y_part = [gamma * part for part in y_part]
    for i in range(num_pairs):
        s_side = _sum_of_products(s_part, [row[i] for row in s_products])
        beta = (s_side + _sum_of_products(y_part, y_products[i])) / pairs[i].sy
        s_part[i] += alphas[i] - beta
    scalars = [-part for part in (*s_part, *y_part)]
    if not all(map(math.isfinite, scalars)):
        return math.nan
    (slope,) = machine.execute(combine(DIRECTION, names, scalars), dot(DIRECTION, GRADIENT))
    return slope


def _sum_of_products(left: Sequence[float], right: Sequence[float]) -> float:
    # Not by sum(): from Python 3.12 on it rounds otherwise, and a coordinator that comes back must find the same bits.
    total = 0.0
    for a, b in zip(left, right, strict=True):
        total += a * b
    return total
