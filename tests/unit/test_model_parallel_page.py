"""docs/model-parallel.md says what is there: files, flags, messages, and the numbers of networks that it speaks of."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from experiments import model_parallel as experiment
from pyps.cli.main import app
from support import ROOT

PAGE = ROOT / "docs" / "model-parallel.md"
TEXT = PAGE.read_text()
MESSAGES = [line.split("|")[2].strip(" `") for line in TEXT.splitlines() if re.match(r"\| .* \| `", line)]


def test_every_linked_file_exists() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)

    assert "images/model_parallel.png" in targets
    for target in targets:
        assert (PAGE.parent / target).exists(), target


def test_pyps_run_has_the_flags_shown() -> None:
    options = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output

    shown = {"--servers", "--replicas", "--parts", "--max-restarts"}
    assert shown <= set(re.findall(r"--[a-z-]+", TEXT))
    assert all(flag in options for flag in shown)


def test_the_messages_shown_are_those_of_the_code() -> None:
    sources = "".join(
        path.read_text() for path in sorted((ROOT / "client" / "pyps_client").rglob("*.py")) if "_pb2" not in path.name
    )
    # A message is written over several literals, which a line's end divides.
    spoken = re.sub(r'"\s*f?"', "", sources)

    assert len(MESSAGES) >= 6
    for message in MESSAGES:
        # Between names, numbers and shapes.
        for piece in re.split(r"(?<!\w)'[^']*'|\[[^\]]*\]|\([^)]*\)|…|\b\d+\b", message):
            # A sentence may be put together of several; its beginning is of one.
            words = piece.strip(" :.,=").split()[:5]
            assert len(words) < 4 or " ".join(words) in spoken, words


def test_the_table_has_a_column_for_each_number_of_machines() -> None:
    header = next(line for line in TEXT.splitlines() if line.startswith("| machines |"))

    assert [int(cell) for cell in header.split("|")[2:-1]] == list(experiment.MACHINES)
    assert "5.2 million" in TEXT
    assert experiment.DENSE.num_parameters == pytest.approx(5.2e6, rel=0.01)
