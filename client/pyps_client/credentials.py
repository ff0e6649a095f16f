"""A caller's token and certificates, and the authority that signed the servers'."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyps_wire.contract import DATA_PORT
from pyps_wire.errors import InvalidArgument

# How long a connection that examines a failure of TLS may take.
_PROBE_SECONDS = 3.0
# Parts of gRPC's message when a connection was made and closed before a call.
_SIGNS = ("handshake failed", "verification check failed", "socket closed", "connection reset", "missing selected alpn")
# OpenSSL's reason for a file that is no PEM file; it may also give none.
_NO_PEM = "NO_CERTIFICATE_OR_CRL_FOUND"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A token, and files with certificates; each empty for none."""

    token: str = field(default="", repr=False)
    # The file with the token.
    token_file: str = ""
    # The certificate of the authority that signed the servers' certificates; with it, connections use TLS.
    tls_ca: str = ""
    # The caller's certificate and key.
    tls_cert: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        check_token(self.token, "token")
        for name, needed in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_cert", "tls_ca")):
            if getattr(self, name) and not getattr(self, needed):
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)!r}, but {needed} is not given: set it (PYPS_{needed.upper()}) too."
                )

    @classmethod
    def from_environment(cls, token: str = "") -> Credentials:
        """Return this token, with the certificates of the PYPS_ variables."""
        names = ("tls_ca", "tls_cert", "tls_key")
        return cls(token=token, **{name: os.environ.get(f"PYPS_{name.upper()}", "").strip() for name in names})

    def newest(self) -> Credentials:
        """Return a copy with the token that the file holds now, if it can be read."""
        try:
            return replace(self, token=read_token(self.token_file)) if self.token_file else self
        except InvalidArgument:
            return self

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of connections that gRPC does not make. Raises InvalidArgument for unusable files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        what = ""
        try:
            for name in ("tls_ca", "tls_cert", "tls_key"):
                if file := getattr(self, name):
                    # OpenSSL does not say which file cannot be read.
                    what = f"{name} (PYPS_{name.upper()}) names {file}"
                    Path(file).open("rb").close()
            what = f"tls_ca (PYPS_TLS_CA) names {self.tls_ca}"
            context.load_verify_locations(self.tls_ca)
            if self.tls_cert:
                what = f"tls_cert and tls_key (PYPS_TLS_CERT, PYPS_TLS_KEY) name {self.tls_cert} and {self.tls_key}"
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            if isinstance(error, ssl.SSLError) and error.reason in (None, _NO_PEM):
                reason = "no PEM certificate or key is there, or one with a password"
            raise InvalidArgument(
                f"{what}, which cannot be used ({reason}); expected PEM files, as `pyps certs` makes them."
            ) from None
        return context

    @contextlib.contextmanager
    def connected(self, address: str) -> Iterator[ssl.SSLSocket]:
        """Connect by TLS, as gRPC does; without `tls_ca` to a server with any certificate. Raises OSError."""
        context = self.context() if self.tls_ca else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if not self.tls_ca:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        with (
            socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=host) as secured,
        ):
            yield secured

    def refusal(self, address: str, message: str) -> str:
        """Return why TLS with a server fails; "" if gRPC's error, `message`, has another cause.

        gRPC's error does not say, so this connects once more, for seconds at most.
        """
        if not message.startswith("failed to connect") or not any(sign in message.lower() for sign in _SIGNS):
            return ""
        try:
            with self.connected(address) as secured:
                if not self.tls_ca:
                    return f"{address} takes TLS only: set tls_ca (PYPS_TLS_CA) to the ca.crt of its certificate."
                if secured.selected_alpn_protocol() != "h2":
                    return (
                        f"{address} answers by TLS, but not as gRPC: expected a server's data port ({DATA_PORT} by "
                        "default), not its lane's or that of its metrics."
                    )
                return "" if stays_open(secured) else self.explained(address, None)
        except ssl.SSLEOFError:
            return ""
        except ssl.SSLError as error:
            return self.tls_ca and self.explained(address, error)
        except OSError:
            return ""

    def explained(self, address: str, error: ssl.SSLError | None) -> str:
        """Return a sentence on failed TLS with a server; `error` is None if the server closed the connection."""
        reason = "the server closed the connection after the handshake"
        if error is not None:
            reason = getattr(error, "verify_message", None) or error.reason or str(error)
        return f"TLS with {address} failed ({reason}): `pyps certs check --servers {address}` says what is wrong."


def read_token(token_file: str | os.PathLike[str] | None, environment: Mapping[str, str] | None = None) -> str:
    """Return the first line of a file, or else PYPS_TOKEN, or "". Raises InvalidArgument for an unusable token."""
    if token_file is None:
        token = (os.environ if environment is None else environment).get("PYPS_TOKEN", "").strip()
        source = "PYPS_TOKEN"
    else:
        source = f"the token file {os.fspath(token_file)}"
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise InvalidArgument(f"{source} cannot be read: {reason}") from None
        if not token:
            raise InvalidArgument(f"{source} is empty; expected the servers' shared token")
    check_token(token, source)
    return token


def check_token(token: str, source: str) -> None:
    if not (token.isascii() and token.isprintable()):
        raise InvalidArgument(f"{source} does not hold one line of printable ASCII characters")


def stays_open(secured: ssl.SSLSocket) -> bool:
    """Return whether the server keeps the connection open: it closes it if it refuses the caller's certificate.

    Raises ssl.SSLError with the server's alert, if it sends one.
    """
    try:
        return bool(secured.recv(1))
    except TimeoutError:
        return True
    except ssl.SSLError as error:
        if "ALERT_" in (error.reason or ""):
            raise
        return False
    except OSError:
        return False
