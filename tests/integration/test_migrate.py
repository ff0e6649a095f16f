"""The scripts of docs/migrate.md by the page's own commands: all that have pyps in them, and torch RPC's."""

import importlib
import json
import re
import shlex

import pytest

from support import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
SCRIPTS = {name: text for text, name in re.findall(r"^```python\n(# (\w+\.py)\b.*?)^```", PAGE, re.M | re.S)}
COMMANDS = {name: line for line, name in re.findall(r"^```\n((?:pyps|torchrun) .*?(\w+\.py))\n```", PAGE, re.M)}
MODULES = {"pyps": "pyps", "torchrun": "torch.distributed.run"}
EPOCHS = 5


def test_every_script_is_python_and_those_with_pyps_have_their_command():
    for name, text in SCRIPTS.items():
        compile(text, name, "exec")
    assert len(SCRIPTS) == 6
    assert {name for name in SCRIPTS if "pyps_client" in SCRIPTS[name]} == COMMANDS.keys() - {"before_rpc.py"}


def test_the_figures_are_those_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    measured = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))

    renewed = importlib.import_module("document").renewed(PAGE, measured)

    assert renewed == PAGE, "run: python benchmarks/document.py docs/performance.json --into docs"
    assert re.search(r"torch RPC \w+ \d", PAGE) and re.search(r"TensorFlow gRPC \d", PAGE)


@pytest.mark.extended
@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_trains_by_the_command_below_it(name, tmp_path, start_python):
    (tmp_path / name).write_text(SCRIPTS[name], encoding="utf-8")
    program, *arguments = shlex.split(COMMANDS[name])

    job = start_python("-m", MODULES[program], *arguments, cwd=tmp_path)

    assert job.wait(120) == 0, job.output()
    reported = re.findall(r"epoch (\d+)\S*.* loss (\d+\.\d+|nan)$", job.output(), re.M)
    # Of two workers, or of torch RPC's one trainer.
    assert sorted(int(epoch) for epoch, _ in reported) == sorted((1 + (program == "pyps")) * list(range(EPOCHS)))
    # A guess among ten digits costs 2.3.
    last = [float(loss) for epoch, loss in reported if int(epoch) == EPOCHS - 1 and loss != "nan"]
    assert last and max(last) < 0.7, job.output()
