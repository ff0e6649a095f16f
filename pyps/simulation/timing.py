"""How long a worker computes: seconds of virtual time by step, drawn from the worker's own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# Takes the step's number, from 0, and the worker's random numbers.
Timing = Callable[[int, np.random.Generator], float]

# No step takes less than this share of the mean, however the dice fall.
SHORTEST = 0.05


def fixed(seconds: float) -> Timing:
    """Every step takes the same time."""
    return lambda step, random: seconds


def scripted(seconds: Sequence[float]) -> Timing:
    """Steps take these times in turn; from the last on they repeat it."""
    return lambda step, random: seconds[min(step, len(seconds) - 1)]


def normal(mean: float = 1.0, *, variation: float) -> Timing:
    """Times spread about the mean with that coefficient of variation."""
    return lambda step, random: mean * max(SHORTEST, 1 + variation * float(random.standard_normal()))


def lognormal(mean: float = 1.0, *, sigma: float) -> Timing:
    """Times whose logarithm is normal with deviation `sigma`: now and then a step takes long."""
    return lambda step, random: mean * float(np.exp(sigma * random.standard_normal() - sigma * sigma / 2))


def exponential(mean: float = 1.0) -> Timing:
    """Times without memory, as on machines with many other tenants."""
    return lambda step, random: mean * float(random.exponential())
