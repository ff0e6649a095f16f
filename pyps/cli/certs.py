"""`pyps certs`: the certificates of servers and workers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

certs = typer.Typer(
    help="Make certificates for servers and workers, and show what they say.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Option(help="Folder of the CA and of what it signs.")]
Days = Annotated[int, typer.Option(help="For how many days the certificate is good.", min=1)]


@certs.command()
def init(
    host: Annotated[list[str], typer.Option(help="Name or address by which a server is called; give one for each.")],
    folder: Folder = Path("certs"),
    days: Days = 365,
) -> None:
    """Make a CA, and a certificate for servers of these names.

    Where the folder holds a CA already, only the servers' certificate. Nothing is overwritten.
    """
    # cryptography is for these commands and servers with certificates alone.
    from pyps.certificates import Authority

    made = Authority(folder, create=True).make_server(host, days=days)
    _show(folder / "ca.crt")
    _show(made)
    typer.echo(f"Keep {folder / 'ca.key'} to yourself. Servers need server.crt, server.key and ca.crt.")


@certs.command()
def worker(
    name: Annotated[str, typer.Argument(help="The holder's name, or that of all who share the certificate.")],
    role: Annotated[str, typer.Option(help="What its holder is at most: worker, observer or operator.")] = "worker",
    folder: Folder = Path("certs"),
    days: Days = 365,
) -> None:
    """Make a certificate for a worker, or for anybody else who calls servers."""
    from pyps.certificates import Authority

    _show(Authority(folder).make_worker(name, role=role, days=days))
    typer.echo(f"Its machine needs {name}.crt, {name}.key and ca.crt.")


@certs.command()
def show(
    paths: Annotated[list[Path] | None, typer.Argument(help="Certificates or folders. [default: certs]")] = None,
) -> None:
    """Show names, role and end of certificates."""
    for path in paths or [Path("certs")]:
        for found in sorted(path.glob("*.crt")) if path.is_dir() else [path]:
            _show(found)


def _show(path: Path) -> None:
    from pyps.certificates import describe

    said = describe(path)
    now = datetime.now(UTC)
    days = (said.until - now).days
    left = f"{days} days left" if days >= 0 else "EXPIRED"
    if now < said.since:
        left = f"NOT VALID before {said.since:%Y-%m-%d %H:%M} UTC"
    typer.echo(f"{path}: {said.role}, {', '.join(said.names)}, until {said.until:%Y-%m-%d} ({left})")
