"""`pyps top` against real servers: what its terminal shows, what its keys do, what it costs them."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import psutil
from textual.pilot import Pilot
from textual.widgets import Input

from client_support import addresses, gradients_like, make_client, small_model
from pyps.cli.top.history import poll
from pyps.cli.top.screen import Top
from pyps.service.hosting import handlers_of
from pyps_client.launch import parse_servers
from pyps_wire import inspector_pb2 as pb
from pyps_wire.contract import INSPECTOR
from pyps_wire.work_pb2 import WorkProgress
from support import ROOT, child_environment, replace_file, shell, status_of, wait_until
from wire_worker import WireWorker


def text_of(app: Top) -> str:
    """Return the text of the screen, and of notifications in full."""
    lines = [strip.text for strip in app.screen._compositor.render_strips()]
    return "\n".join([*lines, *(notification.message for notification in app._notifications)])


async def see(pilot: Pilot[None], *words: str, gone: str = "") -> None:
    deadline = time.monotonic() + 30
    while not all(word in text_of(pilot.app) for word in words) or (gone and gone in text_of(pilot.app)):
        assert time.monotonic() < deadline, f"{words} did not come, or {gone!r} stayed:\n{text_of(pilot.app)}"
        await pilot.pause(0.05)


async def change(pilot: Pilot[None], key: str, value: str, *answer: str) -> None:
    """Enter another value in the dialog that a key opens."""
    await pilot.press(key)
    await see(pilot, "all as it is)")
    await pilot.press(*value, "enter", *answer)


def watch(app: Top, story: Callable[[Pilot[None]], Awaitable[None]], size: tuple[int, int] = (130, 32)) -> None:
    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await story(pilot)

    asyncio.run(run())


def view(*addresses: str, token_file: Path | None = None, read_only: bool = False) -> Top:
    return Top(addresses, token_file, read_only=read_only, interval_seconds=0.2)


def test_it_shows_workers_who_waits_for_whom_and_every_tab_by_keys(start_server, tmp_path):
    flags = ("--protocol=hardsync", "--expected-workers=2", "--heartbeat-seconds=0.05")
    servers = [start_server(*flags, f"--checkpoint-dir={tmp_path}/{index}") for index in range(2)]
    names = ("[red]quick[/red]", "slow")
    with (
        make_client(addresses(servers), worker_id=names[0], run_id="run-7") as quick,
        make_client(addresses(servers), worker_id=names[1], run_id="run-7") as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        slow.push(gradients_like(small_model(), seed=0), examples=32)
        quick.push(gradients_like(small_model(), seed=0), examples=32)
        shell("save", "--servers", addresses(servers))
        quick.pull()
        slow.pull()
        quick.push(gradients_like(small_model(), seed=1), examples=32)
        quick.report(loss=0.125)
        waiting = pool.submit(quick.pull)

        async def story(pilot: Pilot[None]) -> None:
            await see(pilot, "run-7", "hardsync", "2 alive", "0.125", *names, "staleness", "step lost", "version")
            await pilot.press("3")
            await see(pilot, f"{names[0]} waits for slow", "waits:")
            slow.push(gradients_like(small_model(), seed=2), examples=32)
            await see(pilot, "no worker waits")
            await pilot.press("2")
            await see(pilot, "in flight", "MiB", "saves 1 behind", servers[1].control)
            await pilot.press("4")
            await see(pilot, "no worker takes its data in portions")
            await pilot.press("5")
            await see(pilot, "worker joined", names[1])
            await pilot.press("1", "s", "s")
            await see(pilot, "steps ▼")
            await pilot.press("S")
            await see(pilot, "steps ▲")

            await pilot.press("space")
            await see(pilot, "paused")
            await pilot.press("space")
            await see(pilot, "steps/s", gone="paused")

        watch(view(*(server.control for server in servers)), story)
        waiting.result(30)


def test_keys_change_protocol_and_rate_of_all_servers_once_it_is_said_twice(start_server):
    servers = [start_server() for _ in range(2)]
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=0))

        async def story(pilot: Pilot[None]) -> None:
            await see(pilot, "protocol", "rate", gone="read-only")
            await change(pilot, "p", "hardsync")
            await see(pilot, "Change the protocol of 2 servers from async to hardsync?")
            await pilot.press("enter", "n")
            await see(pilot, "worker ▲", gone="Change the protocol")
            await pilot.press("p", "escape")
            await change(pilot, "r", "fast")
            await see(pilot, "'fast' is no learning rate; expected a number above 0")
            await pilot.press("escape")
            assert {status_of(server).protocol for server in servers} == {"async"}
            await change(pilot, "p", "sometimes", "y")
            await see(pilot, "not changed", "'sometimes' is unknown")
            await change(pilot, "p", "hardsync", "y")
            await see(pilot, f"{servers[1].control}: hardsync")
            await change(pilot, "r", "0.125", "y")
            await see(pilot, "rate 0.125")
            assert {status_of(server).protocol for server in servers} == {"hardsync"}

        watch(view(*(server.control for server in servers)), story)
        watch(view(servers[0].control), sees("protocol", key="p", then="nothing is set: server 1 of 2 was not named"))
        hint = "\n server 1 of 2 was not named: name all with --servers"
        watch(view(servers[0].control), sees("protocol", key="3", then=hint))


def test_without_the_operators_role_it_only_reads_and_says_so(start_server, tmp_path):
    files = {role: tmp_path / role for role in ("observer", "worker", "operator")}
    for role, file in files.items():
        file.write_text(f"the-token-of-{role}s", encoding="utf-8")
    flags = [f"--{'' if role == 'worker' else f'{role}-'}token-file={file}" for role, file in files.items()]
    server = start_server(*flags)

    reason = "Configure is for the role operator, and this caller's is observer"
    observer = sees("read-only", "no run yet", gone="protocol", key="p r w", then=reason)
    watch(view(server.control, token_file=files["observer"]), observer)
    reader = sees("read-only", "no run yet", key="w", then="it was started with --read-only")
    watch(view(server.control, token_file=files["operator"], read_only=True), reader)
    allowed = sees("no run yet", "protocol", gone="read-only", key="r", then="nothing is set: there is no run yet")
    watch(view(server.control, token_file=files["operator"]), allowed)
    refused = sees("1 of 1 servers do not answer", key="3", then="this server wants a token")
    watch(view(server.control), refused)


def test_a_narrow_terminal_shows_every_key(start_server):
    keys = ("1-5 tabs", "s sort", "S reverse", "space pause", "p protocol", "r rate", "q quit")
    watch(view(start_server().control), sees(*keys), size=(46, 24))


def test_a_server_that_died_is_shown_and_found_again_at_another_address(start_server, tmp_path):
    file = tmp_path / "servers"
    servers = [start_server(), start_server()]
    replace_file(file, f"{servers[0].control}\n{servers[1].control}\n")
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=0))

    async def story(pilot: Pilot[None]) -> None:
        await see(pilot, "finished")
        await asyncio.to_thread(servers[1].stop)
        await see(pilot, "1 of 2 servers do not answer", "worker", "version")
        await pilot.press("2")
        await see(pilot, "no answer for")
        await pilot.press("p")
        await see(pilot, f"nothing is set: {places[1]} does not answer")
        moved = await asyncio.to_thread(start_server)
        replace_file(file, f"{servers[0].control}\n{moved.control}\n")
        await see(pilot, "empty", gone="do not answer")
        await pilot.press("5")
        await see(pilot, "answers again")

    places = parse_servers(f"file:{file}")
    watch(view(*places), story)


@contextlib.contextmanager
def serving(
    *workers: pb.WorkerInfo, events: Sequence[pb.Event] = (), count: int = 1, **status: object
) -> Iterator[list[str]]:
    """Start so many servers with these answers; give their addresses."""
    replies = {
        "GetStatus": pb.Status(**{"num_servers": 1, "uptime_seconds": 1.0, **status}),
        "ListWorkers": pb.ListWorkersReply(workers=workers or [pb.WorkerInfo(worker_id="worker-0", state="alive")]),
        "ListEvents": pb.ListEventsReply(events=events),
        "GetWork": WorkProgress(),
        "GetStaleness": pb.StalenessHistogram(),
        "GetMemory": pb.Memory(),
        "Configure": pb.ConfigureReply(),
    }
    calls = {name: lambda request, context, reply=reply: reply for name, reply in replies.items()}
    addresses = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            server = grpc.server(ThreadPoolExecutor(2))
            server.add_generic_rpc_handlers((handlers_of(INSPECTOR, SimpleNamespace(**calls)),))
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            stack.callback(server.stop, None)
        yield addresses


def sees(*words: str, gone: str = "", key: str = "", then: str = "") -> Callable[[Pilot[None]], Awaitable[None]]:
    """Return a story: these words are seen; a key is pressed, and other words are seen."""

    async def story(pilot: Pilot[None]) -> None:
        await see(pilot, *words, gone=gone)
        if key:
            await pilot.press(*key.split())
            await see(pilot, then)

    return story


def test_what_cannot_be_shown_is_the_line_of_who_told_it(start_server):
    good = start_server("--run-id=of-the-good-one")
    refused = sees("of-the-good-one", "1 of 2 servers do not answer", key="3", then="cannot be shown")
    far_future = [pb.Event(number=1, age_seconds=1e300)]
    for odd in ({"state": 99}, {"uptime_seconds": float("inf")}, {"events": far_future}):
        with serving(**odd) as addresses:
            watch(view(*addresses, good.control), refused)


def test_a_dialog_shows_no_rate_and_no_control_characters_of_a_server():
    with serving() as addresses:
        watch(view(*addresses), sees("worker-0", "rate", gone="read-only", key="r", then="all as it is)"))

    async def story(pilot: Pilot[None]) -> None:
        await sees("worker-0", "protocol", gone="read-only", key="p", then="all as it is)")(pilot)
        assert pilot.app.screen.query_one(Input).value == "async?]0;mine?"

    with serving(protocol="async\x1b]0;mine\x07") as addresses:
        watch(view(*addresses), story)


def test_of_many_workers_the_first_are_shown_and_how_many_more_there_are():
    workers = [pb.WorkerInfo(worker_id=f"worker-{index:04}", clock=index) for index in range(500)]

    async def story(pilot: Pilot[None]) -> None:
        await see(pilot, "worker-0000")
        assert "worker-0001" in text_of(pilot.app)
        await pilot.press("s", "s")
        await see(pilot, "steps ▼", "worker-0499", gone="worker-0000")
        await pilot.press("1", "end")
        await see(pilot, "worker-0300", "300 more: s and S say which come first", gone="worker-0299")

    with serving(*workers) as addresses:
        watch(view(*addresses), story)


def test_asking_a_server_costs_it_less_than_a_hundredth_of_a_core(start_server_process):
    server = start_server_process()
    workers = [WireWorker(server.data, f"worker-{index}") for index in range(4)]
    for worker in workers:
        worker.join()
        worker.push(worker.push_request(1.0))
        worker.channel.close()
    process = psutil.Process(server.pid)
    closed, running = mock.Mock(wraps=Event()), mock.Mock(wraps=Event())
    running.set()
    answers = SimpleQueue[Any]()

    def cost_of(rounds: int) -> float:
        before = process.cpu_times()
        assert not any(isinstance(answers.get(timeout=30), str) for _ in range(rounds))
        after = process.cpu_times()
        return float(after.user + after.system - before.user - before.system) / rounds

    settings = {"interval_seconds": 0.0, "running": running, "closed": closed}
    report = (server.control, None, lambda address, answer: answers.put(answer))
    Thread(target=poll, args=report, kwargs=settings, daemon=True).start()
    cost_of(5)
    # It calls once a second. Other programs of this machine make some rounds more expensive.
    assert min(cost_of(20) for _ in range(5)) < 0.01
    pauses = running.wait.call_count
    running.clear()
    wait_until(lambda: running.wait.call_count > pauses, what="a pause")
    closed.set()
    running.set()
    # More workers cost more, so it calls less often.
    assert {call.args for call in closed.wait.call_args_list} == {(len(workers) / 256,)}


def test_what_is_missing_or_makes_no_sense_is_one_sentence(monkeypatch):
    for arguments, words in (
        (("--servers", "a b"), "'a b' is malformed"),
        ((), "pyps top needs a terminal: `pyps status` writes to a pipe"),
    ):
        assert words in " ".join(shell("top", *arguments, status=2).split())
    monkeypatch.delitem(sys.modules, "pyps.cli.top.screen")
    monkeypatch.setitem(sys.modules, "textual", None)
    assert "which is not installed: pip install '.[top]' in a clone" in shell("top", status=2)


def test_the_command_of_the_page_shows_a_run_by_the_operators_token(start_server, tmp_path):
    [command] = re.findall(r"^pyps top.*$", (ROOT / "docs" / "top.md").read_text(encoding="utf-8"), re.M)
    worker, operator = tmp_path / "worker", tmp_path / "operator"
    worker.write_text("workers-9c1f", encoding="utf-8")
    operator.write_text("operators-9c1f", encoding="utf-8")
    server = start_server("--run-id", "mine", f"--token-file={worker}", f"--operator-token-file={operator}")
    # The observer's token is not there: only --read-only would look for it.
    tokens = {"PYPS_OBSERVER_TOKEN_FILE": f"{tmp_path}/none", "PYPS_OPERATOR_TOKEN_FILE": f"{operator}"}
    arguments = [server.control if word == "first-host,second-host" else word for word in command.split()[1:]]
    assert server.control in arguments
    for flags, last in (((), b"rate"), (("--read-only",), b"")):
        terminal, end = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 32, 130, 0, 0))
        shown = subprocess.Popen(
            [sys.executable, "-m", "pyps", *arguments, *flags],
            stdin=end,
            stdout=end,
            stderr=end,
            env=child_environment({**tokens, "TERM": "xterm-256color"}),
        )
        os.close(end)
        seen = b""
        if last:
            while not (b"mine" in seen and last in seen):
                seen += os.read(terminal, 1 << 16)
            os.write(terminal, b"q")
        with contextlib.suppress(OSError):
            # Until the program has closed its end.
            while True:
                seen += os.read(terminal, 1 << 16)
        assert shown.wait(30) == (0 if last else 2), seen
        os.close(terminal)
