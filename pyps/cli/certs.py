"""`pyps certs`: the certificates of servers and workers."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.control import DataServers, resolved
from pyps_client.credentials import Credentials, stays_open
from pyps_wire.contract import DATA_PORT

certs = typer.Typer(
    help="Make, show and check certificates of servers and workers.",
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
    """Make a CA, unless the folder has one, and a certificate for servers of these names; overwrite nothing."""
    # Only these commands, and servers with certificates, need cryptography.
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
    """Make a certificate for a worker, or for another caller of servers."""
    from pyps.certificates import Authority

    _show(Authority(folder).make_worker(name, role=role, days=days))
    typer.echo(f"Its machine needs {name}.crt, {name}.key and ca.crt.")


@certs.command()
def show(
    paths: Annotated[list[Path] | None, typer.Argument(help="Certificates or folders. [default: certs]")] = None,
) -> None:
    """Show names, role and end of certificates."""
    for path in paths or [Path("certs")]:
        for file in sorted(path.glob("*.crt")) if path.is_dir() else [path]:
            _show(file)


@certs.command()
def check(servers: DataServers = "127.0.0.1:7610") -> None:
    """Connect to servers by TLS, and say what is wrong with the certificates of either end.

    Uses the files that PYPS_TLS_CA, PYPS_TLS_CERT and PYPS_TLS_KEY name. Exits with 1 if something is wrong.
    """
    own = Credentials.from_environment()
    problems = {address: problem_of(address, own) for address in resolved(servers, port=DATA_PORT)}
    for address, problem in problems.items():
        typer.echo(f"{address}: {problem or 'nothing is wrong'}")
    raise typer.Exit(1 if any(problems.values()) else 0)


def _show(path: Path) -> None:
    from pyps.certificates import describe

    certificate, now = describe(path), datetime.now(UTC)
    days = (certificate.until - now).days
    validity = f"{days} days left" if days >= 0 else "EXPIRED"
    if now < certificate.since:
        validity = f"NOT VALID before {certificate.since:%Y-%m-%d %H:%M} UTC"
    names = ", ".join(certificate.names)
    typer.echo(f"{path}: {certificate.role}, {names}, until {certificate.until:%Y-%m-%d} ({validity})")


def problem_of(address: str, credentials: Credentials) -> str:
    """Connect to a server's data or control port by TLS; return what is wrong, "" where nothing is."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        with credentials.connected(address) as secured:
            if not credentials.tls_ca:
                return "it takes TLS only: set PYPS_TLS_CA to the ca.crt of its certificate"
            if secured.selected_alpn_protocol() != "h2":
                return "it answers by TLS, but not as gRPC: name the server's data or control port"
            return "" if stays_open(secured) else _refused(credentials)
    except ssl.SSLCertVerificationError as error:
        return _PROBLEMS.get(error.verify_code, "its certificate cannot be trusted: {reason}").format(
            host=host, ca=credentials.tls_ca, reason=error.verify_message
        )
    except ssl.SSLError as error:
        if not credentials.tls_ca:
            return ""
        alert = (error.reason or "").partition("ALERT_")[2]
        if "CERTIFICATE" in alert or alert == "UNKNOWN_CA":
            return _refused(credentials)
        if alert:
            return f"it agrees on no TLS (alert {alert}): compare both ends' versions, ciphers and keys; {_KEYS}"
        return (
            f"it does not answer by TLS ({error.reason}): start it with --tls-cert and --tls-key, or unset PYPS_TLS_CA"
        )
    except OSError as error:
        return f"no server answers: {error.strerror or error}"


# What is wrong with a server's certificate, by OpenSSL's verify codes.
_OTHER_NAME = (
    "its certificate is not for {host}: name it as the certificate does, or make one (`pyps certs init --host {host}`)"
)
_SIGNER = "its certificate is not signed by {ca}: set PYPS_TLS_CA to the ca.crt that it was made with"
_PROBLEMS = {
    9: "its certificate is not valid yet: compare the clocks of both machines",
    10: "its certificate has expired: make another one (`pyps certs init`); the server reads it as it runs",
    **dict.fromkeys((62, 64), _OTHER_NAME),
    **dict.fromkeys((18, 19, 20, 21), _SIGNER),
}
_KEYS = "gRPC takes RSA, P-256 and P-384"


def _refused(credentials: Credentials) -> str:
    """Return likely reasons why a server refuses the caller's certificate: the server names none."""
    if not credentials.tls_cert:
        return "it wants a certificate: set PYPS_TLS_CERT and PYPS_TLS_KEY to what `pyps certs worker` made"
    from pyps.certificates import describe

    own, now = describe(Path(credentials.tls_cert)), datetime.now(UTC)
    what = f"it refuses {credentials.tls_cert}"
    if own.until < now:
        return f"{what}, which has expired: make another one (`pyps certs worker`)"
    if now < own.since:
        return f"{what}, which is not valid yet: compare this machine's clock with that of its maker"
    return (
        f"{what}: the server's --tls-client-ca has not signed it, the server's clock is wrong, it is for servers only, "
        f"or its key is of another kind ({_KEYS}): make one with the server's CA (`pyps certs worker`)"
    )
