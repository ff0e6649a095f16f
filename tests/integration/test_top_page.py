"""The page of `pyps top --web`, who may see it, and the commands of docs/top.md."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pyps.cli.top.web import GUESS_SECONDS, Page
from pyps_client.credentials import read_token
from support import ROOT, PythonProcess, ServerThread, child_environment, shell

COMMANDS = re.findall(r"^pyps top.*$", (ROOT / "docs" / "top.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("servers_token", ["", "observers-9c1f"])
def test_the_page_is_for_who_shows_the_token_or_the_key(servers_token: str) -> None:
    page = Page("true", host="127.0.0.1", port=1, read_only=False, read_token=lambda: servers_token)
    assert bool(page._key) is not bool(servers_token)
    secret = servers_token or page._key

    async def story() -> None:
        async with TestClient(TestServer(await page._make_app())) as browser:
            for path in ("/ws", "/static/js/textual.js", "/download/x", "/nothing"):
                assert (await browser.get(path)).status == 403, path
            asked = await browser.get("/?key=wrong")
            assert "textual.js" not in await asked.text() and "default-src 'self'" in asked.headers[
                "Content-Security-Policy"
            ]  # fmt: skip
            assert "That is not the token" in await (await browser.post("/login", data={"token": "é"})).text()
            if servers_token:
                shown = await browser.post("/login", data={"token": secret})
            else:
                shown = await browser.get("/", params={"key": secret})
            assert "textual.js" in await shown.text() and "https://" not in await shown.text()
            [cookie] = browser.session.cookie_jar
            assert (cookie["httponly"], cookie["samesite"]) == (True, "Strict")
            assert secret not in cookie.value
            assert (await browser.get("/static/js/textual.js")).status == 200

    asyncio.run(story())


def test_what_is_no_form_or_no_token_is_refused_in_words_and_guesses_are_slow(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("observers-9c1f")
    page = Page("true", host="127.0.0.1", port=1, read_only=False, read_token=lambda: read_token(token))
    form = "application/x-www-form-urlencoded"

    async def story() -> None:
        async with TestClient(TestServer(await page._make_app())) as browser:

            async def login(body: bytes, kind: str = form) -> tuple[int, str]:
                answer = await browser.post("/login", data=body, headers={"Content-Type": kind})
                return answer.status, await answer.text()

            part = (
                b"--x\r\nContent-Disposition: form-data; name=token\r\nContent-Transfer-Encoding: odd\r\n\r\nx\r\n--x--"
            )
            for body, kind in (
                (b"token=\xff\xfe", form),
                (b"token=x", f"{form}; charset=unheard-of"),
                (b"token=x", "multipart/form-data"),
                (part, "multipart/form-data; boundary=x"),
            ):
                assert await login(body, kind) == (400, "that is no form as the page sends it"), kind
            before = time.monotonic()
            answers = await asyncio.gather(*(login(f"token=guess-{index}".encode()) for index in range(3)))
            assert time.monotonic() - before >= 3 * GUESS_SECONDS
            assert all("That is not the token" in words for _, words in answers)
            odd = {"Cookie": f"{page._cookie}=\udcff"}
            assert (await browser.get("/", headers=odd)).status == 200
            for spoil in (lambda: token.write_text(""), token.unlink):
                spoil()
                status, words = await login(b"token=observers-9c1f")
                assert status == 403 and "cannot be read now" in words

    asyncio.run(story())


@pytest.mark.parametrize("read_only", [False, True])
def test_another_page_asks_for_nothing_and_a_name_leads_only_to_what_reads(read_only: bool) -> None:
    page = Page("true", host="127.0.0.1", port=1, read_only=read_only, read_token=str)

    async def story() -> None:
        async with TestClient(TestServer(await page._make_app())) as browser:
            await browser.get("/", params={"key": page._key})
            own = f"127.0.0.1:{browser.port}"

            async def status(path: str, origin: str, host: str = own) -> int:
                return (await browser.get(path, headers={"Origin": origin, "Host": host})).status

            for origin in ("http://127.0.0.1:19999", "https://foreign.example", "null", ""):
                assert await status("/ws", origin) == 403, origin
                assert await status("/", origin) == 403, origin
                assert (await browser.post("/login", headers={"Origin": origin})).status == 403, origin
            assert (await browser.ws_connect("/ws", origin=f"http://{own}")).closed is False
            assert await status("/", f"http://{own}") == 200
            assert await status("/", "http://localhost:9000", host="localhost:9000") == 200
            by_name = 200 if read_only else 403
            assert await status("/", "https://foreign.example", host="foreign.example") == by_name
            assert await status("/", "http://foreign.example:1", host="foreign.example:1") == by_name

    asyncio.run(story())


def test_a_view_that_nobody_sees_is_killed_and_its_place_taken_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyps.cli.top.web.VIEWS_MAX", 1)
    # As a view that draws more than anybody reads, and does not listen.
    script = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
told = f"{os.getpid()} {os.environ['COLUMNS']} {os.environ['ROWS']}".encode()
os.write(1, b"__GANGLION__\\nD" + len(told).to_bytes(4, "big") + told)
size = os.read(0, 5)[1:]
told = os.read(0, int.from_bytes(size, "big"))
while True:
    os.write(1, b"D" + len(told).to_bytes(4, "big") + told)
"""
    command = f"exec {shlex.join([sys.executable, '-c', script])}"
    page = Page(command, host="127.0.0.1", port=1, read_only=False, read_token=str)

    async def story() -> None:
        async with TestClient(TestServer(await page._make_app())) as browser:
            await browser.get("/", params={"key": page._key})
            for _ in range(2):
                view = await browser.ws_connect("/ws?width=3000&height=3000")
                process, *size = (await view.receive_bytes(timeout=30)).split()
                assert size == [b"500", b"200"]
                assert (await browser.get("/ws")).status == 503
                await view.send_json(["resize", {"width": 3000, "height": 50}])
                resized = json.loads(await view.receive_bytes(timeout=30))
                assert (resized["width"], resized["height"]) == (500, 50)
                # As where the connection is cut.
                connection = view._response.connection
                assert connection and connection.transport
                connection.transport.abort()
                deadline = time.monotonic() + 10
                while psutil.pid_exists(int(process)) or page._num_views:
                    assert time.monotonic() < deadline, "it goes on"
                    await asyncio.sleep(0.02)

    asyncio.run(story())


