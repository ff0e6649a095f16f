"""Waits for other workers that are disturbed: by losses, restarts, closing, and by nobody coming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_support import CuttingProxy, gradients_like, make_client, small_model
from inspection import inspect
from pyps_client import Client, RunFinished, WaitTimedOut
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, REASON_STALE
from support import ServerThread, wait_until

Start = Callable[..., ServerThread]
RATE = 0.05


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def client_of(address: str, worker_id: str, **options: Any) -> Client:
    """A client of the shared run under plain SGD."""
    return make_client(
        address, worker_id=worker_id, run_id="shared", optimizer=("sgd", {"learning_rate": RATE}), **options
    )


def step(client: Client, seed: int = 0) -> None:
    """One step of a worker."""
    client.pull()
    client.push(gradients_like(small_model(), seed), examples=1)


def bring_to_the_wait(protocol: str, quick: Client, slow: Client) -> None:
    """Takes both to where one would wait for the other, which may compute and has not pushed."""
    if protocol == "hardsync":
        # A barrier knows a worker from its first push.
        for client in (quick, slow, quick):
            step(client)
    slow.pull()
    if protocol != "serial":
        step(quick)


def park(
    pool: ThreadPoolExecutor, server: ServerThread, quick: Client, slow: Client, protocol: str = "hardsync"
) -> Future[Any]:
    """Lets one pull on a thread, where it has to wait for the other; returns once the server tells of the wait."""
    bring_to_the_wait(protocol, quick, slow)
    pulling = pool.submit(quick.pull)
    wait_until(lambda: pulling.done() or inspect(server.control, "GetStatus").waiting_for, what="the wait")
    assert not pulling.done(), pulling.result()
    return pulling


def test_a_lost_connection_does_not_end_the_wait_for_a_round(start_server: Start, pool: ThreadPoolExecutor) -> None:
    server = start_server("--protocol", "hardsync")
    proxy = CuttingProxy(server.data)
    with client_of(proxy.address, "quick") as quick, client_of(server.data, "slow") as slow:
        pulling = park(pool, server, quick, slow)

        proxy.cut()
        step(slow)

        assert pulling.result(30).keys() == small_model().keys()
        assert (proxy.num_cuts, quick.global_step) == (1, slow.global_step)
    proxy.close()


def test_a_lost_connection_neither_stops_the_turns_nor_lets_two_have_one(
    start_server: Start, pool: ThreadPoolExecutor
) -> None:
    """A question that nobody hears gives up its place; asked again, it is after those that came in between."""
    server = start_server("--protocol", "serial")
    proxy = CuttingProxy(server.data)

    def go_on(client: Client) -> set[tuple[int, int]]:
        seen = set()
        for seed in range(4):
            seen |= {
                (receipt.outcome, receipt.staleness) for receipt in client.push(gradients_like(small_model(), seed))
            }
            client.pull()
        client.close()
        return seen

    with client_of(server.data, "first") as first, client_of(proxy.address, "second") as second:
        pulling = park(pool, server, second, first, "serial")

        proxy.cut()

        first_goes = pool.submit(go_on, first)
        assert pulling.result(30).keys() == small_model().keys()
        assert go_on(second) == first_goes.result(30) == {(OUTCOME_APPLIED, 0)}
        assert proxy.num_cuts == 1
    proxy.close()


@pytest.mark.parametrize("protocol", ["hardsync", "serial", "ssp:s=0"])
def test_a_long_wait_asks_again_and_tells_of_whom_it_waits_for(
    start_server: Start,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
) -> None:
    monkeypatch.setattr("pyps_client.parking.PARK_SECONDS", 0.2)
    server = start_server("--protocol", protocol)
    with client_of(server.data, "quick") as quick, client_of(server.data, "slow") as slow:
        bring_to_the_wait(protocol, quick, slow)
        waiting = pool.submit(quick.pull)

        def told() -> list[str]:
            return [message for message in caplog.messages if "waiting for other workers" in message]

        wait_until(lambda: len(told()) >= 2, what="two lines on the wait")
        assert "slow" in told()[0], told()
        slow.push(gradients_like(small_model(), 1), examples=1)
        handed_on = pool.submit(slow.pull)
        assert waiting.result(30).keys() == small_model().keys()
        quick.close()
        handed_on.result(30)


def test_the_wait_ends_at_the_launchs_deadline_with_the_names(start_server: Start) -> None:
    server = start_server("--protocol", "serial")
    with client_of(server.data, "first") as first, client_of(server.data, "second", wait_seconds=0.5) as second:
        first.pull()

        with pytest.raises(WaitTimedOut, match=r"Waited . s for other workers: .*second.*first.*PYPS_WAIT_SECONDS"):
            second.pull()

        # The wait may be taken up again.
        first.close()
        assert second.pull().keys() == small_model().keys()


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
def test_closing_ends_a_wait_for_others(start_server: Start, pool: ThreadPoolExecutor, protocol: str) -> None:
    server = start_server("--protocol", protocol)
    with client_of(server.data, "slow") as slow, client_of(server.data, "quick") as quick:
        pulling = park(pool, server, quick, slow, protocol)

        quick.close()

        with pytest.raises(RunFinished, match="closed"):
            pulling.result(30)


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
def test_a_run_that_finishes_ends_the_waits_of_its_workers(
    start_server: Start, pool: ThreadPoolExecutor, protocol: str
) -> None:
    server = start_server("--protocol", protocol)
    with client_of(server.data, "slow") as slow, client_of(server.data, "quick") as quick:
        pulling = park(pool, server, quick, slow, protocol)

        inspect(server.control, "Stop")

        assert pulling.result(30).keys() == small_model().keys()
        with pytest.raises(RunFinished):
            for _ in range(2):
                quick.push(gradients_like(small_model(), 3))
        # Nothing is waited for in a finished run.
        assert quick.pull().keys() == small_model().keys()


def test_a_restart_from_a_checkpoint_ends_the_wait_for_a_round_of_the_epoch_before(
    start_server: Start, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    flags = ("--protocol", "hardsync", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    server = start_server(*flags)
    with client_of(server.data, "quick") as quick, client_of(server.data, "slow") as slow:
        pulling = park(pool, server, quick, slow)

        server.stop()
        start_server(*flags, "--resume", "--port", server.data.rsplit(":", 1)[1])

        pulling.result(60)
        assert quick.session.held_versions.epochs == (1,)
        slow.pull()
        for client in (slow, quick):
            client.push(gradients_like(small_model(), 5), examples=1)
        np.testing.assert_array_equal(quick.pull()["embed"], slow.pull()["embed"])


@pytest.mark.parametrize(("before", "after"), [("hardsync", "async"), ("serial", "async"), ("hardsync", "ssp:s=2")])
def test_a_change_of_protocol_ends_the_waits_of_the_one_before(
    start_server: Start, pool: ThreadPoolExecutor, before: str, after: str
) -> None:
    server = start_server("--protocol", before)
    with client_of(server.data, "slow") as slow, client_of(server.data, "quick") as quick:
        pulling = park(pool, server, quick, slow, before)

        inspect(server.control, "Configure", pb.ConfigureRequest(protocol=after))

        assert pulling.result(30).keys() == small_model().keys()


def test_64_workers_under_hardsync_complete_on_the_default_server(start_server: Start) -> None:
    num_workers, num_steps = 64, 3
    server = start_server("--protocol", "hardsync", "--expected-workers", f"{num_workers}")

    def work(index: int) -> set[int]:
        with client_of(server.data, f"worker-{index}", shard_size=4096) as client:
            for number in range(num_steps):
                step(client, seed=num_steps * index + number)
            client.pull()
            return set(client.session.held_versions.values())

    with ThreadPoolExecutor(num_workers) as workers:
        assert set().union(*workers.map(work, range(num_workers))) == {num_steps}


def test_two_workers_never_wait_for_each_other_at_two_shards(start_server: Start, pool: ThreadPoolExecutor) -> None:
    """Each is late at one shard and early at the other, as when both join while a round of the others ends."""
    server = start_server("--protocol", "hardsync")
    with client_of(server.data, "a", wait_seconds=20) as first, client_of(server.data, "b", wait_seconds=20) as second:
        for client in (first, second, first):
            step(client)
        vector = np.ones(5002, np.float32)
        for late_at, client in enumerate((first, second)):
            client.pull()
            base = client.session.held_versions
            base[late_at] -= 1
            receipts = client.session.push([vector], base_versions=base)
            assert receipts[late_at].reason == REASON_STALE
            assert receipts[1 - late_at].outcome == OUTCOME_PENDING

        def go_on(client: Client) -> None:
            for number in range(5):
                step(client, seed=number)
            client.close()

        for done in [pool.submit(go_on, client) for client in (first, second)]:
            done.result(60)
        assert first.refused["STALE"] == second.refused["STALE"] == 1
