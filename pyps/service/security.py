"""The role of each caller, by its token, its certificate and its machine."""

from __future__ import annotations

import hmac
import ipaddress
import urllib.parse
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from pyps import logs
from pyps.config import ConfigError, ServerConfig, flag_name, variable_name
from pyps.roles import Role, needed_for, role_in
from pyps_wire.errors import METADATA_KEY, NotAllowed, NotAuthenticated, PypsError

_SCHEME = "Bearer "
# Each byte may travel as three (%0A), and a call's trailing metadata has 8 KiB for everything.
TEXT_BYTES_MAX = 2048

log = logs.get("pyps.security")


class Access:
    """Finds the role of a caller. For the event loop."""

    def __init__(self, config: ServerConfig):
        """Raise ConfigError for a token that cannot be read, and for an open server without --insecure."""
        _require_guarded(config)
        files = (
            (Role.OBSERVER, config.observer_token_file),
            (Role.WORKER, config.token_file),
            (Role.OPERATOR, config.operator_token_file),
        )
        # The least first: a token in two files gives the lesser role.
        self._tokens = [(role, Token(path)) for role, path in files if path is not None]
        self.certified = config.tls_client_ca is not None
        # Operators without a token or certificate of their own are callers on the server's machine.
        self._own_machine = config.operator_token_file is None and (bool(self._tokens) or not self.certified)
        self._host = config.host

    def admit(self, call: str, authorization: str | bytes | None, *, peer: str, subject: str) -> Role:
        """Return the role of a caller, by its header `authorization`, gRPC's name of it and its certificate's subject.

        NotAuthenticated if it shows no token of this server, NotAllowed if it may not make the call.
        """
        if needed_for(call) is Role.ANYBODY:
            return Role.ANYBODY
        role = self._by_token(authorization, call) if self._tokens else Role.OPERATOR
        if self._own_machine and role > Role.OBSERVER:
            role = Role.OPERATOR if is_own_machine(peer, host=self._host) else Role.WORKER
        why = ""
        if self.certified:
            by_certificate = role_in(subject)
            if self._tokens and role != by_certificate:
                why = f" ({role.word} by its token, {by_certificate.word} by its certificate)"
            role = min(role, by_certificate)
        self.require(role, call, why)
        return role

    def require(self, role: Role, call: str, why: str = "") -> None:
        """Raise NotAllowed for a call that this role may not make; `why` says where the role comes from."""
        needed = needed_for(call)
        if role >= needed:
            return
        name, by_place = call.rpartition("/")[2], needed is Role.OPERATOR and self._own_machine
        field = "operator_token_file" if needed is Role.OPERATOR and not by_place else "token_file"
        shown = [f"a token of the server's {flag_name(field)} ({variable_name(field)})"] if self._tokens else []
        if self.certified:
            shown.append(f"a certificate of the role {needed.word} (`pyps certs worker NAME --role {needed.word}`)")
        if by_place:
            raise NotAllowed(
                f"{name} changes the server and is taken from its own machine only: {_place_of(self._host)}"
                f"{', with ' if shown else ''}{' and '.join(shown)}, or give the server --operator-token-file"
            )
        raise NotAllowed(
            f"{name} is for the role {needed.word}, and this caller's is {role.word}{why}: show {' and '.join(shown)}"
        )

    def _by_token(self, authorization: str | bytes | None, call: str) -> Role:
        if not authorization:
            # The roles that may make the call; workers are operators if these have no token of their own.
            enough = [role for role, _ in self._tokens if role >= needed_for(call)] or [Role.WORKER]
            named = " or ".join(f"{variable_name(_field_of(role))} (as {role.word})" for role in enough)
            raise NotAuthenticated(
                f"this server wants a token: set {named}, or a command's --token-file, to the file that the server "
                "was started with by that name; grpcurl takes -H 'authorization: Bearer TOKEN'"
            )
        role = next((role for role, token in self._tokens if token.is_in(authorization)), None)
        if role is None:
            flags = " and ".join(flag_name(_field_of(role)) for role, _ in self._tokens)
            raise NotAuthenticated(
                "the token is not this server's: compare the caller's (PYPS_TOKEN_FILE, --token-file) with the file of "
                f"the server's {flags}"
            )
        return role