def test_the_address_of_an_ipv6_host_is_one() -> None:
    with PythonProcess("-m", "pyps", "top", "--web", "--host", "::1", "--port", "0") as served:
        assert "at http://[::1]:" in served.wait_for_output("until Ctrl-C")
        assert served.terminate() == 0


def test_beyond_loopback_the_page_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Page] = []
    monkeypatch.setattr(Page, "serve", lambda page: pages.append(page))

    shell("top", "--web")
    shell("top", "--web", "--host", "0.0.0.0", "--insecure")

    assert ["--read-only" in page.command for page in pages] == [False, True]


def test_it_takes_the_operators_token_where_it_may_change_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages: list[Page] = []
    monkeypatch.setattr(Page, "serve", lambda page: pages.append(page))
    files = {role: tmp_path / role for role in ("worker", "operator", "named")}
    for file in files.values():
        file.write_text("the-token-of-somebody", encoding="utf-8")
    named = {"PYPS_TOKEN_FILE": f"{files['worker']}", "PYPS_OPERATOR_TOKEN_FILE": f"{files['operator']}"}

    shell("top", "--web", **named)
    shell("top", "--web", "--token-file", f"{files['named']}", **named)
    shell("top", "--web", "--read-only", **named)
    shell("top", "--web", "--host", "0.0.0.0", "--insecure", **named)

    taken = [shlex.split(page.command)[-2:] for page in pages]
    assert taken == [
        ["--token-file", f"{files['operator']}"],
        ["--token-file", f"{files['named']}"],
        [f"{files['worker']}", "--read-only"],
        [f"{files['worker']}", "--read-only"],
    ]


def test_every_command_of_the_page_runs(start_server: Callable[..., ServerThread], tmp_path: Path) -> None:
    server = start_server("--run-id", "mine")
    token = tmp_path / "observer.token"
    token.write_text("observers-9c1f")
    assert [("--web" in command, "--host" in command) for command in COMMANDS] == [
        (False, False), (True, False), (True, True)
    ]  # fmt: skip
    real = {"first-host,second-host": server.control, "observer.token": str(token), "10.0.0.7": "127.0.0.2"}
    environment = child_environment({"PYPS_SERVERS": server.data, "TERM": "xterm-256color"})
    for command in COMMANDS:
        arguments = [real.get(word, word) for word in shlex.split(command)[1:]]
        if "--web" in arguments:
            with PythonProcess("-m", "pyps", *arguments, "--port", "0", env=environment) as served:
                [url] = re.findall(r"http://\S+", served.wait_for_output("until Ctrl-C"))
                with urllib.request.urlopen(url, timeout=20) as answer:
                    assert b"pyps top" in answer.read()
                assert served.terminate() == 0
            continue
        terminal, end = pty.openpty()
        shown = subprocess.Popen(
            [sys.executable, "-m", "pyps", *arguments], stdin=end, stdout=end, stderr=end, env=environment
        )
        os.close(end)
        seen = b""
        while b"mine" not in seen:
            seen += os.read(terminal, 1 << 16)
        os.write(terminal, b"q")
        with pytest.raises(OSError):
            # Until the program has closed its end.
            while True:
                os.read(terminal, 1 << 16)
        assert shown.wait(30) == 0
        os.close(terminal)
