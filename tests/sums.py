"""How later Pythons add: what holds on one version must hold on another."""

from __future__ import annotations

import math
from collections.abc import Iterable


def compensated_sum(values: Iterable[float]) -> float:
    """What sum() returns from Python 3.12 on: floats are added with the error of rounding made good."""
    numbers = list(values)
    return math.fsum(numbers) if any(isinstance(number, float) for number in numbers) else sum(numbers)
