"""docker/observe under the real Prometheus: it scrapes by mutual TLS, every query has an answer, alerts fire."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client_support import gradients_like, make_client, small_model
from environments import run
from observed import FOLDER, RULES, panel_queries
from pyps.certificates import Authority
from pyps_client import ServerUnavailable
from support import ROOT, ServerThread, Start, server_port, shell, wait_until

PROGRAMS = ("prometheus", "promtool")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed (apt-get install prometheus): {MISSING}")

PAGE = (ROOT / "docs" / "observe.md").read_text(encoding="utf-8")
BLOCKS = "".join(PAGE.split("```")[1::2])
UP, CERTIFY, CHECK, CURL = (line.strip() for line in BLOCKS.splitlines() if line.strip())
PORT = server_port()

SERVER = 'job="pyps", instance="s"'
TRAINS = 'pyps_run_state{state="ready"} 1x60; pyps_workers{state="alive"} 4x60'
# What each alert is about, a sample a minute: it fires before the hour is over.
TROUBLES = {
    "PypsServerDown": "up 1x30 0x30",
    "PypsRunStalled": "pyps_last_update_timestamp_seconds 60x60",
    "PypsWorkersLost": 'pyps_workers{state="expired"} 0x55 1x5',
    "PypsWorkersMissing": "pyps_workers_missing 0x40 2x20",
    "PypsStepSizeLost": "pyps_rate_scale_sum 0+1x60; pyps_rate_scale_count 0+20x60",
    "PypsStalenessHigh": "pyps_staleness_sum 0+340x60; pyps_staleness_count 0+20x60",
    "PypsGradientsRefused": 'pyps_pushes_rejected_total{reason="stale"} 0+3x60; pyps_pushes_total 0+20x60',
    "PypsGradientsNotFinite": 'pyps_pushes_rejected_total{reason="not_finite"} 0x55 1x5',
    "PypsLossNotFinite": 'pyps_worker_report{worker="w", figure="loss"} 0.5x40' + " NaN" * 20,
    "PypsCheckpointFailed": "pyps_checkpoint_failures_total 0x50 1x10",
    "PypsCheckpointOld": "pyps_checkpoint_timestamp_seconds 1000x60",
    "PypsMemoryNearLimit": 'pyps_memory_bytes{kind="in_flight"} 95x60; pyps_in_flight_bytes_max 100x60',
    "PypsRepliesSlow": 'pyps_apply_seconds_bucket{le="0.5"} 0+90x60; pyps_apply_seconds_bucket{le="1.0"} 0+100x60; '
    'pyps_apply_seconds_bucket{le="+Inf"} 0+100x60',
}
# Labels of an alert in addition to those that all have.
LABELS = {"PypsGradientsNotFinite": {"reason": "not_finite"}, "PypsLossNotFinite": {"worker": "w", "figure": "loss"}}
# The same where all is well.
HEALTHY = f"""{TRAINS}; up 1x60; pyps_last_update_timestamp_seconds 0+60x60; pyps_workers{{state="expired"}} 0x60;
pyps_workers_missing 0x60; pyps_rate_scale_sum 0+8x60; pyps_rate_scale_count 0+20x60; pyps_staleness_sum 0+60x60;
pyps_staleness_count 0+20x60; pyps_pushes_rejected_total{{reason="stale"}} 0x60; pyps_pushes_total 0+20x60;
pyps_pushes_rejected_total{{reason="not_finite"}} 0x60; pyps_worker_report{{worker="w", figure="loss"}} 0.5x60;
pyps_checkpoint_failures_total 0x60; pyps_checkpoint_timestamp_seconds 0+60x60; pyps_in_flight_bytes_max 100x60;
pyps_memory_bytes{{kind="in_flight"}} 50x60; pyps_apply_seconds_bucket{{le="0.5"}} 0+100x60;
pyps_apply_seconds_bucket{{le="+Inf"}} 0+100x60"""
# Down for most of the hour, but it had said before that it was done.
DONE = 'up 1x20 0x40; pyps_run_state{state="finished"} 0x15 1x5 _x40'


def test_each_alert_fires_at_its_trouble_and_at_nothing_else(tmp_path):
    assert set(TROUBLES) == {rule.name for rule in RULES}
    tests = [_case(HEALTHY, *TROUBLES), _case(DONE, "PypsServerDown")]
    for rule in RULES:
        labels = {"job": "pyps", "instance": "s", "severity": rule.severity} | LABELS.get(rule.name, {})
        summary = rule.summary.replace("{{ $labels.instance }}", "s").replace("{{ $labels.worker }}", "w")
        fires = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
        tests.append(_case(f"{TRAINS}; {TROUBLES[rule.name]}", rule.name, fires=[fires]))
    groups = {"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.json").write_text(json.dumps(groups), encoding="utf-8")
    assert "SUCCESS" in run("promtool", "test", "rules", str(tmp_path / "tests.json"))


def _case(text: str, *alerts: str, fires: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What promtool is to see of a server "s", and which of the alerts that is to set off."""
    series = []
    for each in text.split(";"):
        metric, braces, values = re.fullmatch(r"(\w+)(?:\{(.*)\})? (.+)", each.strip()).groups()  # type: ignore[union-attr]
        name = f"{metric}{{{', '.join(filter(None, (SERVER, braces)))}}}"
        series.append({"series": name, "values": values})
    looks = [{"alertname": name, "eval_time": "58m", "exp_alerts": list(fires)} for name in alerts]
    return {"interval": "1m", "input_series": series, "alert_rule_test": looks}


