"""`pyps dashboard` before real servers: what it answers to whom, what it changes, and the page that it keeps."""

import contextlib
import gzip
import http.client
import json
import re
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

from client_support import addresses, gradients_like, make_client, small_model
from pyps.certificates import Authority
from pyps.cli.dashboard import served
from pyps.dashboard import app
from pyps.dashboard.files import page_with
from pyps.service.tls import Tls
from pyps.watch.watch import Watch
from support import ServerThread, shell, status_of, wait_until

JSON = {"Content-Type": "application/json"}


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


def ask(
    address: str, path: str = "/data", body: object = None, *, tls: ssl.SSLContext | None = None, **headers: str
) -> Reply:
    """Ask a dashboard; with a body by POST. A name of a header has _ for -."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    if place.scheme == "https":
        connection = http.client.HTTPSConnection("127.0.0.1", place.port, timeout=60, context=tls)
    sent = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = ({} if sent is None else JSON) | {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request("GET" if sent is None else "POST", path, sent, given)
        answer = connection.getresponse()
        return Reply(answer.status, dict(answer.getheaders()), answer.read())


@contextlib.contextmanager
def shown(
    servers: Sequence[ServerThread], token_file: Path | None = None, **settings: Any
) -> Iterator[tuple[str, str]]:
    """Show servers on a page; yields its address and the token that belongs to it."""
    places = [server.control for server in servers]
    watch = Watch(places, token_file)
    page, words = served(watch.history, places, token_file, **settings)
    watch.start()
    with contextlib.closing(watch), page:
        address, _, token = words.removeprefix("The run as a page: ").partition("\n")[0].partition("#token=")
        assert address == page.address
        yield address, f"Bearer {token}"


def push(servers: Sequence[ServerThread], **options: Any) -> None:
    with make_client(addresses(servers), **options) as client:
        client.push(gradients_like(small_model(), seed=0), examples=32)
        client.report(loss=0.125)


def test_the_data_comes_whole_and_then_only_what_is_new(start_server):
    server = start_server("--run-id=run-7")
    with shown([server]) as (address, _):
        push([server])
        whole = wait_until(lambda: (found := ask(address).json)["version"] and found["rows"] and found, what="rows")
        assert (whole["run"], whole["whole"], whole["workers"][0]["name"]) == ("run-7", True, "worker")
        last = f"/data?after={whole['number']}&id="
        more = ask(address, last + whole["id"]).json
        assert not more["whole"] and all(row["n"] > whole["number"] for row in more["rows"])
        assert ask(address, last + "of-another-life").json["whole"]
        packed = ask(address, Accept_Encoding="gzip")
        assert json.loads(gzip.decompress(packed.body))["run"] == "run-7"
        assert packed.headers["Cache-Control"] == "no-store"


def test_a_change_is_looked_at_first_and_made_on_all_servers_or_none(start_server):
    servers = [start_server() for _ in range(2)]
    push(servers)
    change = {"protocol": "hardsync", "learning_rate": 0.5}
    with shown(servers) as (address, token), shown(servers[:1]) as (of_one, its_token):

        def configure(body: object, at: str = address, token: str = token) -> tuple[int, Any]:
            reply = ask(at, "/configure", body, Authorization=token)
            return reply.status, reply.json.get("lines", reply.json.get("error"))

        _, lines = configure(change | {"validate_only": True})
        assert [line.partition(" ")[0] for line in lines] == [server.control for server in servers]
        status, words = configure(change, of_one, its_token)
        assert (status, "server 1 of 2 was not named" in words) == (409, True)
        status, words = configure({"protocol": "nonsense"})
        # Once, and not by each control port.
        assert words.startswith("nothing was set, as protocol 'nonsense' is unknown")
        assert (status, words.count("nonsense")) == (409, 1)
        texts = (b"", b"{", b"[]", b"\xff", b"[" * 4000)
        for body in (*texts, {}, {"validate_only": True}, change | {"staleness": "none"}):
            assert configure(body)[0] == 400, body
        wrong = [{"protocol": value} for value in (None, 3, "", "a\nb", "\ud800", ["async"])]
        for body in (*wrong, *({"learning_rate": rate} for rate in (-1, float("nan"), float("inf"), 10**400))):
            assert configure(body)[0] in (400, 409), body
        assert configure({"protocol": "a" * 5000})[0] == 413
        assert {status_of(server).protocol for server in servers} == {"async"}

        status, lines = configure(change)

        assert status == 200 and all("hardsync, staleness divide, learning rate 0.5" in line for line in lines)
        assert {status_of(server).protocol for server in servers} == {"hardsync"}
        servers[1].stop()
        status, words = configure({"protocol": "async"})
        assert (status, "no server answers" in words) == (409, True)
        assert status_of(servers[0]).protocol == "hardsync"


def test_no_other_page_and_nobody_without_the_token_changes_or_reads(start_server):
    server = start_server()
    push([server])
    with shown([server], names=["Runs.example"]) as (address, token):
        host, port = urlsplit(address).netloc, urlsplit(address).port
        foreign = [{"Host": name} for name in ("evil.example", "", "[::1", "evil.localhost.")]
        foreign += [{"Origin": name} for name in ("http://evil.example", "null", f"http://localhost:{port}")]
        crossed = [{"Sec_Fetch_Site": site} for site in ("cross-site", "same-site")]
        change = {"protocol": "hardsync"}
        for path in ("/", "/data", "/configure", "/nothing", "/../app.py"):
            # A link to the page may be anywhere.
            for headers in foreign + (crossed if path != "/" else []):
                body = change if path == "/configure" else None
                assert ask(address, path, body, Authorization=token, **headers).status == 403, (path, headers)
        for status, path, body, headers in (
            (200, "/", None, crossed[0]),
            (200, "/data", None, {"Host": "runs.example.:80", "Sec_Fetch_Site": "same-origin"}),
            (200, "/data", None, {"Host": "[::1]:7615", "Origin": "http://[::1]:7615"}),
            (200, "/data?protocol=hardsync", None, {}),
            (404, "/configure?protocol=hardsync", None, {}),
            (401, "/configure", change, {"Authorization": ""}),
        ):
            assert ask(address, path, body, **{"Authorization": token} | headers).status == status, (path, headers)
        assert status_of(server).protocol == "async"

        page = ask(address, "/", Origin=f"http://{host}")

        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        for name in re.findall(r'(?:href|src)="([\w.]+)"', page.body.decode()):
            assert ask(address, f"/{name}").status == 200, name


def test_half_a_request_keeps_nobody_out_for_long_and_is_no_line(start_server, monkeypatch, capfd):
    monkeypatch.setattr(app, "FIRST_REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(app, "IDLE_SECONDS", 2.0)
    monkeypatch.setattr(app, "CONNECTIONS_MAX", 8)
    half, whole = b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"GET /uplot.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with shown([start_server()]) as (address, _), contextlib.ExitStack() as ends:
        place = ("127.0.0.1", urlsplit(address).port)
        held = [ends.enter_context(socket.create_connection(place)) for _ in range(12)]
        for index, connection in enumerate(held):
            with contextlib.suppress(OSError):
                # Some after whole ones, whose answers nobody reads for now.
                connection.send(whole * (index % 3) + half if index else b"GET / \x00\r\n\r\n")
        # One too many is closed at once, the others soon.
        for connection in held:
            connection.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1 << 12):
                    pass
        assert ask(address).status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_printed_address_reads_and_the_operators_token_changes(start_server, monkeypatch, tmp_path):
    worker, operator = tmp_path / "worker", tmp_path / "operator"
    worker.write_text("workers-9c1f", encoding="utf-8")
    operator.write_text("operators-9c1f", encoding="utf-8")
    monkeypatch.setenv("PYPS_OPERATOR_TOKEN_FILE", str(operator))
    server = start_server(f"--token-file={worker}", f"--operator-token-file={operator}")
    push([server], token="workers-9c1f")
    with shown([server], worker) as (address, printed):
        for token, reads, changes in (
            ("", 401, 401),
            ("Bearer \xe9", 401, 401),
            (printed, 200, 401),
            ("Bearer operators-9c1f", 200, 200),
        ):
            assert ask(address, Authorization=token).status == reads, token
            assert ask(address, "/configure", {"learning_rate": 0.5}, Authorization=token).status == changes, token


def test_the_page_has_tls_with_the_newest_certificate(start_server, tmp_path):
    first, second = (Authority(tmp_path / name, create=True) for name in ("first", "second"))
    first.make_server(["127.0.0.1"], days=1)
    second.make_server(["127.0.0.1"], days=1)
    files = {name: tmp_path / "first" / f"server.{name}" for name in ("crt", "key")}
    trusted = {name: ssl.create_default_context(cafile=tmp_path / name / "ca.crt") for name in ("first", "second")}
    tls = Tls(cert=files["crt"], key=files["key"], client_ca=None)
    with shown([start_server()], tls=tls.context) as (address, _):
        assert address.startswith("https://")
        assert ask(address, tls=trusted["first"]).status == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(address.replace("https", "http"))
        for name, file in files.items():
            (tmp_path / "second" / f"server.{name}").replace(file)
        assert ask(address, tls=trusted["second"]).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(address, tls=trusted["first"])


def test_what_cannot_be_is_refused_in_a_sentence(start_server, monkeypatch, tmp_path):
    with shown([start_server()]) as (address, _):
        busy = str(urlsplit(address).port)
        for arguments, words in (
            (("--port", busy), f"port {busy} of 127.0.0.1: it is in use: name another --port"),
            (("--host", "0.0.0.0"), "would cross the network in the clear: give --tls-cert"),
            (("--host", "192.0.2.1", "--insecure"), "cannot listen on port 7615 of 192.0.2.1: "),
            (("--tls-cert", "a.crt"), "--tls-cert and --tls-key belong together"),
            (("--servers", "a b"), "'a b' is malformed"),
            (("--port", "0", "--eval", "none.py"), "There is no script none.py"),
            (("--port", "0", "--save", f"{tmp_path}/none/page.html"), "page.html cannot be written: No such file"),
            (("--port", "0", "--save", "/dev/null"), "the page /dev/null cannot be written: that is no file"),
            (("--port", "0", "--save", "/"), "the page / cannot be written: that is no file"),
        ):
            assert words in shell("dashboard", *arguments, status=2)
    monkeypatch.delitem(sys.modules, "pyps.dashboard.app", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert "needs aiohttp, which is not installed: pip install '.[dashboard]'" in shell("dashboard", status=2)


def data_in(page: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return dict(json.loads(text))


def test_a_kept_page_is_whole_and_no_name_in_it_is_a_script():
    data = {"run": "</script><script>alert(1)</script><!--", "live": False}
    page = page_with(data)
    assert data_in(page) == data
    assert not re.search(r'<(?:script|link)[^>]* (?:src|href)="(?!data:)', page)
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_the_command_scores_a_run_and_keeps_its_page_when_it_ends(start_server, start_python, tmp_path):
    server, page = start_server(), tmp_path / "page.html"
    push([server])
    script = tmp_path / "score.py"
    script.write_text("scores = [0.25]\ndef evaluate(_): return {'held out': scores.pop()}\n", encoding="utf-8")
    flags = ("--port", "0", "--eval", str(script), "--every", "0.1", "--save", str(page))
    command = start_python("-m", "pyps", "dashboard", "--servers", server.data, *flags)
    address = command.wait_for_output("#token=").partition("The run as a page: ")[2].partition("#")[0]

    failed = wait_until(lambda: [each for each in ask(address).json["events"] if each[3] == "score"], what="a failure")

    assert "pop from empty list" in failed[0][4]
    # The second signal comes while the page is written.
    psutil.Process(command.pid).send_signal(signal.SIGINT)
    assert command.terminate() == 0, command.output()
    kept = data_in(page.read_text(encoding="utf-8"))
    assert not kept["live"]
    assert [row["score"] for row in kept["rows"] if "score" in row] == [{"held out": 0.25}]
    assert command.output().endswith(f"The run as a page: {page}\n")


def test_a_job_says_where_its_page_is_and_goes_on_without_it(start_python):
    code = "import numpy, pyps_client, signal; pyps_client.Client({'w': numpy.zeros(4, numpy.float32)}); signal.pause()"
    job = start_python("-m", "pyps", "run", "--dashboard", "--", "python", "-c", code)
    address = job.wait_for_output("#token=").partition("| The run as a page: ")[2].partition("#")[0]
    wait_until(lambda: [worker["name"] for worker in ask(address).json["workers"]] == ["worker-0"], what="the worker")
    [page] = [child for child in psutil.Process(job.pid).children() if "dashboard" in child.cmdline()]

    page.kill()

    job.wait_for_output("| dashboard was killed by SIGKILL: the job goes on without it.")
    assert job.terminate() != 0
    assert "| The page was not kept: add --report FILE." in job.output()


def test_a_job_keeps_its_page(start_python, tmp_path):
    file, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(file)
    code = (
        "import numpy, os, pyps_client, time\n"
        "with pyps_client.Client({'w': numpy.zeros(4, numpy.float32)}):\n"
        f"    while not os.path.exists({str(file)!r}): time.sleep(0.1)\n"
    )
    job = start_python("-m", "pyps", "run", "--report", str(link), "--", "python", "-c", code)
    assert job.wait(60) == 0 and f"| The run as a page: {file}\n" in job.output(), job.output()
    assert [worker["name"] for worker in data_in(link.read_text(encoding="utf-8"))["workers"]] == ["worker-0"]
    assert link.is_symlink()


def test_a_run_that_is_over_is_shown_from_its_log(start_server, start_python, monkeypatch, tmp_path):
    logs = tmp_path / "logs"
    server = start_server("--run-id=mine", f"--update-log={logs}")
    push([server])
    server.stop()
    # A page is made without what serves it.
    with monkeypatch.context() as lacking:
        lacking.setitem(sys.modules, "aiohttp", None)
        assert shell("report", str(logs)) == f"The run as a page: {logs}/report.html\n"
    kept = data_in((logs / "report.html").read_text(encoding="utf-8"))
    assert (kept["run"], kept["live"], len(kept["steps"])) == ("mine", False, 1)
    assert "there is no update log in" in shell("report", str(tmp_path / "none"), status=2)

    command = start_python("-m", "pyps", "dashboard", "--port", "0", "--replay", str(logs))
    address = command.wait_for_output("page: http").partition("The run as a page: ")[2].strip()
    assert ask(address).json["run"] == "mine"
    change = ask(address, "/configure", {"protocol": "hardsync"}, Authorization="Bearer any")
    assert (change.status, change.json) == (403, {"error": "nothing can be changed from this page"})
    assert command.terminate() == 0, command.output()
