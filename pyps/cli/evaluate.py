"""`pyps eval`: scores a running model with a user's script, outside the training."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from pyps.cli.control import DataServers, ObserverTokenFile, observe
from pyps_client.arrays import Observer
from pyps_client.credentials import read_token
from pyps_wire.errors import InvalidArgument, ServerUnavailable

Parameters = dict[str, npt.NDArray[np.float32]]
# The score, or several by name.
Evaluate = Callable[[Parameters], float | Mapping[str, float]]


def evaluate(
    script: Annotated[Path, typer.Argument(help="Python file that defines evaluate(parameters).")],
    servers: DataServers = "127.0.0.1:7610",
    every: Annotated[float, typer.Option(help="Seconds between two evaluations.", min=0.0)] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Evaluate one snapshot and end.")] = False,
    token_file: ObserverTokenFile = None,
    wait_seconds: Annotated[float, typer.Option(help="How long to wait for servers at the start.")] = 300.0,
) -> None:
    """Evaluate a running model with your own script, as an observer.

    The script defines evaluate(parameters), which gets the model's tensors by name as float32 numpy arrays
    and returns a number, or several in a dict. One line is printed per snapshot, until the servers are gone.
    """
    function = load_evaluate(script)
    token = read_token(token_file)
    # Lost servers end the evaluation.
    with observe(servers, token, start_wait_seconds=wait_seconds, loss_wait_seconds=every) as observer:
        print_score(observer, function, script)
        while not once:
            time.sleep(every)
            try:
                print_score(observer, function, script)
            except ServerUnavailable:
                typer.echo("The servers are gone: the run has ended.")
                return


def load_evaluate(script: Path) -> Evaluate:
    """Run a script as a module, and return its function `evaluate`."""
    require_script(script)
    with errors_of(script):
        function = run_script(script).get("evaluate")
    if not callable(function):
        raise InvalidArgument(f"{script} defines no function evaluate(parameters).")
    return function  # type: ignore[no-any-return]


def require_script(script: Path) -> None:
    if not script.is_file():
        raise InvalidArgument(f"There is no script {script}.")


def run_script(script: Path) -> dict[str, Any]:
    """Run a script as a module; return what it defines."""
    # The script may import modules from its folder, as with `python script.py`.
    sys.path.insert(0, str(script.resolve().parent))
    return runpy.run_path(str(script), run_name="__pyps_eval__")


@contextmanager
def errors_of(script: Path) -> Iterator[None]:
    """Print an error of the user's script with the script's own frames only, and exit."""
    try:
        yield
    except Exception as error:
        typer.echo(explained(error, script), err=True)
        raise typer.Exit(1) from None


def explained(error: Exception, script: Path) -> str:
    """Return an error of the user's script as Python prints it, from the script's first frame on."""
    frames = traceback.TracebackException.from_exception(error)
    own = [number for number, frame in enumerate(frames.stack) if frame.filename == str(script)]
    # An error of syntax names its place itself; others without a frame there come from a module of the user's, or ours.
    del frames.stack[: own[0] if own else len(frames.stack) * isinstance(error, SyntaxError)]
    return "".join([*frames.format(), f"pyps: {script} failed with the error above."])


def print_score(observer: Observer, function: Evaluate, script: Path) -> None:
    """Print the scores of a snapshot: "update 512  accuracy 0.9423"."""
    parameters = observer.snapshot()
    with errors_of(script):
        result = function(parameters)
    scores = result if isinstance(result, Mapping) else {"score": result}
    words = (f"{name} {float(value):.6g}" for name, value in scores.items())
    typer.echo("  ".join([f"update {observer.global_step}", *words]))
