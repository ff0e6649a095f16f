"""`pyps top --web`: textual-serve's page, behind a token, with nothing in it that comes from elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp_jinja2
from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

from pyps.cli.control import fail
from pyps.service.hosting import address_of
from pyps.service.security import is_loopback_host
from pyps_wire.errors import PypsError

# Each open page asks the servers for itself.
VIEWS_MAX = 4
# Columns and lines of the largest view: what it draws at once grows with them.
SIZE_MAX = (500, 200)
# After a wrong token or key, until the next is looked at.
GUESS_SECONDS = 1.0
# What open pages get to end their commands in.
STOP_SECONDS = 2.0
_FORM = "application/x-www-form-urlencoded"
_POLICY = "default-src 'self' 'unsafe-inline' data:; frame-ancestors 'none'; form-action 'self'"


class Page(Server):
    """Runs a command for each open page, for who has shown the servers' token, or the key where they have none."""

    def __init__(self, command: str, *, host: str, port: int, read_only: bool, read_token: Callable[[], str]):
        super().__init__(command, host, port, "pyps top", templates_path=Path(__file__).parent / "templates")
        self._read_only, self._read_token = read_only, read_token
        self._key = "" if read_token() else secrets.token_urlsafe(16)
        # What a browser shows from then on, and no other page can make it show.
        self._session = secrets.token_urlsafe(32)
        self._num_views = 0
        self._guess = asyncio.Lock()

    def serve(self, debug: bool = False) -> None:
        """Serves until Ctrl-C."""
        host = self.host.strip("[]")
        try:
            listener = socket.create_server(
                (host, self.port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            fail(f"--host {self.host} and --port {self.port} cannot be listened on ({error.strerror}): choose others")
        self.port = listener.getsockname()[1]
        web.run_app(self._make_app(), sock=listener, print=None, shutdown_timeout=STOP_SECONDS)

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard)
        app.router.add_post("/login", self._login)
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Says where the page is, now that a signal ends it well."""
        key = f"?key={self._key}" if self._key else ""
        print(f"pyps top is at http://{address_of(self.host.strip('[]'), self.port)}/{key} until Ctrl-C", flush=True)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._refuse_foreign(request)
        if request.path == "/login" or _same(request.cookies.get(self._cookie, ""), self._session):
            response = await handler(request)
        elif self._key and "key" in request.query and await self._is_right(request.query["key"], self._key):
            response = self._let_in()
        elif request.path == "/":
            response = self._ask(request, "The servers' token, or the key that was printed:")
        else:
            raise web.HTTPForbidden(text="show the token first, at /")
        if not response.prepared:
            response.headers["Content-Security-Policy"] = _POLICY
        return response

    def _refuse_foreign(self, request: web.Request) -> None:
        """Refuses what another page asks for: one at another port of this machine has the cookie sent along."""
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            raise web.HTTPForbidden(text=f"this page is not {request.host}'s own; a proxy has to pass Host on")
        # A foreign name that was made to lead to this machine. What may change something listens on loopback only.
        if not self._read_only and not is_loopback_host(re.sub(r":[0-9]*$", "", request.host)):
            raise web.HTTPForbidden(
                text="by that name the page only reads: ask for 127.0.0.1, or start it with --read-only"
            )

    async def _login(self, request: web.Request) -> web.StreamResponse:
        try:
            # Of another kind aiohttp has more ways to fail than it names.
            if request.content_type != _FORM:
                raise ValueError
            shown = str((await request.post()).get("token", ""))
        except (ValueError, LookupError, ConnectionError, web.RequestPayloadError):
            raise web.HTTPBadRequest(text="that is no form as the page sends it") from None
        try:
            wanted = self._key or self._read_token()
        except PypsError:
            raise web.HTTPForbidden(text="the file with the token cannot be read now, so nobody is let in") from None
        if await self._is_right(shown.strip(), wanted):
            return self._let_in()
        return self._ask(request, "That is not the token, nor the key that was printed. Which is it?")

    async def _is_right(self, shown: str, wanted: str) -> bool:
        """Whether it is the token or the key; one wrong one a second, for all callers together."""
        async with self._guess:
            right = _same(shown, wanted)
            await asyncio.sleep(0 if right else GUESS_SECONDS)
        return right

    @property
    def _cookie(self) -> str:
        # Browsers give a cookie to all ports of a host.
        return f"pyps_top_{self.port}"

    def _let_in(self) -> web.StreamResponse:
        response = web.Response(status=303, headers={"Location": "./"})
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="Strict")
        return response

    def _ask(self, request: web.Request, words: str) -> web.StreamResponse:
        context = {"refused": words, "application": {"name": self.title}}
        return aiohttp_jinja2.render_template("app_index.html", request, context)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Runs the command for one page."""
        if self._num_views >= VIEWS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{VIEWS_MAX} pages are open, each of which asks the servers")
        self._num_views += 1
        try:
            websocket = web.WebSocketResponse(heartbeat=15)
            await websocket.prepare(request)
            await self._show(websocket, *(to_int(request.query.get(name, ""), 80) for name in ("width", "height")))
        finally:
            self._num_views -= 1
        await websocket.close()
        return websocket

    async def _show(self, websocket: web.WebSocketResponse, width: int, height: int) -> None:
        """Runs the command until it ends or the page is gone; what nobody sees is killed, as it keeps nothing."""

        async def close() -> None:
            await websocket.close()

        view = _View(
            self.command,
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=close,
            download_manager=self.download_manager,
        )
        process = await view._open_app_process(*_within(width, height))
        both = [asyncio.create_task(each) for each in (view.run(), self._process_messages(websocket, view))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            # Its end is seen once all that it wrote is read.
            await process.communicate()


class _View(AppService):
    """A command that a page shows."""

    async def set_terminal_size(self, width: int, height: int) -> None:
        """Tells it how large the page is."""
        await super().set_terminal_size(*_within(width, height))


def _within(width: int, height: int) -> tuple[int, int]:
    return min(max(width, 1), SIZE_MAX[0]), min(max(height, 1), SIZE_MAX[1])


def _same(shown: str, wanted: str) -> bool:
    return hmac.compare_digest(shown.encode(errors="replace"), wanted.encode())
