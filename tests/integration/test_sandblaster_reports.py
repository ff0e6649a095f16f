"""What a coordinator reads of server 0, while server 0 comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps.cli.coordination.link import Link
from pyps.cli.coordination.reports import Reports
from pyps.launcher.ports import free_port
from pyps_client.launch import Launch
from pyps_wire.errors import ServerUnavailable
from support import ServerThread, wait_until

StartServer = Callable[..., ServerThread]


@pytest.mark.parametrize("read", [Reports.work, Reports.num_workers])
def test_a_server_that_is_briefly_gone_is_waited_for(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, read: Callable[[Reports], object]
) -> None:
    port = str(free_port())
    server = start_server("--run-id", "blast", "--port", port)
    link = Link(Launch(servers=(server.data,), worker_id="coordinator"))
    with ThreadPoolExecutor(1) as pool, link:
        reports = Reports(link)
        before = read(reports)
        server.stop()

        reading = pool.submit(read, reports)
        wait_until(lambda: reading.done() or "waiting for server 0" in caplog.text, what="a word of waiting")
        assert not reading.done(), reading.exception()
        # Its control port is another one this time.
        start_server("--run-id", "blast", "--port", port)

        assert reading.result(60.0) == before


def test_a_server_that_stays_away_ends_the_reading_in_one_sentence(start_server: StartServer) -> None:
    server = start_server("--run-id", "blast")
    launch = Launch(servers=(server.data,), worker_id="coordinator", loss_wait_seconds=0.2)
    server.stop()
    with (
        Link(launch) as link,
        pytest.raises(ServerUnavailable, match=r"^Waited \d+ s for server 0 .*loss_wait_seconds"),
    ):
        Reports(link).work()
