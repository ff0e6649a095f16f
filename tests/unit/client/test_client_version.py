"""The version that the client tells servers is the one that it is released under."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pyps_client

ROOT = Path(__file__).resolve().parents[3]


def test_the_client_tells_its_own_version() -> None:
    project = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]

    assert pyps_client.__version__ == project["version"]
