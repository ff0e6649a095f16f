import asyncio
import contextlib
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from client_support import make_client
from pyps.service import metrics
from pyps_wire.partition import Model, Tensor
from support import ServerThread, server_loop, shell, wait_until
from wire_worker import WireWorker

# So many shards that the page is longer than what lies between a server and a reader with small buffers.
LARGE = Model((Tensor("t", (1600,)),), shard_size=16)


KINDS = {
    "gauge": """
        pyps_info pyps_run_state pyps_epoch pyps_checkpoint_timestamp_seconds pyps_durable_version pyps_workers
        pyps_workers_by_transport pyps_workers_counted pyps_workers_missing pyps_batch_size pyps_learning_rate
        pyps_worker_report pyps_pending_gradients pyps_last_update_timestamp_seconds pyps_shards pyps_version_min
        pyps_version_max pyps_shard_version pyps_memory_bytes pyps_in_flight_bytes_max pyps_late_messages
        pyps_standby_events_behind
        process_resident_memory_bytes python_info
    """,
    "counter": """
        pyps_checkpoint_failures pyps_updates pyps_pushes pyps_payload_bytes pyps_pushes_rejected pyps_blocked_seconds
        pyps_worker_blocked_seconds
    """,
    "histogram": """
        pyps_staleness pyps_worker_staleness pyps_shard_staleness pyps_apply_seconds
    """,
    "summary": """
        pyps_rate_scale pyps_worker_rate_scale
    """,
}
FAMILIES = {name: kind for kind, names in KINDS.items() for name in names.split()}

MODEL = Model((Tensor("t", (32,)),), shard_size=16)
ASK = b"GET /metrics HTTP/1.0\r\n\r\n"
LOW_BOUNDS = ("0.0", "1.0", "2.0")


def scrape(server: ServerThread, token: str = "") -> dict[str, Metric]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{server.metrics}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return {family.name: family for family in text_string_to_metric_families(reply.read().decode())}