def _place_of(host: str) -> str:
    """Return how to call from the machine of a server on `host`, by the rule of `is_own_machine`."""
    ip = _address(host)
    if ip is None:
        return "give the server an address as --host in place of a name, and run it there by that"
    return f"run it there, by {'127.0.0.1' if ip.is_unspecified else host}"


def _field_of(role: Role) -> str:
    return "token_file" if role is Role.WORKER else f"{role.word}_token_file"


def _require_guarded(config: ServerConfig) -> None:
    """Raise ConfigError for a server that other machines reach without a token or TLS, unless it is --insecure."""
    if is_loopback_host(config.host) or config.insecure:
        return
    who = "everybody" if config.tls_client_ca is None else "whoever holds any certificate of --tls-client-ca"
    for field, without in (
        ("token_file", f"{who} would get in without a token"),
        ("tls_cert", "the token and all numbers would cross the network in the clear without TLS"),
    ):
        if getattr(config, field) is None:
            raise ConfigError(
                f"host is {config.host}, which other machines can reach, and {without}: give --token-file, and "
                "--tls-cert and --tls-key (`pyps certs init` makes them), or say --insecure"
            )


class Token:
    """The token of one role, read again when its file changes. For the event loop.

    The file may hold several, one a line, so that a new one works before the old one is removed.
    """

    def __init__(self, path: Path):
        self._path = path
        self._stamp = stamp_of(path)
        self._tokens = _read_tokens(path)

    def is_in(self, authorization: str | bytes) -> bool:
        """Return whether the value of the header `authorization` holds it."""
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._tokens = _read_tokens(self._path)
                log.info("the token file has changed and is in force", file=self._path)
            except ConfigError as error:
                log.warning("the token stays as it was", reason=error)
        shown = authorization.encode() if isinstance(authorization, str) else authorization
        return any(hmac.compare_digest(shown, (_SCHEME + token).encode()) for token in self._tokens)


def _read_tokens(path: Path) -> list[str]:
    try:
        tokens = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"the token file {path} cannot be read: {reason}") from None
    tokens = [token.strip() for token in tokens if token.strip()]
    if not tokens or not all(len(token) >= 8 and token.isascii() and token.isprintable() for token in tokens):
        raise ConfigError(
            f"the token file {path} must hold a token of at least 8 printable ASCII characters, or several, one a line"
        )
    return tokens


def stamp_of(*paths: Path) -> list[tuple[int, int, int] | None]:
    """Return a value for each file that changes whenever the file does; None for a missing file."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = path.stat()
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
        except OSError:
            stamps.append(None)
    return stamps


def is_loopback_host(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    ip = _address(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


def is_own_machine(peer: str, *, host: str) -> bool:
    """Return whether gRPC's name of a peer ("ipv4:127.0.0.1:51234", "ipv6:%5B::1%5D:51234") is on a server's machine.

    That is loopback, and the server's own address if `host` is one: it may listen on no other.
    """
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    if kind == "unix":
        return True
    ip = _address(address.rpartition(":")[0])
    return ip is not None and (ip.is_loopback or ip == _address(host))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def subject_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    return b",".join(context.auth_context().get("x509_subject", ())).decode(errors="replace")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PypsError) -> NoReturn:
    """End a call with an error that the client can raise again."""
    # gRPC keeps the error in a cycle, and the frames of tracebacks would keep the messages.
    error.__traceback__ = error.__context__ = None
    await context.abort(grpc.StatusCode[error.status], text_of(error), ((METADATA_KEY, type(error).__name__),))


def text_of(error: PypsError) -> str:
    """Return an error's text, shortened: gRPC drops an answer whose status is too long."""
    text = str(error)
    start = text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")
    return text if start == text else f"{start} ... (shortened, of {len(text)} characters)"
