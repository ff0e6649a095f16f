"""The queries of docker/observe read metrics that a training server has; Grafana accepts the dashboard."""

import re
import urllib.request
from collections import defaultdict
from itertools import product

from prometheus_client.parser import text_string_to_metric_families

from client_support import gradients_like, make_client, small_model
from observed import BOARD, FOLDER, RULES, labels_grouped_by, panel_queries, selectors
from support import ROOT, wait_until, workers_of

COMPOSE = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
# What a scrape adds.
SCRAPED = {"job": "pyps", "instance": "server-0:7612"}


def test_every_query_reads_metrics_of_a_training_server(start_server, tmp_path):
    server = start_server("--checkpoint-dir", str(tmp_path), "--heartbeat-seconds", "0.2")
    with make_client(server.data, worker_id="a") as a, make_client(server.data, worker_id="b") as b:
        for worker in (a, b):
            worker.push(gradients_like(small_model(), 0))
            worker.report(loss=0.5)
        wait_until(lambda: all(w.scalars for w in workers_of(server.control).values()), what="both reports")
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=20) as reply:
            page = reply.read().decode()
    # The labels of each sample, by its name.
    samples: dict[str, list[dict[str, str]]] = defaultdict(list, up=[SCRAPED])
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[sample.name].append(SCRAPED | sample.labels)
    for query in [*(rule.expr for rule in RULES), *panel_queries()]:
        assert selectors(query), query
        for metric, matchers in selectors(query):
            wanted = [operator != "!=" for _, operator, _ in matchers]
            met = [
                [bool(re.fullmatch(value, labels[name])) for name, _, value in matchers] for labels in samples[metric]
            ]
            assert wanted in met, (query, metric)
        known = {name for metric, _ in selectors(query) for labels in samples[metric] for name in labels}
        assert labels_grouped_by(query) <= known, query


def test_the_dashboard_is_as_grafana_expects_it():
    panels = BOARD["panels"]
    assert BOARD["uid"] and BOARD["title"] and BOARD["schemaVersion"] and "id" not in BOARD
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    variables = {variable["name"]: variable["query"] for variable in BOARD["templating"]["list"]}
    assert variables == {"datasource": "prometheus", "job": "label_values(pyps_info, job)"}
    cells = set()
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] in ("stat", "timeseries", "heatmap")
        for target in panel["targets"]:
            named, left = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])), labels_grouped_by(target["expr"])
            assert named <= (left or set(SCRAPED)) and (named or left <= {"le"}), panel["title"]
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        cells |= set(product(range(x, min(x + w, 24)), range(y, y + h)))
    # None lies over another, or over the edge.
    assert len(cells) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)


def test_compose_mounts_what_is_there_where_it_is_looked_for():
    mounts = dict(re.findall(r"- \./(observe/\S+):(/etc/\S+):ro", COMPOSE))
    assert {ROOT / "docker" / path for path in mounts} == {path for path in FOLDER.rglob("*") if path.is_file()}
    [folder] = re.findall(r"path: (\S+)\}", (FOLDER / "grafana" / "dashboards.yaml").read_text(encoding="utf-8"))
    assert mounts["observe/grafana/pyps.json"] == f"{folder}/pyps.json"
    for kind in ("datasources", "dashboards"):
        assert mounts[f"observe/grafana/{kind}.yaml"] == f"/etc/grafana/provisioning/{kind}/pyps.yaml"
    # Nobody on the network can look on but by this machine.
    assert re.findall(r"ports: \[\"(.*?)\"\]", COMPOSE) == ["127.0.0.1:9090:9090", "127.0.0.1:3000:3000"]
