"""The `pyps` command: one file a subcommand in this folder."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any

import typer

from pyps import __version__
from pyps.config import ConfigError
from pyps_wire.errors import PypsError

# Subcommand, and the module of this package that holds a function of that name.
COMMANDS = {
    "serve": "serve",
    "run": "run",
    "demo": "demo",
    "status": "status",
    "export": "export",
    "reset": "reset",
    "replay": "replay",
    "save": "save",
    "stop": "stop",
    "eval": "evaluate",
    "health": "health",
}


class App(typer.Typer):
    """The command line, with every refusal in one sentence instead of a traceback."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except (ConfigError, PypsError) as error:
            typer.echo(f"pyps: {error}", err=True)
            raise SystemExit(2) from None


app = App(
    name="pyps",
    help="A parameter server for PyTorch: train one model on many unequal workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
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


def _register() -> None:
    for command, module_name in COMMANDS.items():
        full_name = f"pyps.cli.{module_name}"
        if importlib.util.find_spec(full_name) is not None:
            module = importlib.import_module(full_name)
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            app.command(command, context_settings=settings)(getattr(module, module_name))


_register()
