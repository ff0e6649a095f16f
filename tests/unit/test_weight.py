"""The length of a gradient's path, which ARCHITECTURE.md lists: calls and files of a step, calls of a round."""

import re
from typing import Any, Literal

import pytest

from scripts import weight

# Calls of a worker's step and of the server's round at most. With overlap the number of minibatches a push holds
# depends on time, and with it the server's calls.
LIMITS: dict[tuple[str, Literal["off", "step"]], tuple[int, int | None]] = {
    ("grpc", "off"): (67, 62),
    ("shm", "off"): (60, 60),
    ("tcp", "off"): (70, 62),
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
def test_the_path_of_a_gradient_is_short(counted, transport, overlap):
    worker, server = counted[transport, overlap]["client"], counted[transport, overlap]["server"]
    worker_max, server_max = LIMITS[transport, overlap]

    assert 20 < worker["calls"] <= worker_max, worker["functions"]
    assert len(worker["files"]) <= FILES_MAX[overlap], worker["files"]
    assert server_max is None or server["calls"] <= server_max, server["functions"]


def test_architecture_lists_the_path_as_it_is(counted):
    page = (weight.ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The path of a gradient\n")[2].partition("\n### ")[0]
    stations = "".join(re.findall(r"^ ?\d+\. .*\n(?:   .*\n)*", section, re.M))
    files = {file for key in counted if key[1] == "off" for side in counted[key].values() for file in side["files"]}

    listed = set(re.findall(r"`([\w/]+\.py)`", stations))
    assert len(listed) > 30
    assert [file for file in files if not any(file.endswith(f"/{name}") for name in listed)] == []
    # Nor is anything listed that no step uses.
    assert [name for name in listed if not any(file.endswith(f"/{name}") for file in files)] == []
