import math

import pytest

from client_support import gradients_like, make_client, small_model
from pyps_client import InvalidArgument, Launch, Observer
from support import server_port, shell, wait_until


def test_an_observer_gets_the_figures_of_all_servers_and_workers(start_server):
    servers = [start_server("--heartbeat-seconds", "0.2") for _ in range(2)]
    addresses = ",".join(server.data for server in servers)
    a, b = (make_client(addresses, worker_id=name, run_id="mine", shard_size=256) for name in ("a", "b"))
    with a, b, Observer(addresses) as observer:
        figures = observer.figures(every_seconds=0)
        update, first = next(figures)
        assert (update, first["updates"], first["workers"]) == (0, 0, 2)
        for client, loss in 3 * ((a, 0.5), (b, 1.5)):
            client.push(gradients_like(small_model(), 0))
            client.report(loss=loss, updates=float("nan"))
        wait_until(lambda: "loss/a" in next(figures)[1] and "loss/b" in next(figures)[1], what="both reports")
        update, now = next(figures)
    assert update == now["updates"] == 6
    assert (now["loss"], now["loss/a"], now["loss/b"]) == (1.0, 0.5, 1.5)
    assert (now["learning_rate/0"], now["refused"]) == (pytest.approx(0.05), 0)


def test_means_and_speeds_are_of_the_time_since_the_look_before(start_server):
    with make_client(start_server().data) as client, Observer(client.session.launch.servers) as observer:
        figures = observer.figures(every_seconds=0)
        client.push(gradients_like(small_model(), 0))
        assert "staleness" not in next(figures)[1]
        # Without a pull: gradients 1, 2 and 3 updates old, of which the policy divides the step by as much.
        for step in range(3):
            client.push(gradients_like(small_model(), step))
        now = next(figures)[1]
        assert (now["staleness"], now["step_lost"]) == (pytest.approx(2), pytest.approx(1 - (1 + 1 / 2 + 1 / 3) / 3))
        assert now["updates_per_second"] > 0


def test_the_figures_go_on_after_a_server_came_back_and_end_with_the_run(start_server, tmp_path):
    flags = ("--port", str(server_port()), "--checkpoint-dir", str(tmp_path), "--run-id", "mine")
    server = start_server(*flags)
    with make_client(server.data, run_id="mine") as client, Observer(server.data) as observer:
        client.push(gradients_like(small_model(), 0))
        figures = observer.figures(every_seconds=0)
        assert next(figures)[0] == 1
        server.stop()
        server = start_server(*flags, "--resume")
        assert next(figures)[0] == 1
        shell("stop", "--servers", server.control)
        assert len(list(figures)) == 1


def test_the_figures_end_where_a_server_stays_away(start_server):
    server = start_server()
    with make_client(server.data), Observer(launch=Launch(server.data, loss_wait_seconds=0.2)) as observer:
        figures = observer.figures(every_seconds=0)
        next(figures)
        server.stop()
        assert list(figures) == []
        for seconds in (-1.0, math.nan, math.inf):
            with pytest.raises(InvalidArgument, match=r"every_seconds is .*expected the seconds of a pause"):
                observer.figures(seconds)
