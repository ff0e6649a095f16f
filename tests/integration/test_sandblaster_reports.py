"""What a coordinator reads of server 0, while server 0 comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps.cli.coordination.link import Link
from pyps.cli.coordination.reports import Reports
from pyps_client.launch import Launch
from pyps_wire.errors import ServerUnavailable
from support import ServerProcess, wait_until

StartServer = Callable[..., ServerProcess]
READINGS = [Reports.work, Reports.num_workers]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("read", READINGS)
def test_a_server_that_is_briefly_gone_is_waited_for(
    start_server_process: StartServer,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    read: Callable[[Reports], object],
) -> None:
    server = start_server_process("--run-id", "blast")
    with Link(Launch(servers=(server.data,), worker_id="coordinator")) as link:
        reports = Reports(link)
        before = read(reports)
        server.kill()

        reading = pool.submit(read, reports)
        wait_until(lambda: reading.done() or "waiting for server 0" in caplog.text, what="a word of waiting")
        assert not reading.done(), reading.exception()
        # Its control port is another one this time.
        start_server_process("--run-id", "blast", "--port", server.data.rpartition(":")[2])

        assert reading.result(60.0) == before


def test_a_server_that_stays_away_ends_the_reading_in_one_sentence(start_server_process: StartServer) -> None:
    server = start_server_process("--run-id", "blast")
    launch = Launch(servers=(server.data,), worker_id="coordinator", loss_wait_seconds=0.2)
    server.kill()
    with (
        Link(launch) as link,
        pytest.raises(ServerUnavailable, match=r"^Waited \d+ s for server 0 .*loss_wait_seconds"),
    ):
        Reports(link).work()
