"""What is known of a run from real servers: what holds it up, what staleness costs; what asking costs them."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import psutil
import pytest

from client_support import addresses, gradients_like, make_client, small_model
from pyps.control import Control
from pyps.watch import answer as answers
from pyps.watch import watch as asking
from pyps.watch.history import History
from pyps.watch.watch import Asked, Watch
from pyps_client.launch import parse_servers
from pyps_wire import inspector_pb2 as pb
from support import child_environment, replace_file, shell, wait_until
from wire_worker import WireWorker


def look(*servers) -> History:
    history = History([server.control for server in servers])
    for server in servers:
        with Control(server.control, token="") as control:
            history.take(server.control, Asked().answer(control, server.control))
    return history


def test_who_holds_the_others_up_is_known_from_one_look(start_server):
    servers = [start_server("--protocol=hardsync", "--expected-workers=2") for _ in range(2)]
    ended = threading.Event()

    def work(name: str, seconds: float) -> None:
        with make_client(addresses(servers), worker_id=name) as client:
            while not ended.wait(seconds):
                client.push(gradients_like(small_model(), seed=0), examples=8)
                client.pull()

    with ThreadPoolExecutor(2) as pool:
        for each in (("quick", 0.01), ("slow", 0.3)):
            pool.submit(work, *each)
        try:
            wait_until(lambda: len(look(*servers).steps) >= 16, what="16 steps")
            history = look(*servers)
            shown = " ".join(shell("status", "--servers", ",".join(server.control for server in servers)).split())
        finally:
            ended.set()
    words = r"slow is (.*) times slower than the rest; under hardsync all wait for it: (\d+)% of the workers' time"
    for sentence in (history.verdict.sentence, shown):
        found = re.match(words, sentence)
        assert found and float(found[1]) > 1.2 and 5 < int(found[2]) <= 50, sentence
    assert history.verdict.worker == "slow"
    # Two servers list each step, and it is one.
    steps = [step for step in history.steps if step.worker == "slow"]
    assert len(steps) <= max(info.clock for info in history.answers[0].workers)
    assert all(before.ended <= after.began + 0.15 for before, after in pairwise(steps))


def test_a_server_that_died_is_found_again_at_another_address(start_server, tmp_path):
    file = tmp_path / "servers"
    # The other one is older than the first, as a standby may be.
    moved, server = start_server(), start_server()
    replace_file(file, f"{server.control}\n")
    watch = Watch(parse_servers(f"file:{file}"), interval_seconds=0.05)
    history = watch.history

    def has(words: str) -> None:
        wait_until(lambda: words in f"{history.to_json()}", what=words)

    watch.start()
    has("no run yet")
    for name in ("a", "b", "c"):
        with make_client(server.data, worker_id=name, run_id="run") as client:
            client.push(gradients_like(small_model(), seed=0))
    has("c finished")
    server.stop()
    has("no server answers on")
    with make_client(moved.data, worker_id="w-7") as client:
        client.push(gradients_like(small_model(), seed=0))
        replace_file(file, f"{moved.control}\n")
        has("answers again")
        # Events of another server, which numbers them from 1, and the steps.
        has("w-7 joined")
        wait_until(lambda: history.steps and history.rows, what="its step and a row")
    watch.close()


@pytest.mark.parametrize("ends_by", ["q", "SIGINT"])
def test_the_charts_of_a_run_are_drawn_in_a_terminal_until_it_is_told_to_end(start_server, ends_by):
    terminal, end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 32, 130, 0, 0))
    command = [sys.executable, "-m", "pyps", "top", "--servers", start_server().control]
    environment = child_environment({"TERM": "xterm-256color"})
    shown, seen = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment), b""
    os.close(end)
    while b"no run yet: a worker starts it." not in seen:
        seen += os.read(terminal, 1 << 16)
    if ends_by == "q":
        os.write(terminal, b"xq")
    else:
        shown.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        # Until the program has closed its end.
        while True:
            seen += os.read(terminal, 1 << 16)
    assert shown.wait(30) == 0 and b"Traceback" not in seen
    os.close(terminal)


def test_steps_that_a_look_had_no_room_for_are_counted(start_server, monkeypatch):
    for module in (asking, answers):
        monkeypatch.setattr(module, "ACTIVITY_MAX", 3)
    server = start_server("--protocol=async")
    history, asked = History([server.control]), Asked()
    with WireWorker(server.data, "w") as worker, Control(server.control, token="") as control:
        worker.join()

        def num_listed() -> int:
            return len(control.call("ListActivity", pb.ListActivityRequest(limit=100)).activities)

        def look_after(num_steps: int) -> tuple[int, int]:
            expected = num_listed() + num_steps
            for _ in range(num_steps):
                worker.push(worker.push_request(1.0))
            wait_until(lambda: num_listed() == expected, what="its steps")
            history.take(server.control, asked.answer(control, server.control))
            return len(history.steps), history.to_json()["skipped"]

        # The first look needs no more than the newest, and one that lags goes on with them.
        assert [look_after(steps) for steps in (5, 2, 3, 8, 3)] == [(3, 0), (5, 0), (8, 0), (11, 5), (14, 5)]


def test_asking_a_server_costs_it_less_than_a_hundredth_of_a_core(start_server_process):
    server = start_server_process()
    workers = [WireWorker(server.data, f"worker-{index}") for index in range(4)]
    for worker in workers:
        worker.join()
        worker.push(worker.push_request(1.0))
        worker.channel.close()
    process, asked = psutil.Process(server.pid), Asked()

    def cost_of(rounds: int) -> float:
        before = process.cpu_times()
        for _ in range(rounds):
            asked.answer(control, server.control)
        after = process.cpu_times()
        return float(after.user + after.system - before.user - before.system) / rounds

    with Control(server.control, token="") as control:
        cost_of(5)
        # It is asked once a second. Other programs of this machine make some rounds more expensive.
        assert min(cost_of(20) for _ in range(5)) < 0.01
