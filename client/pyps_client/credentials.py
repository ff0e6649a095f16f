"""What a caller shows servers, and by what it knows them: a token and certificates."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyps_wire.contract import DATA_PORT
from pyps_wire.errors import BadRequest

# How long a server may take to show why no connection to it comes about.
_ASK_SECONDS = 3.0
# What gRPC says of a connection that came about and ended before a call.
_SIGNS = ("handshake failed", "verification check failed", "socket closed", "connection reset", "missing selected alpn")
# What OpenSSL says of a file that is none of PEM's, where it says anything.
_NO_PEM = "NO_CERTIFICATE_OR_CRL_FOUND"
_KEYS = "gRPC takes RSA, P-256 and P-384"
# OpenSSL's numbers of what is wrong with a certificate.
_NOT_YET, _EXPIRED, _NAMES, _SIGNERS = 9, 10, (62, 64), (18, 19, 20, 21)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A token, and files with certificates; each empty for none.

    Raises BadRequest for certificates that do not go together.
    """

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
                raise BadRequest(
                    f"{name} is {getattr(self, name)!r}, but {needed} is not given: set it (PYPS_{needed.upper()}) too."
                )

    @classmethod
    def from_environment(cls, token: str = "") -> Credentials:
        """With this token, and with the certificates that PYPS_ variables name."""
        names = ("tls_ca", "tls_cert", "tls_key")
        return cls(token=token, **{name: os.environ.get(f"PYPS_{name.upper()}", "").strip() for name in names})

    def newest(self) -> Credentials:
        """With the token that its file holds now, or as they are where there is none to be had."""
        try:
            return replace(self, token=read_token(self.token_file)) if self.token_file else self
        except BadRequest:
            return self

    def context(self) -> ssl.SSLContext:
        """For connections that are none of gRPC's, by the same rules. Raises BadRequest for a file of no use."""
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
            raise BadRequest(
                f"{what}, which cannot be used ({reason}); expected PEM files, as `pyps certs` makes them."
            ) from None
        return context

    def refusal(self, address: str, told: str) -> str:
        """What is wrong with the certificates at either end, in a sentence, where that may be why gRPC `told` what it
        did of a connection; empty for any other cause.

        gRPC says too little: this asks the server once more, by Python's TLS, and takes seconds at most.
        """
        if not told.startswith("failed to connect") or not any(sign in told.lower() for sign in _SIGNS):
            return ""
        context = self.context() if self.tls_ca else _trusting()
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            with (
                socket.create_connection((host, int(port)), _ASK_SECONDS) as connection,
                context.wrap_socket(connection, server_hostname=host) as secured,
            ):
                if not self.tls_ca:
                    return f"{address} takes TLS only: set tls_ca (PYPS_TLS_CA) to the ca.crt of its certificate."
                if secured.selected_alpn_protocol() != "h2":
                    return (
                        f"{address} answers by TLS, but not as gRPC: expected a server's data port ({DATA_PORT} by "
                        "default), not its lane's or that of its metrics."
                    )
                # A server that refuses the caller's certificate ends the connection after the handshake.
                return "" if _answers(secured) else self._refused_by(address)
        except ssl.SSLEOFError:
            return ""
        except ssl.SSLError as error:
            return self.tls_ca and self.explained(address, error)
        except OSError:
            return ""

    def explained(self, address: str, error: ssl.SSLError) -> str:
        """What it means that TLS with a server failed so, in a sentence."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._refusal_of(address, error)
        if alert := (error.reason or "").partition("ALERT_")[2]:
            if alert == "CERTIFICATE_REQUIRED" or (self.tls_cert and ("CERTIFICATE" in alert or alert == "UNKNOWN_CA")):
                return self._refused_by(address)
            return (
                f"{address} and this end agree on no TLS (its alert is {alert}): compare both ends' versions and "
                f"ciphers, and what keys their certificates have; {_KEYS}."
            )
        return (
            f"{address} does not answer by TLS ({error.reason}): start the server with --tls-cert and --tls-key, "
            "or leave out tls_ca (PYPS_TLS_CA)."
        )

    def _refusal_of(self, address: str, error: ssl.SSLCertVerificationError) -> str:
        """What is wrong with the server's certificate."""
        whose, host = f"The certificate of {address}", address.rpartition(":")[0].strip("[]")
        if error.verify_code == _EXPIRED:
            return f"{whose} has expired: make another one (`pyps certs init`); the server reads it as it runs."
        if error.verify_code == _NOT_YET:
            return f"{whose} is not valid yet: compare the clocks of both machines."
        if error.verify_code in _NAMES:
            return (
                f"{whose} is not for {host}: name the server as its certificate does, or make one with --host {host} "
                "(`pyps certs`)."
            )
        if error.verify_code in _SIGNERS:
            return (
                f"{whose} is not signed by {self.tls_ca}: set tls_ca (PYPS_TLS_CA) to the ca.crt that it was made with."
            )
        return f"{whose} cannot be trusted: {error.verify_message}."

    def _refused_by(self, address: str) -> str:
        """What a server finds wrong with the caller's certificate, of which it says nothing."""
        if not self.tls_cert:
            return (
                f"{address} asks for a certificate: set tls_cert and tls_key (PYPS_TLS_CERT, PYPS_TLS_KEY) to what "
                "`pyps certs worker` made."
            )
        what = f"{address} refuses the certificate {self.tls_cert}"
        code = self._verified()
        if code == _EXPIRED:
            return f"{what}, which has expired: make another one (`pyps certs worker`)."
        if code == _NOT_YET:
            return f"{what}, which is not valid yet: compare this machine's clock with that of who made it."
        # A server says nothing of why, and may read other dates than this machine.
        return (
            f"{what}: the server's --tls-client-ca has not signed it, or the server's clock is wrong, or it is for "
            f"servers only, or its key is of another kind ({_KEYS}): make one with its CA (`pyps certs worker`), "
            "or compare the clocks of both machines."
        )

    def _verified(self) -> int:
        """OpenSSL's verdict on the caller's certificate by the CA that it knows: 0 where it is sound."""
        client, server = _trusting(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        try:
            server.load_verify_locations(self.tls_ca)
            for context in (client, server):
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError:
            # They could be read when the connection was made: where they cannot now, they are being renewed.
            return 0
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
        for end in (*ends, *ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_code
        return 0


def read_token(token_file: str | os.PathLike[str] | None, environment: Mapping[str, str] | None = None) -> str:
    """The first line of a file, or else PYPS_TOKEN; empty for none. Raises BadRequest for what cannot be sent."""
    if token_file is None:
        token = (os.environ if environment is None else environment).get("PYPS_TOKEN", "").strip()
        source = "PYPS_TOKEN"
    else:
        source = f"the token file {os.fspath(token_file)}"
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip().partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise BadRequest(f"{source} cannot be read: {reason}") from None
        if not token:
            raise BadRequest(f"{source} is empty; expected the servers' shared token")
    check_token(token, source)
    return token


def check_token(token: str, source: str) -> None:
    """Refuses a token that cannot be sent, with the name of where it came from."""
    if not (token.isascii() and token.isprintable()):
        raise BadRequest(f"{source} does not hold one line of printable ASCII characters")


def _trusting() -> ssl.SSLContext:
    """For looking at who is there, of whom nothing is believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _answers(secured: ssl.SSLSocket) -> bool:
    try:
        return bool(secured.recv(1))
    except TimeoutError:
        return True
    except ssl.SSLError as error:
        if "ALERT_" in (error.reason or ""):
            # It says why.
            raise
        return False
    except OSError:
        return False
