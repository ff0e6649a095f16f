"""`pyps top`, as it is called."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.control import ObserverTokenFile, Servers, change_token, fail, read_token
from pyps.service.security import is_loopback_host
from pyps_client import credentials
from pyps_client.launch import parse_servers
from pyps_wire.contract import CONTROL_PORT

PORT = 7614
# What textual-serve tells the commands that it starts.
_DRIVER = "TEXTUAL_DRIVER"
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def top(
    context: typer.Context,
    servers: Servers = "127.0.0.1:7611",
    read_only: Annotated[bool, typer.Option("--read-only", help="Change nothing, whatever the token allows.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve it as a page for browsers instead.")] = False,
    host: Annotated[
        str | None, typer.Option(help="With --web: the address to listen on; 127.0.0.1.", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help=f"With --web: the port; {PORT}.", min=0, max=65535, show_default=False)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="With --web: listen beyond loopback, where the page has no TLS.")
    ] = False,
    token_file: ObserverTokenFile = None,
) -> None:
    """Watch servers and workers as they train, until q is pressed.

    With an operator's token, or on the servers' own machine where that makes operators, p and r change protocol and
    learning rate; unless it is to read only, it takes such a token before the others that are named. With --web a
    browser shows the servers' token, or the key in the address that is printed where there is no token. Beyond loopback
    the page changes nothing, and is refused unless --insecure is said: it has no TLS.
    """
    places = parse_servers(servers, port=CONTROL_PORT)
    place = "127.0.0.1" if host is None else host
    # Others would call from this machine, which may be the servers' own, where more is allowed than elsewhere.
    read_only = read_only or (web and not is_loopback_host(place))
    if not read_only:
        token_file = change_token(context, token_file)
    read_token(token_file)
    if not web and (host is not None or port is not None):
        fail(f"{'--port' if host is None else '--host'} says where the page of --web listens: give --web too", status=2)
    try:
        if web:
            from pyps.cli.top.web import Page
        else:
            from pyps.cli.top.screen import Top
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0].replace("_", "-")
        fail(f"pyps top needs {package}, which is not installed: pip install '.[top]' in a clone of pyps", status=2)
    if web:
        if not is_loopback_host(place) and not insecure:
            fail(
                f"--host is {place}, which other machines can reach, and the page has no TLS: the token, or its key, "
                f"would cross the network in the clear. Go through a tunnel (`ssh -L {PORT}:127.0.0.1:{PORT} HOST`) or "
                "a proxy with TLS, or say --insecure",
                status=2,
            )
        Page(
            _in_a_browser(servers, token_file, read_only=read_only),
            host=place,
            port=PORT if port is None else port,
            read_only=read_only,
            read_token=lambda: credentials.read_token(token_file),
        ).serve()
    elif sys.stdout.isatty() or _DRIVER in os.environ:
        if _DRIVER in os.environ:
            # With the page's server: nobody would see this program any more, and it would go on asking.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        Top(places, token_file, read_only=read_only).run()
    else:
        fail("pyps top needs a terminal: `pyps status` writes to a pipe, and --web shows it in a browser", status=2)


def _in_a_browser(servers: str, token_file: Path | None, *, read_only: bool) -> str:
    """The command that each open page runs."""
    command = [sys.executable, "-m", "pyps", "top", "--servers", servers]
    command += ["--token-file", str(token_file)] if token_file else []
    # In place of the shell that starts it, which would stay between.
    return f"exec {shlex.join([*command, *(['--read-only'] if read_only else [])])}"
