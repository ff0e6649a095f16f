"""How long the path of one gradient is, which ARCHITECTURE.md tells: calls and files of a step, calls of a round."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from scripts import weight

ROUNDS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[weight.Server]:
    with weight.started() as server:
        yield server


# The most calls of a step, the files that they may be in, and the most calls of a round.
@pytest.mark.parametrize("transport", weight.TRANSPORTS.values())
@pytest.mark.parametrize(("overlap", "calls_max", "files_max"), [("off", 70, 14), ("step", 110, 18)])
def test_the_path_of_a_gradient_is_short(
    server: weight.Server, transport: str, overlap: Literal["off", "step"], calls_max: int, files_max: int
) -> None:
    counted: dict[str, dict[str, Any]] = weight.steps_of(server, transport, ROUNDS, overlap=overlap)

    worker = counted["client"]
    assert 20 < worker["calls"] <= calls_max, worker["functions"]
    assert len(worker["files"]) <= files_max, worker["files"]
    assert counted["server"]["calls"] <= 60, counted["server"]["functions"]
