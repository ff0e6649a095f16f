"""The length of a gradient's path, which ARCHITECTURE.md lists: calls and files of a step, calls of a round."""

import re
from typing import Any, Literal

import pytest

from scripts import weight

# Calls of a worker's step and of the server's round at most. With overlap the number of minibatches a push holds
# depends on time, and with it the server's calls.
LIMITS: dict[tuple[str, Literal["off", "step"]], tuple[int, int | None]] = {
    ("grpc", "off"): (70, 60),
    ("shm", "off"): (70, 60),
    ("tcp", "off"): (76, 84),
    ("grpc", "step"): (110, None),
    ("shm", "step"): (110, None),
    ("tcp", "step"): (110, None),
}
FILES_MAX = {"off": 15, "step": 18}


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the reports of both sides by transport and overlap."""
    with weight.started() as server:
        return {key: weight.steps_of(server, key[0], 30, overlap=key[1]) for key in LIMITS}


@pytest.mark.parametrize(("transport", "overlap"), LIMITS)
def test_the_path_of_a_gradient_is_short(
    counted: dict[tuple[str, str], Any], transport: str, overlap: Literal["off", "step"]
) -> None:
    worker, server = counted[transport, overlap]["client"], counted[transport, overlap]["server"]
    worker_max, server_max = LIMITS[transport, overlap]

    assert 20 < worker["calls"] <= worker_max, worker["functions"]
    assert len(worker["files"]) <= FILES_MAX[overlap], worker["files"]
    assert server_max is None or server["calls"] <= server_max, server["functions"]


def test_architecture_lists_the_path_as_it_is(counted: dict[tuple[str, str], Any]) -> None:
    page = (weight.ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The path of one gradient\n")[2].partition("\n## ")[0]
    steps = "".join(re.findall(r"^ ?\d+\. .*\n(?:   .*\n)*", section, re.M))
    called = {
        name.partition(":")[2] for each in counted.values() for side in each.values() for name in side["functions"]
    }
    members = {name.rpartition(".")[2] for name in called}

    listed = re.findall(r"`([A-Z]\w+\.\w+|_\w+)`", steps)
    assert len(listed) > 50
    assert [name for name in listed if name not in (called if "." in name else members)] == []
    # Every file of a step without overlap; another paragraph tells of lanes.
    waiting = [counted[transport, "off"] for transport in ("grpc", "shm")]
    files = {file for each in waiting for file in each["client"]["files"]}
    named = set(re.findall(r"`([\w/]+\.py)`", steps))
    assert [file for file in files if not any(file.endswith(f"/{name}") for name in named)] == []