def test_the_page_s_commands_run_and_it_tells_of_every_alert():
    assert re.findall(r"^\* \*\*`(Pyps\w+)`\*\*:", PAGE, re.M) == list(TROUBLES)
    assert "SUCCESS" in run(*shlex.split(CHECK))
    # Images cannot be had everywhere; whether compose takes the file and the profile is seen where one is installed.
    arguments = UP.partition("docker compose ")[2].removesuffix(" up --build")
    if shutil.which("docker-compose"):
        services = run("docker-compose", *shlex.split(arguments), "config", "--services").split()
        assert {"prometheus", "grafana", "server-0"} <= set(services)


@pytest.fixture
def servers(start_server: Start, tmp_path: Path) -> Iterator[list[ServerThread]]:
    """Two servers that two workers train with, all by mutual TLS and tokens, with the files that compose makes."""
    authority = Authority(tmp_path, create=True)
    authority.make_server(["127.0.0.1"], days=1)
    authority.make_worker("worker", days=1)
    shell(*shlex.split(CERTIFY)[1:], "--folder", str(tmp_path))
    for end in ("crt", "key"):
        shutil.copy(tmp_path / f"prometheus.{end}", tmp_path / f"tls.{end}")
    for role in ("worker", "observer"):
        (tmp_path / f"{role}.token").write_text(f"the-token-of-{role}s", encoding="utf-8")
    flags = f"--tls-cert {tmp_path}/server.crt --tls-key {tmp_path}/server.key --tls-client-ca {tmp_path}/ca.crt"
    flags += f" --token-file {tmp_path}/worker.token --observer-token-file {tmp_path}/observer.token"
    flags += f" --heartbeat-seconds 0.5 --checkpoint-dir {tmp_path}/saved-"
    both = [start_server(*f"{flags}{index}".split()) for index in range(2)]
    shown = {"tls_ca": "ca.crt", "tls_cert": "worker.crt", "tls_key": "worker.key", "token_file": "worker.token"}
    settings: dict[str, Any] = {name: str(tmp_path / file) for name, file in shown.items()}
    settings |= {"run_id": "mine", "shard_size": 256, "loss_wait_seconds": 0.5}
    over = threading.Event()

    def train(name: str) -> None:
        # The test ends a server before its workers.
        addresses = ",".join(server.data for server in both)
        with contextlib.suppress(ServerUnavailable), make_client(addresses, worker_id=name, **settings) as client:
            client.report(loss=0.5)
            while not over.wait(0.1):
                client.exchange(gradients_like(small_model(), 0))

    with ThreadPoolExecutor() as workers, contextlib.ExitStack() as stack:
        stack.callback(over.set)
        training = [workers.submit(train, name) for name in ("a", "b")]
        yield both
    assert all(future.result() is None for future in training)


@pytest.fixture
def api(servers: list[ServerThread], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Call the API of the real program, with its real configuration but for addresses, paths and intervals."""
    text = (FOLDER / "prometheus.yaml").read_text(encoding="utf-8")
    for ours, here in (
        ("/keys/", f"{tmp_path}/"),
        ("interval: 5s", "interval: 1s"),
        ('["server-0:7612", "server-1:7612"]', json.dumps([server.metrics for server in servers])),
    ):
        assert ours in text
        text = text.replace(ours, here)
    shutil.copy(FOLDER / "alerts.yaml", tmp_path)
    (tmp_path / "prometheus.yaml").write_text(text, encoding="utf-8")
    run("promtool", "check", "config", str(tmp_path / "prometheus.yaml"))
    flags = ("--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{PORT}")
    with (tmp_path / "log").open("wb") as log:
        program = subprocess.Popen(["prometheus", *flags], cwd=tmp_path, stdout=log, stderr=log)

    def answer(call: str, **query: str) -> Any:
        assert program.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
        try:
            url = f"http://127.0.0.1:{PORT}/api/v1/{call}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=20) as reply:
                data = json.load(reply)["data"]
                return data["result"] if call == "query" else data
        except (ConnectionError, urllib.error.URLError) as error:
            # 503 before it is ready; any other answer is to a query that it does not take.
            assert getattr(error, "code", 503) == 503, (query, error)

    yield answer
    program.terminate()
    program.wait(20)


def test_prometheus_scrapes_and_answers(servers, api, tmp_path):
    wait_until(lambda: api("query", query="sum(up) == 2"), what="a scrape of both")
    for query in [*panel_queries(window="10s"), *(rule.without_threshold for rule in RULES)]:
        wait_until(lambda query=query: api("query", query=query), what=f"an answer to {query}")

    def loaded() -> list[dict[str, Any]]:
        return [rule for group in api("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: {rule["health"] for rule in loaded()} == {"ok"}, what="a look by all rules")
    assert [(rule["name"], rule["state"] == "firing") for rule in loaded()] == [(name, False) for name in TROUBLES]
    page = run("bash", "-c", f"cd {tmp_path} && {CURL.replace('HOST:7612', servers[0].metrics)} --silent --fail")
    assert 'pyps_worker_report{figure="loss",worker="a"} 0.5' in page
    # The alert names a server that died.
    servers[1].stop()
    [down] = wait_until(lambda: api("query", query='ALERTS{alertname="PypsServerDown"}'), what="the alert")
    assert down["metric"]["instance"] == servers[1].metrics
