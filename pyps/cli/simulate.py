"""`pyps simulate`: trains a user's model on a virtual cluster, under each of several protocols, policies and rates."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from pyps.cli.evaluate import require_script
from pyps.cli.laboratory import report
from pyps.cli.laboratory.settings import Settings, with_cluster
from pyps.cli.laboratory.sweep import Pool, ScriptFailed, ended_by_signals, grid
from pyps.cli.status import PIPE_COLUMNS
from pyps.units import counted, in_bytes
from pyps_wire.errors import InvalidArgument


@with_cluster()
@ended_by_signals()
def simulate(
    script: Annotated[
        Path | None,
        typer.Argument(help="Python file that defines model(), loss(model, batch), data and maybe evaluate(model)."),
    ] = None,
    no_gradients: Annotated[
        bool, typer.Option("--no-gradients", help="Simulate times, staleness and bytes alone, without a script.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for CSV, JSON and a picture.")] = None,
    processes: Annotated[int, typer.Option(help="Trials at once; 0: one a core.", min=0, max=1024)] = 0,
    **flags: Any,
) -> None:
    """Train a model of yours on a virtual cluster, under each protocol, staleness policy and rate.

    Gradients are real, and are computed at the parameters that each virtual worker pulled; the servers' code is the
    real one. Only time is virtual: nothing is started. The same seeds give the same bytes.
    """
    settings = Settings(**flags)
    trials, remarks = grid(settings)
    if (script is None) != no_gradients:
        raise InvalidArgument("name a script, as in `pyps simulate model.py`, or --no-gradients, one of the two")
    if no_gradients and settings.rate:
        raise InvalidArgument(f"--rate is {settings.rate}, but --no-gradients trains nothing: leave one of them out")
    if script is not None:
        require_script(script)
    if out is not None:
        # Trials may take long: what cannot be written is said now.
        with report.writing(out):
            pass
    try:
        with Pool(script, min(processes or os.cpu_count() or 1, len(trials))) as pool:
            size, num_examples = (settings.parameters, 0) if script is None else pool.sizes()
            settings = settings.sized(num_parameters=size, num_examples=num_examples)
            typer.echo(_in_words(settings, len(trials)))
            for remark in remarks:
                typer.echo(remark)
            console = Console(stderr=True)
            with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
                task = progress.add_task("Simulating", total=len(trials))
                outcomes = pool.run(trials, settings, tell=lambda done: progress.update(task, completed=done))
    except ScriptFailed as failed:
        typer.echo(str(failed), err=True)
        raise typer.Exit(1) from None
    rows = list(zip(trials, outcomes, strict=True))
    # A narrow terminal folds lines; a word that is cut is lost.
    console = Console(width=max(PIPE_COLUMNS, Console().width))
    console.print(report.table(rows, settings, trained=script is not None))
    lost = sum(not math.isfinite(float(each["figure"])) or each["note"] == "diverged" for _, each in outcomes)
    if lost and script is not None:
        typer.echo(f"{lost} of {len(trials)} trials diverged, or their figure is no number: try lower rates.", err=True)
    if out is not None:
        with report.writing(out):
            written = report.write(out, rows, settings)
        typer.echo(f"Written: {', '.join(map(str, written))}")
        if script is not None and out / "simulation.png" not in written:
            typer.echo("There is no picture without matplotlib: pip install 'pyps[demo]'")


def _in_words(settings: Settings, num_trials: int) -> str:
    push, pull = settings.service(-(-settings.parameters // settings.shards))
    return (
        f"{counted(num_trials, 'trial')} of {settings.examples:,} examples in {settings.pushes:,} pushes, "
        f"{counted(settings.workers, 'virtual worker')}, {settings.parameters:,} parameters "
        f"({in_bytes(4 * settings.parameters)}); a shard takes {push * 1e3:.3g} ms a push, {pull * 1e3:.3g} ms a pull."
    )
