"""What docker/observe holds: the alerts and the dashboard's queries, and what a query reads."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from support import ROOT

FOLDER = ROOT / "docker" / "observe"
BOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "pyps.json").read_text(encoding="utf-8"))
_ALERTS = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")


class Rule(NamedTuple):
    name: str
    expr: str
    severity: str
    summary: str

    @property
    def without_threshold(self) -> str:
        """A query with a value also where all is well: it has one only if all that it compares is there."""
        parts = re.split(r"(\{.*?\})", self.expr)
        parts[::2] = [re.sub(r" (==|!=|>|<)", r" \1 bool", part).replace(" unless ", " and ") for part in parts[::2]]
        return "".join(parts)


RULES = [
    Rule(*found)
    for found in re.findall(
        r"- alert: (\w+)\n +expr: (.+)\n(?: +for: \w+\n)? +labels: \{severity: (\w+)\}\n"
        r" +annotations: \{summary: \"(.+)\"\}\n",
        _ALERTS,
    )
]
assert len(RULES) == _ALERTS.count("- alert:")


def panel_queries(*, window: str = "1m") -> list[str]:
    """The dashboard's queries as Grafana sends them."""
    raw = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", window).replace("$job", "pyps") for query in raw]


def selectors(query: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The metrics that a query reads, each with what is asked of its labels: name, operator, value."""
    found = re.findall(r"\b(up|(?:pyps|process)_\w+)(?:\{(.*?)\})?", query)
    return [(metric, re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', braces)) for metric, braces in found]


def labels_grouped_by(query: str) -> set[str]:
    lists = re.findall(r"\b(?:by|on) \((.*?)\)", query)
    return {label.strip() for each in lists for label in each.split(",")}
