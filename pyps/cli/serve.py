"""`pyps serve`: runs one server. Its flags are the fields of ServerConfig, none of them listed here."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import types
import typing
from pathlib import Path
from typing import Any

import typer

from pyps import logs, server
from pyps.config import ServerConfig, flag_name, resolve, variable_name

_CONFIG_HELP = "TOML file with settings, named as the flags with _ for -."
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}


def serve(config: Path | None = None, **flags: Any) -> None:
    """Run a server: it holds parameters, applies gradients and answers questions, until it is stopped."""
    warnings: list[str] = []
    settings = resolve(flags, os.environ, config, warn=warnings.append)
    log_format = typing.cast(logs.Format, settings.log_format)
    logs.configure(log_format, level=logging.getLevelNamesMapping()[settings.log_level.upper()])
    for line in warnings:
        logs.get("pyps.config").warning(line)
    raise typer.Exit(server.serve(settings))


def _parameter(name: str, annotation: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=typing.Annotated[annotation, option],
    )


def _parameters() -> list[inspect.Parameter]:
    """One flag a field. All are read as text: the configuration checks them, wherever they come from."""
    parameters = [_parameter("config", Path | None, None, typer.Option(help=_CONFIG_HELP, metavar="PATH"))]
    kinds = typing.get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        kind = kinds[field.name]
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]
        if kind is bool:
            option = typer.Option(flag_name(field.name) + "/--no-" + flag_name(field.name)[2:], help=_help(field))
            parameters.append(_parameter(field.name, bool | None, None, option))
        else:
            choices = "|".join(field.metadata["choices"])
            option = typer.Option(
                flag_name(field.name),
                help=_help(field),
                metavar=choices or _METAVARS[kind],
                show_default=False,
            )
            parameters.append(_parameter(field.name, str | None, None, option))
    return parameters


def _help(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is False:
        default = "no"
    elif default in (None, ""):
        default = "none"
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{field.metadata['meaning']} [default: {default}; env: {variable_name(field.name)}]"


# typer reads a command's flags from its signature.
serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
