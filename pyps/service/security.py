"""Who may call: a shared token on all ports, and loopback for calls that change the server."""

from __future__ import annotations

import hmac
import ipaddress
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from pyps import logs
from pyps.config import ConfigError, ServerConfig
from pyps_wire.errors import METADATA_KEY, NotAllowed, NotAuthenticated, PypsError

# Orchestrators probe health without knowing the token, and learn nothing from it but that the server lives.
OPEN_PREFIX = "/grpc.health.v1.Health/"
_SCHEME = "Bearer "
# Each byte may travel as three (%0A), and a call's trailing metadata has 8 KiB for everything.
TEXT_BYTES_MAX = 2048

# In quotes: only the type stubs know that it has parameters.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

log = logs.get("pyps.security")


def load_token(config: ServerConfig) -> Token | None:
    """The token that callers must show, None for none.

    Raises ConfigError for a token that cannot be read, and for an open server that nobody asked for in words.
    """
    if not is_loopback_host(config.host) and not config.insecure:
        for field, without in (
            ("token_file", "everybody would get in without a token"),
            ("tls_cert", "the token and all numbers would cross the network in the clear without TLS"),
        ):
            if getattr(config, field) is None:
                raise ConfigError(
                    f"host is {config.host}, which other machines can reach, and {without}: give --token-file, and "
                    "--tls-cert and --tls-key (`pyps certs init` makes them), or say --insecure"
                )
    return None if config.token_file is None else Token(config.token_file)


class Token:
    """The token that callers must show, read again when its file changes. For the event loop.

    The file may hold several, one a line: so another one comes into use before the former goes.
    """

    def __init__(self, path: Path):
        """Raises ConfigError for a file that cannot be used."""
        self._path = path
        self._stamp = stamp_of(path)
        self._tokens = _read_tokens(path)

    def is_in(self, authorization: str | bytes) -> bool:
        """Whether the value of the header `authorization` holds it."""
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
    """What changes whenever one of these files does; None for one that is not there."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = path.stat()
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
        except OSError:
            stamps.append(None)
    return stamps


def is_loopback_host(host: str) -> bool:
    """True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_loopback_peer(peer: str) -> bool:
    """True when gRPC's name of a peer ("ipv4:127.0.0.1:51234", "ipv6:%5B::1%5D:51234") is on this machine."""
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    if kind == "unix":
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def require_loopback(context: grpc.aio.ServicerContext[Any, Any], call: str) -> None:
    """Refuses a call that changes the server unless it comes from the server's own machine (NotAllowed)."""
    if not is_loopback_peer(context.peer()):
        raise NotAllowed(f"{call} changes the server and is taken from its own machine only: run it there")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Asks for the token: a call without it is refused before any message of it is taken in."""

    def __init__(self, token: Token):
        self._token = token

    def _refusal(self, details: grpc.HandlerCallDetails) -> NotAuthenticated | None:
        """Why the call is refused, None when it may go on."""
        if details.method.startswith(OPEN_PREFIX):
            return None
        given = [value for key, value in details.invocation_metadata if key == "authorization"]
        if not given:
            return NotAuthenticated(
                "this server wants a token: set PYPS_TOKEN_FILE (or --token-file) to the file that it was "
                "started with; grpcurl takes -H 'authorization: Bearer TOKEN'"
            )
        if not self._token.is_in(given[-1]):
            return NotAuthenticated("the token is not this server's: compare the token files of both ends")
        return None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        error = self._refusal(details)
        handler = await continuation(details)
        if error is None or handler is None:
            return handler

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await abort(context, error)

        # Of a stream nothing is read until somebody asks, whatever kind of call it is.
        return grpc.stream_stream_rpc_method_handler(refuse)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PypsError) -> NoReturn:
    """Ends a call with an error that the client can make again."""
    # gRPC keeps the end of a call in a cycle, and the frames that led to it would keep the messages.
    error.__traceback__ = None
    await context.abort(grpc.StatusCode[error.status], text_of(error), ((METADATA_KEY, type(error).__name__),))


def text_of(error: PypsError) -> str:
    """The error's text as far as it travels: gRPC drops a whole answer whose status is too long."""
    text = str(error)
    start = text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")
    return text if start == text else f"{start} ... (cut, of {len(text)} characters)"
