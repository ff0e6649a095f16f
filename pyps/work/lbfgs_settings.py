"""What a user may choose of L-BFGS."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyps.work.line_search import Armijo, LineSearch, StrongWolfe
from pyps_wire.errors import BadRequest

LINE_SEARCHES = ("armijo", "wolfe")


@dataclass(frozen=True, kw_only=True)
class LbfgsSettings:
    """Settings of L-BFGS; the defaults are those of a first attempt. Raises BadRequest for a value out of range."""

    # Pairs of differences that the direction is made of, m.
    history: int = 10
    # "armijo": shorter steps until the loss falls enough. "wolfe": until the slope has flattened as well.
    line_search: str = "armijo"
    # How much of the first slope's fall the loss must show, and what the slope must have come down to.
    c1: float = 1e-4
    c2: float = 0.9
    # armijo: each step is so much of the one before.
    backtrack: float = 0.5
    # Steps tried along one direction, each a pass over the data set.
    trials_max: int = 20
    iterations_max: int = 20
    # Ends where no element of the gradient is larger.
    gradient_tolerance: float = 1e-5
    # Ends where an iteration lowers the loss by no more than this part of it; less is noise where models are float32.
    loss_tolerance: float = 1e-7
    # The direction from one table of products, in 2 messages an iteration in place of 2m.
    vector_free: bool = False
    # A pair is kept where s.y is larger than this times |s| |y|.
    curvature: float = 1e-10

    def __post_init__(self) -> None:
        for name in ("history", "trials_max", "iterations_max"):
            value = getattr(self, name)
            _check(value >= 1, name, value, expected="at least 1")
        _check(self.line_search in LINE_SEARCHES, "line_search", self.line_search, expected="armijo or wolfe")
        _check(0.0 < self.c1 < 1.0, "c1", self.c1, expected="a number between 0 and 1")
        _check(self.c1 < self.c2 < 1.0, "c2", self.c2, expected=f"a number between c1, {self.c1}, and 1")
        _check(0.0 < self.backtrack < 1.0, "backtrack", self.backtrack, expected="a number between 0 and 1")
        for name in ("gradient_tolerance", "loss_tolerance", "curvature"):
            value = getattr(self, name)
            _check(0.0 <= value < math.inf, name, value, expected="a finite number of at least 0")

    def make_line_search(self) -> LineSearch:
        """Returns the search that is named."""
        if self.line_search == "wolfe":
            return StrongWolfe(c1=self.c1, c2=self.c2, trials_max=self.trials_max)
        return Armijo(c1=self.c1, backtrack=self.backtrack, trials_max=self.trials_max)


def _check(holds: bool, setting: str, value: float | str, *, expected: str) -> None:
    if not holds:
        raise BadRequest(f"{setting} is {value}; expected {expected}")
