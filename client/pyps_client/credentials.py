"""A caller's token and certificates, and the authority that signed the servers'."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyps_wire.contract import DATA_PORT
from pyps_wire.errors import InvalidArgument

_PROBE_SECONDS = 3.0
# In gRPC's message when a connection was made and ended before a call.
_SIGNS = ("handshake failed", "verification check failed", "socket closed", "connection reset", "missing selected alpn")
# OpenSSL's reason for a file that is no PEM, where it gives one.
_NO_PEM = "NO_CERTIFICATE_OR_CRL_FOUND"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A token, and files with certificates that go together; each empty for none."""

    token: str = field(default="", repr=False)
    # The file that the token came from.
    token_file: str = ""
    # With the certificate of the authority that signed the servers' own; with it, connections are TLS.
    tls_ca: str = ""
    # The caller's certificate and its key.
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
        """Return the same with the token that its file holds now, if it can be read."""
        try:
            return replace(self, token=read_token(self.token_file)) if self.token_file else self
        except InvalidArgument:
            return self

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of connections beside gRPC's. Raises InvalidArgument for a file of no use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        what = ""
        try:
            for name in ("tls_ca", "tls_cert", "tls_key"):
                if file := getattr(self, name):
                    # OpenSSL does not say which file it is that cannot be read.
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

    def refusal(self, address: str, message: str) -> str:
        """Return why TLS with a server fails, "" where gRPC's `message` has another cause.

        gRPC says too little, so this connects once more by Python's TLS, which takes seconds at most.
        """
        if not message.startswith("failed to connect") or not any(sign in message.lower() for sign in _SIGNS):
            return ""
        context = self.context() if self.tls_ca else unverified()
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            with (
                socket.create_connection((host, int(port)), _PROBE_SECONDS) as connection,
                context.wrap_socket(connection, server_hostname=host) as secured,
            ):
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
        """Return a sentence on failed TLS with a server; without an error the server closed the connection."""
        reason = "the server closed the connection after the handshake"
        if error is not None:
            reason = getattr(error, "verify_message", None) or error.reason or str(error)
        return f"TLS with {address} failed ({reason}): `pyps certs check --servers {address}` says what is wrong."


def read_token(token_file: str | os.PathLike[str] | None, environment: Mapping[str, str] | None = None) -> str:
    """Return the first line of a file, or PYPS_TOKEN, or "". Raises InvalidArgument for a token that cannot be sent."""
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


def unverified() -> ssl.SSLContext:
    """Return a context that accepts any certificate of a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def stays_open(secured: ssl.SSLSocket) -> bool:
    """Return whether the server keeps the connection: one that refuses the caller's certificate closes it.

    Raises:
        ssl.SSLError: With the server's alert, where it sends one.
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
