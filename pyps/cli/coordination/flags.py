"""The flags that `pyps coordinate` and `pyps sandblaster` share."""

from __future__ import annotations

from typing import Annotated

import typer

from pyps.cli.coordination.drive import CoordinationSettings
from pyps.cli.coordination.remote import Fold
from pyps.lbfgs.optimizer import LINE_SEARCHES, LbfgsSettings
from pyps_wire.errors import BadRequest

# More copies of one portion than this are never of use.
COPIES_MAX = 64
PORTIONS_MAX = 1_000_000
HISTORY_MAX = 1000

# What every help of --portions ends with.
PORTIONS_HELP = "With the same number and --fold portion any number of workers comes to the same bits."

Iterations = Annotated[int, typer.Option(help="Iterations at the most, those before a restart included.", min=1)]
History = Annotated[int, typer.Option(help="Pairs of differences that L-BFGS keeps, m.", min=1, max=HISTORY_MAX)]
LineSearch = Annotated[str, typer.Option(help=f"How a step's length is found: {' or '.join(LINE_SEARCHES)}.")]
FoldText = Annotated[
    str,
    typer.Option(
        "--fold",
        help="What workers stage: each portion's gradient, or of group:k=4 the sum (less memory).",
    ),
]
Copies = Annotated[
    int, typer.Option(help="Workers that may compute one portion near a pass's end.", min=1, max=COPIES_MAX)
]
Tolerance = Annotated[float, typer.Option(help="End where no element of the gradient is larger.", min=0.0)]
LossTolerance = Annotated[
    float,
    typer.Option(help="End where an iteration lowers the loss by no more than this part of it.", min=0.0),
]
SaveEvery = Annotated[
    int, typer.Option(help="Iterations between checkpoints that servers are asked for; 0: in their own time.", min=0)
]

DEFAULTS = LbfgsSettings()


def coordination_settings(
    *,
    iterations: int,
    history: int,
    line_search: str,
    portions: int,
    fold: str,
    copies: int,
    tolerance: float,
    loss_tolerance: float,
    save_every: int,
) -> CoordinationSettings:
    """The flags as settings; raises BadRequest for what cannot be used."""
    if line_search not in LINE_SEARCHES:
        raise BadRequest(f"--line-search is {line_search!r}; expected {' or '.join(LINE_SEARCHES)}")
    return CoordinationSettings(
        lbfgs=LbfgsSettings(
            history=history,
            line_search=line_search,
            iterations_max=iterations,
            gradient_tolerance=tolerance,
            loss_tolerance=loss_tolerance,
        ),
        num_portions=portions,
        fold=Fold.parse(fold),
        copies=copies,
        save_every=save_every,
    )


def spelled_coordination(settings: CoordinationSettings) -> tuple[str, ...]:
    """The settings as flags of `pyps coordinate`."""
    lbfgs = settings.lbfgs
    return (
        *("--iterations", str(lbfgs.iterations_max)),
        *("--history", str(lbfgs.history)),
        *("--line-search", lbfgs.line_search),
        *("--portions", str(settings.num_portions)),
        *("--fold", str(settings.fold)),
        *("--copies", str(settings.copies)),
        *("--tolerance", repr(lbfgs.gradient_tolerance)),
        *("--loss-tolerance", repr(lbfgs.loss_tolerance)),
        *("--save-every", str(settings.save_every)),
    )
