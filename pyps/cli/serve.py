"""`pyps serve`: runs one server. Its flags are the fields of ServerConfig; other commands share some of them."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pyps import logs
from pyps.config import ServerConfig, flag_name, resolve, variable_name

# Flags of every command that starts servers and workers.
OF_A_JOB = (
    *("protocol", "warmup", "staleness", "optimizer", "schedule", "epoch_examples", "batch_growth", "clip_norm"),
    *("bounds", "stall_seconds", "start_together", "stop_after"),
)
KEPT = ("checkpoint_dir", "resume")
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**settings` by a flag for each of these settings, or for all.

    A flag's value is text, which the configuration checks.
    """
    parameters = []
    kinds = typing.get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        if names and field.name not in names:
            continue
        flag, kind = flag_name(field.name), kinds[field.name]
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]
        if kind is bool:
            option: Any = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=_help(field))]
        else:
            metavar = "|".join(field.metadata["choices"]) or _METAVARS[kind]
            option = Annotated[str | None, typer.Option(flag, help=_help(field), metavar=metavar)]
        keyword = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        parameters.append(keyword)
    return partial(with_flags, added=parameters)


def with_flags(command: Callable[..., None], added: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Replace a command's `**` parameter by these parameters, but for those that it declares itself."""
    own = inspect.signature(command, eval_str=True)
    parameters = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    parameters += [one for one in added if one.name not in own.parameters]
    # typer reads a command's flags from there.
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _help(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is False:
        default = "no"
    elif default in (None, ""):
        default = "none"
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{field.metadata['meaning']} [default: {default}; env: {variable_name(field.name)}]"


@with_settings()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings, named as the flags with _ for -.", metavar="PATH")
    ] = None,
    **settings: Any,
) -> None:
    """Run a server: it holds parameters and applies gradients, until it is stopped."""
    # Other commands import this module for its flags.
    from pyps.service import server

    warnings: list[str] = []
    resolved = resolve(settings, os.environ, config, warn=warnings.append)
    log_format = typing.cast(logs.Format, resolved.log_format)
    logs.configure(log_format, level=logging.getLevelNamesMapping()[resolved.log_level.upper()])
    for line in warnings:
        logs.get("pyps.config").warning(line)
    raise typer.Exit(server.serve(resolved))
