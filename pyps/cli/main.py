"""The `pyps` command, with subcommands that are imported when they are called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pyps import __version__
from pyps_wire.errors import PypsError

# Each subcommand's help in a line, and its function.
COMMANDS = {
    "serve": ("Run a server, which holds parameters and applies gradients.", "serve:serve"),
    "run": ("Start servers and workers on this machine, and end with them.", "run:run"),
    "slurm": ("Submit a job of servers and workers to Slurm.", "slurm:slurm"),
    "ray": ("Start servers and workers on a Ray cluster, and end with them.", "ray:ray"),
    "sandblaster": ("Train by Sandblaster L-BFGS on this machine.", "sandblaster:sandblaster"),
    "coordinate": ("Coordinate Sandblaster L-BFGS over running servers.", "coordinate:coordinate"),
    "demo": ("Watch workers train a small network on real images.", "demo:demo"),
    "status": ("Show what servers, workers and shards are doing.", "status:status"),
    "dashboard": ("Show a run as a page in the browser.", "dashboard:dashboard"),
    "report": ("Keep the page of a run that was logged in one file.", "dashboard:report"),
    "top": ("Watch servers and workers as they train, in a terminal.", "top:top"),
    "set": ("Change protocol, staleness policy or learning rate of a running job.", "control:configure"),
    "export": ("Write the model to a file.", "export:export"),
    "checkpoint": ("List, check, remove and convert checkpoints.", "checkpoint:checkpoint"),
    "reset": ("Make servers forget a run, its parameters included.", "control:reset"),
    "replay": ("Make logged updates again, and compare the bits.", "export:replay"),
    "save": ("Make servers write a checkpoint now.", "control:save"),
    "stop": ("Finish a run.", "control:stop"),
    "drain": ("Let servers hand over to their standbys, and end.", "control:drain"),
    "promote": ("Make standbys take over.", "control:promote"),
    "simulate": ("Train a model of yours on a virtual cluster, under several protocols.", "simulate:simulate"),
    "advise": ("Say which way of training a model of yours to start with.", "advise:advise"),
    "eval": ("Score a running model with a script of your own.", "evaluate:evaluate"),
    "bench": ("Measure rounds between this machine and running servers.", "bench:bench"),
    "certs": ("Make, show and check certificates for TLS.", "certs:certs"),
    "health": ("Ask servers for their health.", "control:health"),
}


class App(typer.Typer):
    """The command line; a refusal is one sentence instead of a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except PypsError as error:
            typer.echo(f"pyps: {error}", err=True)
            raise SystemExit(2) from None


class CommandGroup(TyperGroup):
    """Imports a subcommand when it is called, so that a server does not load what only the demo needs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, what) for name, (what, _) in COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the subcommand of that name, None for an unknown one."""
        if cmd_name not in COMMANDS:
            return None
        module_name, _, function_name = COMMANDS[cmd_name][1].partition(":")
        module = importlib.import_module(f"pyps.cli.{module_name}")
        command = getattr(module, function_name)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        # A command that hands arguments on to another program says so in CONTEXT_SETTINGS.
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        single.command(cmd_name, context_settings=settings)(command)
        return typer.main.get_command(single)


app = App(
    name="pyps",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    # Plain help: tables cut off the names of flags in a narrow terminal.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyps {__version__}")
        raise typer.Exit


@app.callback()
def pyps(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A parameter server for PyTorch: train one model on many unequal workers."""
