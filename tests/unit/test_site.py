import dataclasses
import html
import importlib
import re

import pytest

from pyps.cli.main import COMMANDS
from pyps.config import ServerConfig, flag_name
from support import ROOT


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extension"))


def answers_of(text: str) -> dict[str, str]:
    folded = r"^ *<details>.*<code>(.*)</code>.*</summary>\n *\n *\*(.*)\*\n *\n *</details>$"
    return {html.unescape(given): said for given, said in re.findall(folded, text, re.M)}


def test_every_option_of_every_command_is_listed_with_the_answer_to_a_wrong_value():
    text = importlib.import_module("settings").commands()

    chapters = dict(re.findall(r"^## (pyps .*)\n((?:(?!## ).*\n?)*)", text, re.M))
    assert {name.split()[1] for name in chapters} == set(COMMANDS)
    entries = {name: set(re.findall(r"^`+\{option\} (\S+?),? ", text, re.M)) for name, text in chapters.items()}
    assert {flag_name(field.name) for field in dataclasses.fields(ServerConfig)} <= entries["pyps serve"]
    assert {"--servers", "--workers", "--max-restarts", "--protocol"} <= entries["pyps run"]
    answers = answers_of(chapters["pyps serve"])
    assert answers["--port -1"] == "the flag --port is -1, but must be from 0 to 65535"
    assert "PYPS\\_INSECURE in the environment is 'maybe'" in answers["PYPS_INSECURE=maybe"]
    assert "expected one of asgd, async" in answers["--protocol nonsense"]
    assert answers_of(chapters["pyps status"])["--servers ?"].startswith("Server address '?' is malformed")


def test_what_is_right_is_not_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert importlib.import_module("refusals").of_command(["certs", "init", "--host", "localhost"], {}) == ""
    assert list(tmp_path.iterdir()) == []


def test_every_setting_of_a_worker_is_listed():
    settings = importlib.import_module("settings")

    launch, options = settings.launch(), settings.options()

    assert "'nonsense'; expected a whole number." in answers_of(launch)["PYPS_WORKER_INDEX=nonsense"]
    assert "`wait_seconds` [default: 1800.0; variable: PYPS_WAIT_SECONDS]" in launch
    assert "expected one of local, average, first." in answers_of(options)["buffers='nonsense'"]
