"""The settings of a coordinator, which `pyps coordinate` and `pyps sandblaster` share as flags."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Annotated, get_type_hints

import typer

from pyps.cli.serve import with_flags
from pyps.config import flag_name
from pyps.lbfgs.optimizer import LINE_SEARCHES, LbfgsSettings
from pyps_wire.errors import InvalidArgument

PORTIONS_MAX = 1_000_000
# The end of every help of --portions.
PORTIONS_HELP = "With the same number and --fold portion any number of workers comes to the same bits."
_LBFGS = LbfgsSettings()


@dataclass(frozen=True, kw_only=True)
class CoordinationSettings:
    """The flags of a coordinator. Raises InvalidArgument for a value out of range."""

    iterations: Annotated[int, typer.Option(help="Iterations at most, including those before a restart.", min=1)] = (
        _LBFGS.iterations_max
    )
    history: Annotated[int, typer.Option(help="Pairs of differences that L-BFGS keeps, m.", min=1, max=1000)] = (
        _LBFGS.history
    )
    line_search: Annotated[
        str, typer.Option(help=f"How the length of a step is found: {' or '.join(LINE_SEARCHES)}.")
    ] = _LBFGS.line_search
    portions: Annotated[
        int, typer.Option(help=f"Portions of the data set. {PORTIONS_HELP}", min=1, max=PORTIONS_MAX)
    ] = 80
    fold: Annotated[
        str, typer.Option(help="What workers stage: each portion's gradient, or of group:k=4 the sum (less memory).")
    ] = "portion"
    copies: Annotated[
        int, typer.Option(help="Workers that may compute one portion near a pass's end.", min=1, max=64)
    ] = 2
    tolerance: Annotated[float, typer.Option(help="End when no element of the gradient is larger.", min=0.0)] = (
        _LBFGS.gradient_tolerance
    )
    loss_tolerance: Annotated[
        float, typer.Option(help="End when an iteration lowers the loss by no more than this part of it.", min=0.0)
    ] = _LBFGS.loss_tolerance
    save_every: Annotated[
        int, typer.Option(help="Iterations between requested checkpoints; 0 leaves them to the servers.", min=0)
    ] = 0

    def __post_init__(self) -> None:
        if self.line_search not in LINE_SEARCHES:
            raise InvalidArgument(f"--line-search is {self.line_search!r}; expected {' or '.join(LINE_SEARCHES)}")
        _ = self.lbfgs, self.portions_per_stage

    @property
    def lbfgs(self) -> LbfgsSettings:
        return LbfgsSettings(
            history=self.history,
            line_search=self.line_search,
            iterations_max=self.iterations,
            gradient_tolerance=self.tolerance,
            loss_tolerance=self.loss_tolerance,
        )

    @property
    def portions_per_stage(self) -> int:
        """The number of claimed portions whose gradients a worker sums before it stages the sum.

        The paper sends gradients "every few completed portions"; with 1 the sum of all has the same bits whichever
        worker computed which portion.
        """
        match = re.fullmatch(r"portion|group(?::k=0*([1-9][0-9]*))?", self.fold)
        if match is None:
            raise InvalidArgument(
                f"--fold is {self.fold!r}; expected portion, or group:k=4 with any whole number k above 0"
            )
        return 1 if self.fold == "portion" else int(match[1] or 4)

    def num_stages(self, num_portions: int, *, num_workers: int) -> int:
        """Return the most staged sums at once: with groups each worker's last one may be of fewer portions."""
        if self.portions_per_stage == 1:
            return num_portions
        return min(num_portions, math.ceil(num_portions / self.portions_per_stage) + num_workers)

    def as_flags(self) -> tuple[str, ...]:
        return tuple(text for name, value in asdict(self).items() for text in (flag_name(name), str(value)))


_KINDS = get_type_hints(CoordinationSettings, include_extras=True)
# Replaces a command's `**` parameter by a flag for each setting that it does not declare itself.
with_coordination = partial(
    with_flags,
    added=[
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=_KINDS[each.name])
        for each in fields(CoordinationSettings)
    ],
)
