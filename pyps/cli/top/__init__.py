"""`pyps top`: a live view of a run in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.control import ObserverTokenFile, Servers, fail
from pyps_client.credentials import read_token
from pyps_client.launch import parse_servers
from pyps_wire.contract import CONTROL_PORT


def top(
    context: typer.Context,
    servers: Servers = "127.0.0.1:7611",
    read_only: Annotated[bool, typer.Option("--read-only", help="Change nothing, whatever the token allows.")] = False,
    token_file: ObserverTokenFile = None,
) -> None:
    """Watch servers and workers as they train, until q is pressed.

    Operators change the protocol with p and the learning rate with r. Unless --read-only is given,
    PYPS_OPERATOR_TOKEN_FILE goes before the variables that name other tokens.
    """
    places = parse_servers(servers, port=CONTROL_PORT)
    operators, source = os.environ.get("PYPS_OPERATOR_TOKEN_FILE"), context.get_parameter_source("token_file")
    if operators and not read_only and source is not None and source.name == "ENVIRONMENT":
        token_file = Path(operators)
    read_token(token_file)
    try:
        from pyps.cli.top.screen import Top
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        fail(f"pyps top needs {package}, which is not installed: pip install '.[top]' in a clone of pyps", status=2)
    if not sys.stdout.isatty():
        fail("pyps top needs a terminal: `pyps status` writes to a pipe", status=2)
    Top(places, token_file, read_only=read_only).run()
