"""`pyps coordinate` over real servers and workers: whatever is killed, the same bits come out."""

import re
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest

from pyps.cli.coordination.link import Link
from pyps_client import Client
from pyps_client.launch import Launch
from sandblaster import END_SECONDS, SandblasterJob, figures, planned_bytes, summary
from support import PythonProcess, ServerThread, Start, StartPython, server_port, wait_until

ITERATIONS = 6
PORTIONS = 8
FLAGS = ("--iterations", str(ITERATIONS), "--portions", str(PORTIONS))


@dataclass(frozen=True)
class Outcome:
    """What a job came to."""

    bits: str
    loss: float
    planned_bytes: int


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    with ExitStack() as stack:

        def start_server(*flags: str) -> ServerThread:
            server = ServerThread(*flags)
            stack.callback(server.stop)
            return server

        def start(*arguments: str, env: Mapping[str, str | None] | None = None) -> PythonProcess:
            return stack.enter_context(PythonProcess(*arguments, env=env))

        job = SandblasterJob(start_server, start, servers=2)
        job.hire()
        coordinator = job.coordinate(*FLAGS)
        ended = summary(coordinator)
        assert ended["iterations"] == ITERATIONS
        return Outcome(job.bits(), ended["loss"], planned_bytes(coordinator))


@pytest.fixture
def job(start_server: Start, start_python: StartPython) -> SandblasterJob:
    return SandblasterJob(start_server, start_python)


def test_one_worker_and_three_come_to_the_same_bits(job, outcome):
    job.hire(3)

    coordinator = job.coordinate(*FLAGS)

    assert summary(coordinator)["iterations"] == ITERATIONS
    assert job.bits() == outcome.bits
    losses = [line["loss"] for line in figures(coordinator)]
    assert losses == sorted(losses, reverse=True), "the loss falls from iteration to iteration"


def test_a_killed_coordinator_changes_no_bit(job, outcome, tmp_path):
    # A portion has two batches: amid the fifth pass.
    worker = job.hire(1, "--hold-at", str(4 * 2 * PORTIONS + 3), "--release", str(tmp_path / "go"))
    first = job.coordinate(*FLAGS)
    worker.wait_for_output("held", END_SECONDS)
    done = len(figures(first))
    assert 0 < done < ITERATIONS

    first.kill()
    (tmp_path / "go").touch()
    second = job.coordinate(*FLAGS)

    assert summary(second)["iterations"] == ITERATIONS
    assert [line["iteration"] for line in figures(second)][-1] == ITERATIONS
    assert figures(second)[0]["iteration"] == done + 1, "it goes on, and begins nothing again that was committed"
    assert job.bits() == outcome.bits


def test_a_killed_worker_changes_no_bit(start_server, start_python, outcome, tmp_path):
    leases = ("--heartbeat-seconds", "0.5", "--lease-seconds", "10")
    job = SandblasterJob(start_server, start_python, server_flags=leases)
    # Both are amid their first portions.
    job.hire(1, "--hold-at", "0", "--release", str(tmp_path / "go"))
    job.hire(1, "--hold-at", "0", "--release", str(tmp_path / "never"))
    # The portion of the one comes to the other only when it is dead: nobody computes copies.
    coordinator = job.coordinate(*FLAGS, "--copies", "1")
    for worker in job.workers:
        worker.wait_for_output("held", END_SECONDS)

    job.workers[1].kill()
    (tmp_path / "go").touch()

    assert summary(coordinator)["iterations"] == ITERATIONS
    assert job.bits() == outcome.bits
    assert job.work().lost >= 1


def test_groups_of_portions_come_to_the_same_loss_in_less_memory(job, outcome):
    job.hire(2)

    coordinator = job.coordinate(*FLAGS, "--fold", "group:k=3")

    ended = summary(coordinator)
    assert ended["iterations"] == ITERATIONS
    # The same sums, added in another order.
    assert ended["loss"] == pytest.approx(outcome.loss, rel=1e-5)
    assert planned_bytes(coordinator) < outcome.planned_bytes
    job.bits()


def test_a_plan_too_large_is_refused_with_one_that_fits(start_server, start_python):
    # For some 200 parameters: not room for 40 staged gradients beside 10 pairs.
    job = SandblasterJob(start_server, start_python, servers=1, server_flags=("--max-vector-bytes", "50000"))
    job.hire()
    job.wait_for_data()
    flags = {"--iterations": "1000", "--portions": "40"}

    refused = job.coordinate(*chain(*flags.items()))

    assert refused.wait() == 2
    message = refused.output()
    assert len(message.splitlines()) == 1
    assert "50000" in message
    for pattern in (r"--history \d+", r"--portions \d+", r"--fold group:k=\d+"):
        match = re.search(pattern, message)
        assert match is not None, message
        given = flags | dict([match[0].split()])
        tried = job.coordinate(*chain(*given.items()))
        # However far it gets: what does not fit is refused before the first pass.
        tried.wait_for_output('"iteration": ', END_SECONDS)
        tried.kill()


