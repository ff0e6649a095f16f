"""`pyps demo` under protocols and optimizers other than its own: real workers on real images learn what they should."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support import PythonProcess

# A barrier, one that leaves out the slowest, and one whose pushes are sums; each with another optimizer.
MODES = {"hardsync": "momentum", "backup:b=1": "adam", "asgd:mutex=shard,accumulate=2": "sgd"}
# Three quarters of the demo's own.
EPOCHS = "30"


@pytest.mark.parametrize("protocol", MODES)
def test_the_demo_learns_under_other_protocols(
    start_python: Callable[..., PythonProcess], tmp_path: Path, protocol: str
) -> None:
    optimizer = MODES[protocol]
    flags = ("--protocol", protocol, "--optimizer", optimizer, "--epochs", EPOCHS)

    demo = start_python("-m", "pyps", "demo", *flags, "--picture", str(tmp_path / "demo.png"))

    assert demo.wait(250) == 0, demo.output()
    output = demo.output()
    assert f": {protocol}, staleness divide, {optimizer}." in output
    assert re.search(r"Held-out accuracy (0\.9[5-9]|1\.0)\d* after \d+ updates", output), output
