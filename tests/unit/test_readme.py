"""The README says what is there: its script, commands, targets, links and pictures."""

from __future__ import annotations

import re

import pytest
from google.protobuf import json_format, message_factory
from typer.testing import CliRunner

from pyps.cli.main import COMMANDS, app
from pyps_wire import inspector_pb2
from support import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted(ROOT.glob("*.md"))


def test_the_worker_script_is_the_example() -> None:
    example = (ROOT / "examples" / "minimal.py").read_text()

    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)

    assert blocks == [example]
    assert f"## A worker in {sum(map(bool, example.splitlines()))} lines\n" in README


def test_every_command_exists_with_the_flags_shown() -> None:
    shown = re.findall(r"^(?:\w+=\S+ )*pyps (\w+)(.*)$", "".join(README.split("```")[1::2]), re.M)
    assert {"run", "serve", "eval", "export"} <= {command for command, _ in shown}
    for command, rest in shown:
        assert command in COMMANDS
        options = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for flag in re.findall(r"--[a-z-]+", rest.split(" -- ")[0].split("#")[0]):
            assert flag in options, f"pyps {command} has no {flag}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_exists(document) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))

    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.M))

    assert named <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_linked_file_exists(document) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        assert "://" in target or (ROOT / target).exists(), f"{document.name} links to {target}"


def test_the_calls_shown_are_the_services_own() -> None:
    methods = inspector_pb2.DESCRIPTOR.services_by_name["Inspector"].methods_by_name

    shown = set(re.findall(r"pyps\.v1\.Inspector/(\w+)", README))

    assert {"GetStatus", "ListWorkers"} <= shown <= set(methods)


def test_the_answers_shown_are_messages_of_the_service() -> None:
    methods = inspector_pb2.DESCRIPTOR.services_by_name["Inspector"].methods_by_name

    answers = re.findall(r"pyps\.v1\.Inspector/(\w+)\n(\{.*?^\})", README, re.M | re.S)

    assert len(answers) >= 3
    for method, answer in answers:
        # Fails at a field that the message does not have.
        json_format.Parse(answer, message_factory.GetMessageClass(methods[method].output_type)())
