"""Commands that tests run, a Docker engine, and fresh environments with other packages than this checkout's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

# The commands of one test end, or say that they do not, before pytest ends it.
COMMAND_SECONDS = 240.0


def completed(*command: str, folder: Path = ROOT, seconds: float = COMMAND_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command, with this Python's programs first."""
    # A developer's constraints pin the newest versions, which are not what is tested here.
    environment = {name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, cwd=folder, timeout=seconds
    )


def run(*command: str, folder: Path = ROOT, seconds: float = COMMAND_SECONDS) -> str:
    """Run a command that must succeed; return its output."""
    done = completed(*command, folder=folder, seconds=seconds)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def require_engine(seconds: float) -> None:
    """Start the Docker engine by the script DOCKER_ENGINE, if there is one; skip the test if none runs."""
    if script := os.environ.get("DOCKER_ENGINE"):
        run(script, "up", seconds=seconds)
    elif not shutil.which("docker") or completed("docker", "info").returncode != 0:
        pytest.skip("no Docker engine runs here, and DOCKER_ENGINE names no script that starts one")


def build_environment(folder: Path, *requirements: str) -> Path:
    # Our own pip installs into it: one of its own takes as long as all the rest.
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    # Compiled when it is imported, since most of it never is.
    install = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile")
    run(*install, *requirements)
    run(*install, "--no-deps", "--editable", "client")
    return python


def environment(*requirements: str) -> Any:
    """A fixture of the tests of one file: the Python of an environment with these packages and the client."""

    @pytest.fixture(scope="module", name="python")
    def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        folder = tmp_path_factory.mktemp("environment")
        try:
            yield build_environment(folder, *requirements)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return python


def scripts_of(page: str) -> dict[str, str]:
    """The Python script of each chapter of a page that has one, by the chapter's title."""
    return {
        chapter.splitlines()[0]: script
        for chapter in re.split(r"^## ", page, flags=re.M)
        for script in re.findall(r"^```python\n(.*?)^```", chapter, re.M | re.S)
    }