def value(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    samples = [sample for family in families.values() for sample in family.samples if sample.name == sample_name]
    (found,) = [sample.value for sample in samples if sample.labels == labels]
    return found


def test_every_family_is_there_from_the_start(start_server):
    families = scrape(start_server())
    assert {name: family.type for name, family in families.items() if name in FAMILIES} == FAMILIES
    assert value(families, "pyps_run_state", state="empty") == 1
    assert value(families, "pyps_last_update_timestamp_seconds") == 0


def test_the_page_counts_what_happened(start_server):
    server, began = start_server(), time.time()
    with WireWorker(server.data) as a, WireWorker(server.data, "b") as b:
        a.join()
        b.join()
        repeated = a.push_request(1.0)
        a.push(repeated, repeated, *(a.push_request(1.0) for _ in range(3)), a.push_request(float("inf")))
        b.leave()
        families = scrape(server)
    assert value(families, "pyps_updates_total") == 4
    counts = {"applied": 4, "pending": 0, "rejected": 1, "duplicate": 1}
    for outcome, count in counts.items():
        assert value(families, "pyps_pushes_total", outcome=outcome) == count
    assert value(families, "pyps_payload_bytes_total", direction="in") == 6 * 37 * 4
    assert [value(families, "pyps_staleness_bucket", le=bound) for bound in ("0.0", "1.0", "2.0", "4.0", "+Inf")] == [
        *(1, 2, 3, 4, 4)
    ]
    assert value(families, "pyps_staleness_sum") == 0 + 1 + 2 + 3
    assert value(families, "pyps_rate_scale_sum") == pytest.approx(1 + 1 + 1 / 2 + 1 / 3)
    assert value(families, "pyps_rate_scale_count") == 4
    assert value(families, "pyps_apply_seconds_count") == 6
    assert value(families, "pyps_workers", state="alive") == value(families, "pyps_workers", state="finished") == 1
    assert value(families, "pyps_shard_version", shard="0") == value(families, "pyps_version_max") == 4
    assert value(families, "pyps_memory_bytes", kind="parameters") == 148
    assert value(families, "pyps_memory_bytes", kind="ledger") > 0
    assert value(families, "pyps_memory_bytes", kind="first_parameters") == 0
    assert began <= value(families, "pyps_last_update_timestamp_seconds") <= time.time()
    info = families["pyps_info"].samples[0].labels
    assert (info["run_id"], info["protocol"], info["rule"]) == ("run-1", "async", "sgd")
    assert (info["staleness"], info["schedule"], info["warmup"]) == ("divide", "constant", "")


def test_each_worker_and_shard_has_its_own_histogram_and_losses(start_server):
    server = start_server()
    with WireWorker(server.data, model=MODEL) as a, WireWorker(server.data, "b", model=MODEL) as b:
        a.join()
        b.join()
        a.push(*(a.push_request(1.0, shard_id=shard_id) for shard_id in (0, 0, 0, 1)))
        b.push(b.push_request(1.0, shard_id=1), b.push_request(float("nan"), shard_id=1))
        families = scrape(server)
    for label, name, counts in (("shard", "0", (1, 2, 3)), ("shard", "1", (1, 2, 2)), ("worker", "b", (0, 1, 1))):
        buckets = [value(families, f"pyps_{label}_staleness_bucket", **{label: name}, le=le) for le in LOW_BOUNDS]
        assert tuple(buckets) == counts
    assert value(families, "pyps_worker_staleness_sum", worker="a") == 0 + 1 + 2 + 0
    assert value(families, "pyps_worker_rate_scale_sum", worker="a") == pytest.approx(1 + 1 + 1 / 2 + 1)
    assert value(families, "pyps_worker_rate_scale_count", worker="a") == 4
    assert value(families, "pyps_rate_scale_sum") == pytest.approx(1 + 1 + 1 / 2 + 1 + 1)
    assert value(families, "pyps_pushes_rejected_total", reason="not_finite") == 1
    assert value(families, "pyps_pushes_rejected_total", reason="dropped") == 0
    assert value(families, "pyps_learning_rate", group="0") == 1.0
    assert value(families, "pyps_workers_counted") == 2


def test_the_reports_of_live_workers_and_the_last_checkpoint_are_shown(start_server, tmp_path):
    began = time.time()
    server = start_server("--checkpoint-dir", str(tmp_path), "--heartbeat-seconds", "0.2")
    with make_client(server.data, worker_id="a") as a, make_client(server.data, worker_id="b") as b:
        a.report(loss=0.25)
        b.report(loss=float("nan"))
        wait_until(lambda: len(scrape(server)["pyps_worker_report"].samples) == 2, what="both reports")
        b.close()
        [sample] = scrape(server)["pyps_worker_report"].samples
    assert (sample.labels, sample.value) == ({"worker": "a", "figure": "loss"}, 0.25)
    started = value(scrape(server), "pyps_checkpoint_timestamp_seconds")
    shell("save", "--servers", server.control)
    assert began <= started < value(scrape(server), "pyps_checkpoint_timestamp_seconds") <= time.time()
    assert not scrape(start_server())["pyps_checkpoint_timestamp_seconds"].samples


def test_a_round_under_way_is_shown(start_server):
    server = start_server("--protocol", "hardsync", "--expected-workers", "2")
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        families = scrape(server)
    assert value(families, "pyps_pending_gradients") == 1
    assert value(families, "pyps_memory_bytes", kind="pending") == 148
    assert (value(families, "pyps_workers_counted"), value(families, "pyps_workers_missing")) == (1, 1)


def test_of_many_shards_the_extremes_are_shown(start_server):
    server = start_server()
    with WireWorker(server.data, model=Model((Tensor("t", (2016,)),), shard_size=16)) as worker:
        worker.join()
        worker.push(worker.push_request(1.0, shard_id=5))
        families = scrape(server)
    assert value(families, "pyps_shards") == 126
    assert not families["pyps_shard_version"].samples
    assert not families["pyps_shard_staleness"].samples
    assert (value(families, "pyps_version_min"), value(families, "pyps_version_max")) == (0, 1)


def test_slow_readers(start_server, monkeypatch, capfd):
    monkeypatch.setattr(metrics, "REQUEST_SECONDS", 0.3)
    server = start_server()
    with WireWorker(server.data, model=LARGE) as worker:
        worker.join()
        half, deaf, gone = (reader(server, says) for says in (b"GET /metrics HTTP/1.0\r\n", ASK, ASK))
        with half, deaf, gone:
            # Its page is on the way; how long the others stay is the clock's.
            assert gone.recv(1) == b"H"
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()
            assert half.recv(1) == b""
            assert deaf.recv(1) == b"H"
            wait_until(lambda: num_readers() == 0, what="the end of all readers")
        # Others have their time on a busy machine.
        monkeypatch.undo()
        assert value(scrape(server), "pyps_shards") == 100
    assert "Traceback" not in server.output() + "".join(capfd.readouterr())


def test_many_silent_readers_hold_no_threads_keep_nobody_out_and_do_not_delay_the_end(start_server):
    server = start_server()
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(3 * metrics.READERS_MAX):
            stack.enter_context(reader(server, b"GET"))
        assert value(scrape(server), "pyps_shards") == 0
        assert num_readers() <= metrics.READERS_MAX
        # The one that puts the pages together.
        assert threading.active_count() <= before + 1
        server.stop()
        wait_until(lambda: num_readers() == 0, what="the end of all readers")


def test_readers_that_come_all_at_once_are_closed_but_for_the_last(start_server):
    server, all_there = start_server(), threading.Event()
    with contextlib.ExitStack() as stack:
        # The server sees them together, as one that is busy would.
        server_loop().call_soon_threadsafe(all_there.wait, 20)
        readers = [stack.enter_context(reader(server, b"GET")) for _ in range(3 * metrics.READERS_MAX)]
        all_there.set()
        for connection in readers[: 2 * metrics.READERS_MAX]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def reader(server: ServerThread, says: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    host, port = server.metrics.split(":")
    connection.settimeout(20)
    connection.connect((host, int(port)))
    connection.sendall(says)
    return connection


def num_readers() -> int:
    return sum(task.get_name() == "metrics reader" for task in asyncio.all_tasks(server_loop()))


def test_a_server_with_a_token_requires_it_for_its_page(start_server, tmp_path):
    (tmp_path / "token").write_text("correct horse", encoding="utf-8")
    server = start_server("--token-file", str(tmp_path / "token"))
    for token in ("", "wrong horse"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(server, token)
        assert refused.value.code == 401
    assert value(scrape(server, "correct horse"), "pyps_updates_total") == 0