def test_the_older_of_two_coordinators_hears_of_it(job, outcome, tmp_path):
    worker = job.hire(1, "--hold-at", "20", "--release", str(tmp_path / "go"))
    older = job.coordinate(*FLAGS)
    worker.wait_for_output("held", END_SECONDS)

    newer = job.coordinate(*FLAGS)

    assert older.wait() == 3
    assert older.output().splitlines()[-1].startswith("pyps: another coordinator came after this one and goes on: ")
    (tmp_path / "go").touch()
    assert summary(newer)["iterations"] == ITERATIONS
    assert job.bits() == outcome.bits


def test_a_lost_server_ends_the_coordinator_in_one_sentence(job, tmp_path):
    worker = job.hire(1, "--hold-at", "20", "--release", str(tmp_path / "never"))
    coordinator = job.coordinate(*FLAGS, env={"PYPS_LOSS_WAIT_SECONDS": "1"})
    worker.wait_for_output("held", END_SECONDS)

    job.servers[1].stop()

    assert coordinator.wait() == 2
    told = coordinator.output().splitlines()[-1]
    assert re.match(r"pyps: Waited \d+ s for server 1 \(127\.0\.0\.1:\d+\): connection refused", told)
    assert "Traceback" not in coordinator.output()


def test_servers_that_come_back_from_their_checkpoints_are_taken_up_again(
    start_server_process, start_python, outcome, tmp_path
):
    job = SandblasterJob(start_server_process, start_python, checkpoints=tmp_path)
    worker = job.hire(1, "--hold-at", str(4 * 2 * PORTIONS + 3), "--release", str(tmp_path / "go"))
    coordinator = job.coordinate(*FLAGS, "--save-every", "1")
    worker.wait_for_output("held", END_SECONDS)

    for server in (1, 0):
        # The next one goes while the run is taken up again.
        job.revive(server)
        told = f"server {server} ({job.servers[server].data}) was restored from a checkpoint: resuming the run"
        coordinator.wait_for_output(told, END_SECONDS)
    (tmp_path / "go").touch()

    assert summary(coordinator)["iterations"] == ITERATIONS
    assert job.bits() == outcome.bits


def test_work_that_was_ended_goes_on_with_a_coordinator_and_then_workers(job, outcome):
    job.hire()
    fewer = ("--iterations", "2", *FLAGS[2:])
    assert summary(job.coordinate(*fewer))["iterations"] == 2
    job.bits()
    assert job.work().ended
    job.workers.clear()
    # One that has nothing to do waits for nobody.
    assert summary(job.coordinate(*fewer))["iterations"] == 2
    # One that has says so, and does not wait for ever.
    alone = job.coordinate(*FLAGS, env={"PYPS_START_WAIT_SECONDS": "1"})
    assert alone.wait() == 2
    told = alone.output().splitlines()[-1]
    assert re.fullmatch(r"pyps: waited \d+ s for workers, and none took a portion: start workers, or raise .*", told)

    coordinator = job.coordinate(*FLAGS)
    coordinator.wait_for_output("no worker is there, and this coordinator waits for one: start workers", END_SECONDS)
    assert not job.work().ended
    job.hire()

    assert summary(coordinator)["iterations"] == ITERATIONS
    assert job.bits() == outcome.bits


def test_an_interrupted_coordinator_says_how(start_server, start_python, tmp_path):
    job = SandblasterJob(start_server, start_python, servers=1)
    worker = job.hire(1, "--hold-at", "20", "--release", str(tmp_path / "never"))
    coordinator = job.coordinate(*FLAGS)
    worker.wait_for_output("held", END_SECONDS)

    coordinator.signal(signal.SIGINT)

    assert coordinator.wait() == 130
    assert coordinator.output().splitlines()[-1].startswith("pyps: interrupted; `pyps coordinate` goes on")


def test_a_coordinator_under_another_protocol_is_refused(start_server, start_python):
    server = start_server("--run-id", "other")
    with Client({"w": np.ones(4, np.float32)}, launch=Launch(server.data, run_id="other")) as client:
        client.pull()

    coordinator = start_python("-m", "pyps", "coordinate", "--servers", server.data)

    assert coordinator.wait() == 2
    assert "a coordinator needs 'sandblaster': start the servers with --protocol sandblaster" in coordinator.output()


def test_a_coordinator_without_workers_says_what_it_waited_for(start_server, start_python):
    job = SandblasterJob(start_server, start_python, servers=1)

    coordinator = job.coordinate(env={"PYPS_START_WAIT_SECONDS": "0.5"})

    assert coordinator.wait() == 2
    assert re.search(r"pyps: Waited \d s for the first parameters", coordinator.output())
    assert "Traceback" not in coordinator.output()


def test_a_coordinator_waits_for_a_briefly_lost_server(start_server, caplog):
    port = str(server_port())
    server = start_server("--run-id", "blast", "--port", port)
    link = Link(Launch(servers=(server.data,), worker_id="coordinator"))
    with ThreadPoolExecutor(1) as pool, link:
        before = link.work()
        server.stop()

        reading = pool.submit(link.work)
        wait_until(lambda: reading.done() or "waiting for server 0" in caplog.text, what="a word of waiting")
        assert not reading.done(), reading.exception()
        # Its control port is another one this time.
        start_server("--run-id", "blast", "--port", port)

        assert reading.result(60.0) == before
