"""The dashboard's web server: the page, the data, and changes by an operator."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from google.protobuf.json_format import Parse, ParseError

from pyps.dashboard.files import PAGE, POLICY
from pyps.watch.history import History
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import InvalidArgument, PypsError

BODY_BYTES_MAX = 4096
CLOSE_SECONDS = 5.0
# Half a request must not hold a file descriptor for long, nor many of them all that a process may have.
FIRST_REQUEST_SECONDS, IDLE_SECONDS = 10.0, 60.0
CONNECTIONS_MAX = 100
SETTINGS = {"protocol", "learning_rate"}
OWN = "script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY.format(OWN),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

# The tokens that open something, as they are now.
Tokens = Callable[[], Collection[str]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """Serves a history in a thread of its own; as a context manager it ends with the block."""

    def __init__(
        self,
        history: History,
        *,
        host: str,
        port: int,
        names: Collection[str],
        tls: Callable[[], ssl.SSLContext] | None,
        readers: Tokens | None,
        operators: Tokens,
        change: Callable[[pb.ConfigureRequest], Sequence[str]] | None,
    ):
        """Listen; InvalidArgument where that cannot be. Browsers find the page by IP addresses and the names.

        `tls` returns the newest context. Everybody may read where there are no `readers`, nobody may change without
        `change`, which makes a change, or only looks whether it can be made, and returns what to say.
        """
        self._history, self._readers, self._operators, self._change = history, readers, operators, change
        own = socket.gethostname()
        self._names = {name.lower() for name in (host, "localhost", own, own.partition(".")[0], *names)}
        self._listener, self._tls = _listening(host, port), tls
        shown = own if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
        self.address = f"http{'s' if tls else ''}://{shown}:{self._listener.getsockname()[1]}/"
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._answered])
        app.add_routes([web.get("/data", self._data), web.post("/configure", self._configure)])
        app.add_routes([web.get("/", _index), web.static("/", PAGE)])
        app.on_response_prepare.append(_add_headers)
        logging.getLogger("aiohttp.server").addFilter(_is_our_own)
        # Connections that have not asked anything yet, and when the others are closed unless they ask again.
        self._silent = set[RequestHandler]()
        self._deadlines: dict[RequestHandler, asyncio.TimerHandle] = {}
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS / 2)
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(CLOSE_SECONDS)

    async def _serve(self) -> None:
        await self._runner.setup()
        context = self._tls and _renewed(self._tls)
        seconds = FIRST_REQUEST_SECONDS if context else None
        server = await self._loop.create_server(
            self._accepted, sock=self._listener, ssl=context, backlog=16, ssl_handshake_timeout=seconds
        )
        await self._ended.wait()
        server.close()
        await self._runner.cleanup()

    def _accepted(self) -> RequestHandler:
        """Return what answers on a new connection."""
        assert self._runner.server is not None
        if len({*self._runner.server.connections, *self._silent}) >= CONNECTIONS_MAX:
            # The loop closes it.
            raise ConnectionRefusedError
        connection = self._runner.server()
        self._silent.add(connection)
        self._loop.call_later(FIRST_REQUEST_SECONDS, self._close_silent, connection)
        return connection

    def _close_silent(self, connection: RequestHandler) -> None:
        if connection in self._silent:
            self._close(connection)

    def _close(self, connection: RequestHandler) -> None:
        self._silent.discard(connection)
        self._deadlines.pop(connection, None)
        connection.force_close()
        if connection.transport is not None:
            # What was not read of an answer would keep it.
            connection.transport.abort()

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that another page made; answer each refusal with a sentence."""
        self._silent.discard(request.protocol)
        # Neither an answer that nobody takes may keep it, nor half of the next request.
        if (before := self._deadlines.get(request.protocol)) is not None:
            before.cancel()
        self._deadlines[request.protocol] = self._loop.call_later(IDLE_SECONDS, self._close, request.protocol)
        try:
            self._require_own_page(request)
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": error.text}, status=error.status)
        except PypsError as error:
            return web.json_response({"error": str(error)}, status=409)

    def _require_own_page(self, request: web.Request) -> None:
        """Refuse what another page's script may have sent, which may know this address by a name of its own."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._is_own(host):
            raise web.HTTPForbidden(text=f"the dashboard has another name than {host[:100]!r}: name it with --name")
        # A link to the page may be anywhere.
        by_own = request.path == "/" or request.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")
        if not by_own or (origin is not None and origin.partition("//")[2] != host):
            raise web.HTTPForbidden(text="this request is from another page than the dashboard's own")

    def _is_own(self, host: str) -> bool:
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            # An IP address means the same to everybody.
            return name in self._names or bool(ipaddress.ip_address(name))
        return False

    def _require(self, request: web.Request, tokens: Tokens, what: str) -> None:
        """Refuse a request that shows none of the tokens."""
        shown = request.headers.get("Authorization", "")
        known = [f"Bearer {token}".encode() for token in tokens()]
        if not any(hmac.compare_digest(shown.encode(errors="surrogateescape"), each) for each in known):
            raise web.HTTPUnauthorized(text=f"{'this token is not' if shown else 'give'} {what}")

    async def _data(self, request: web.Request) -> web.Response:
        if self._readers is not None:
            self._require(request, self._readers, "the token that the dashboard's command printed, or an observer's")
        after, life = request.query.get("after", "0"), request.query.get("id", "")
        number = int(after[:19]) if after.isdecimal() else 0
        body = await asyncio.to_thread(lambda: json.dumps(self._history.to_json(number, life)).encode())
        response = web.Response(body=body, content_type="application/json")
        response.enable_compression()
        return response

    async def _configure(self, request: web.Request) -> web.Response:
        if self._change is None:
            raise web.HTTPForbidden(text="nothing can be changed from this page")
        self._require(request, self._operators, "the operator's token")
        try:
            change = Parse(await request.read(), pb.ConfigureRequest())
        except (ValueError, ParseError):
            raise web.HTTPBadRequest(text="the body is no change") from None
        named = {field.name for field, _ in change.ListFields()} - {"validate_only"}
        if not named or named - SETTINGS:
            raise web.HTTPBadRequest(text="expected protocol or learning_rate, and nothing else")
        return web.json_response({"lines": await asyncio.to_thread(self._change, change)})


async def _index(request: web.Request) -> web.FileResponse:
    return web.FileResponse(PAGE / "index.html")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _renewed(tls: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context with which each handshake takes the newest one."""
    context = tls()
    context.sni_callback = lambda connection, name, former: setattr(connection, "context", tls())
    return context


def _is_our_own(record: logging.LogRecord) -> bool:
    """Return whether a line is about a fault, and not about a caller that speaks no HTTP."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _listening(host: str, port: int) -> socket.socket:
    six = ":" in host
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=six and socket.has_dualstack_ipv6())
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        why = "it is in use: name another --port, or 0 for any" if busy else error.strerror
        raise InvalidArgument(f"the dashboard cannot listen on port {port} of {host}: {why}") from None
