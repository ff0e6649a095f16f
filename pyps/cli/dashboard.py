"""`pyps dashboard`: a run as a page in the browser."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from ssl import SSLContext
from typing import TYPE_CHECKING, Annotated

import typer

from pyps.cli.control import ObserverTokenFile, Servers
from pyps.cli.evaluate import require_script
from pyps.control import configure_all
from pyps.dashboard.files import write_page
from pyps.launcher.job import PYPS
from pyps.launcher.process import ChildProcess, beside
from pyps.service.security import is_loopback_host
from pyps.service.tls import Tls
from pyps.watch.history import History
from pyps.watch.replay import replayed
from pyps.watch.watch import Watch
from pyps_client.credentials import read_token
from pyps_client.launch import parse_servers
from pyps_client.places import address_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire.contract import CONTROL_PORT
from pyps_wire.errors import InvalidArgument, PypsError

if TYPE_CHECKING:
    from pyps.dashboard.app import Dashboard

# Of a script that fails.
LINES_KEPT = 5
LAST_SECONDS = 1.5


def dashboard(
    servers: Servers = "127.0.0.1:7611",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any.", min=0, max=65535)] = 7615,
    name: Annotated[
        list[str] | None, typer.Option(help="Another name by which browsers find the page; may be given again.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with the page's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with that certificate's key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")] = False,
    script: Annotated[
        Path | None, typer.Option("--eval", help="Python file that scores the model, as for `pyps eval`.")
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two scores.", min=0.0)] = 10.0,
    logged: Annotated[
        Path | None, typer.Option("--replay", help="Show the run of this --update-log, which has no servers any more.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="File for the page with its data, written at the end.")] = None,
    token_file: ObserverTokenFile = None,
) -> None:
    """Show a run as a page in the browser, until Ctrl-C.

    Operators change protocol and rate from it: with the token in PYPS_OPERATOR_TOKEN_FILE, for which the page asks; if
    that is not set, with the one in the printed address, on this machine only.
    """
    if script is not None:
        require_script(script)
    places = parse_servers(servers, port=CONTROL_PORT) if logged is None else ()
    watch = Watch(places, token_file)
    history = replayed(logged) if logged is not None else watch.history
    tls = None
    if tls_cert and tls_key:
        tls = Tls(cert=tls_cert, key=tls_key, client_ca=None).context
    elif tls_cert or tls_key:
        raise InvalidArgument("--tls-cert and --tls-key belong together: give both")
    page, words = served(history, places, token_file, host, port, names=name or (), tls=tls, insecure=insecure)
    # A second signal must not break what the first one began.
    signals = SimpleQueue[int]()
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _: signals.put(number))
    with contextlib.ExitStack() as ends:
        if script is not None:
            # A child, before there are threads.
            ends.enter_context(scores(script, servers, every, token_file, history))
        if save is not None:
            # Now too, so that a file that cannot be written is known before the end.
            write_page(save, history.to_json())
        watch.start()
        ends.callback(watch.close)
        ends.enter_context(page)
        typer.echo(words)
        while True:
            # One that comes while this thread is about to wait does not end the wait.
            with contextlib.suppress(Empty):
                signals.get(timeout=1.0)
                break
        if save is not None:
            # The steps since the servers were asked.
            time.sleep(LAST_SECONDS)
            keep(history, save)


def report(
    folder: Annotated[Path, typer.Argument(help="An --update-log of a run.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html in that folder by default.")] = None,
) -> None:
    """Keep the page of `pyps dashboard` on a run that was logged in one file, which needs nothing to be shown."""
    keep(replayed(folder), out or folder / "report.html")


def keep(history: History, file: Path) -> None:
    """Write the page with all that is known of a run into a file, and say so."""
    write_page(file, history.to_json())
    typer.echo(f"The run as a page: {file.resolve()}")


def served(
    history: History,
    servers: Sequence[str],
    token_file: Path | None,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    names: Sequence[str] = (),
    tls: Callable[[], SSLContext] | None = None,
    insecure: bool = False,
) -> tuple[Dashboard, str]:
    """Return the page of a history, and what to say of it; without servers nothing can be changed from it."""
    try:
        from pyps.dashboard.app import Dashboard
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"the dashboard needs {error.name}, which is not installed: pip install '.[dashboard]' in a clone of pyps"
        ) from None
    is_local, operators = is_loopback_host(host), os.environ.get("PYPS_OPERATOR_TOKEN_FILE")
    if not (is_local or tls or insecure):
        raise InvalidArgument(
            f"--host is {host}, which other machines can reach, and its token would cross the network in the clear: "
            "give --tls-cert and --tls-key (`pyps certs init` makes them), or say --insecure"
        )
    secret, changing = secrets.token_urlsafe(16), Path(operators) if operators else token_file
    changes = bool(servers) and (is_local or operators is not None)
    # Who may not ask the servers may not ask the dashboard either.
    shown = read_token(token_file) or read_token(changing) or os.environ.get("PYPS_TLS_CERT")
    guarded = not is_local or bool(servers and shown)

    def change(request: pb.ConfigureRequest) -> list[str]:
        return configure_all([address_of(each, port=CONTROL_PORT) for each in servers], read_token(changing), request)

    page = Dashboard(
        history,
        host=host,
        port=port,
        names=names,
        tls=tls,
        readers=(lambda: {secret, _token(token_file), _token(changing)} - {""}) if guarded else None,
        operators=lambda: [read_token(changing) if operators else secret],
        change=change if changes else None,
    )
    shows_secret = guarded or (changes and not operators)
    return page, f"The run as a page: {page.address}" + f"#token={secret}" * shows_secret


def _token(file: Path | None) -> str:
    """Return the file's token; "" while it cannot be read, as where it is being replaced."""
    with contextlib.suppress(PypsError):
        return read_token(file)
    return ""


@contextlib.contextmanager
def scores(script: Path, servers: str, every: float, token_file: Path | None, history: History) -> Iterator[None]:
    """Run `pyps eval` beside; its lines become scores, and its end an event."""
    last: deque[str] = deque(maxlen=LINES_KEPT)

    def take(_: str, line: str) -> None:
        # "update 512  accuracy 0.94".
        head, *parts = line.split("  ")
        try:
            found = {name: float(value) for name, _, value in (part.rpartition(" ") for part in parts)}
            history.add_score(int(head.removeprefix("update ")), found)
        except ValueError:
            last.append(line)

    def end(child: ChildProcess) -> None:
        history.add_event(time.time(), "", "score", f"pyps eval {child.how_it_ended()}: {' '.join(last)}")

    command = [*PYPS, "eval", str(script), "--servers", servers, "--every", str(every)]
    command += ["--token-file", str(token_file)] if token_file else []
    with beside("eval", command, on_line=take, on_end=end):
        yield
