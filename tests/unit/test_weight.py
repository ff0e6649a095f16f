"""How long the path of one gradient is, which ARCHITECTURE.md tells: calls and files of a step, calls of a round."""

import re
from typing import Any, Literal

import pytest

from scripts import weight

OVERLAPS: tuple[Literal["off", "step"], ...] = ("off", "step")


@pytest.fixture(scope="module")
def counted() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """What each side counted of a step, by transport and overlap."""
    with weight.started() as server:
        return {
            (transport, overlap): weight.steps_of(server, transport, 30, overlap=overlap)
            for transport in weight.TRANSPORTS.values()
            for overlap in OVERLAPS
        }


@pytest.mark.parametrize("transport", weight.TRANSPORTS.values())
@pytest.mark.parametrize(("overlap", "calls_max", "files_max"), [("off", 70, 15), ("step", 110, 18)])
def test_the_path_of_a_gradient_is_short(
    counted: dict[tuple[str, str], Any], transport: str, overlap: str, calls_max: int, files_max: int
) -> None:
    worker, server = counted[transport, overlap]["client"], counted[transport, overlap]["server"]

    assert 20 < worker["calls"] <= calls_max, worker["functions"]
    assert len(worker["files"]) <= files_max, worker["files"]
    if overlap == "off":
        # Else it depends on time how many minibatches a push holds, and what falls to one of them.
        assert server["calls"] <= 60, server["functions"]


def test_architecture_tells_the_path_as_it_is(counted: dict[tuple[str, str], Any]) -> None:
    page = (weight.ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The path of one gradient\n")[2].partition("\n## ")[0]
    steps = "".join(re.findall(r"^ ?\d+\. .*\n(?:   .*\n)*", section, re.M))
    called = {
        name.partition(":")[2] for each in counted.values() for side in each.values() for name in side["functions"]
    }
    members = {name.rpartition(".")[2] for name in called}

    told = re.findall(r"`([A-Z]\w+\.\w+|_\w+)`", steps)
    assert len(told) > 50
    assert [name for name in told if name not in (called if "." in name else members)] == []
    # Every file of a step that waits for its push.
    files = {file for (_, overlap), each in counted.items() if overlap == "off" for file in each["client"]["files"]}
    named = set(re.findall(r"`([\w/]+\.py)`", steps))
    assert [file for file in files if not any(file.endswith(f"/{name}") for name in named)] == []
