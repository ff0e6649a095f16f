import re

import pytest
from typer.testing import CliRunner

from pyps.cli.demo import example as command
from pyps.cli.main import app
from support import shell


def test_the_demo_trains_and_draws(start_python, tmp_path):
    picture = tmp_path / "pictures" / "demo.png"
    sizes = ("--servers", "1", "--workers", "1", "--epochs", "12")
    demo = start_python("-m", "pyps", "demo", *sizes, "--picture", str(picture))

    assert demo.wait() == 0, demo.output()
    output = demo.output()
    assert re.search(r"Held-out accuracy 0\.9[5-9]\d after \d+ updates", output), output
    assert re.search(r"^ 0\.0 s .*loss \d\.\d{3}  accuracy 0\.\d{3}$", output, re.MULTILINE), "both from the beginning"
    assert re.search(r"worker-0 .* \d+%", output), "the table of what staleness cost"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {picture}" in output
    page = picture.with_suffix(".html")
    assert f"The run as a page: {page}\n" in output
    assert '"score": {"accuracy": 0.9' in page.read_text(encoding="utf-8")


@pytest.mark.extended
def test_the_demo_learns_under_another_protocol_and_optimizer(start_python, tmp_path):
    # Three quarters of the demo's own.
    flags = ("--protocol", "backup:b=1", "--optimizer", "adam", "--epochs", "30")
    demo = start_python("-m", "pyps", "demo", *flags, "--picture", str(tmp_path / "demo.png"))

    assert demo.wait() == 0, demo.output()
    output = demo.output()
    assert ": backup:b=1, staleness divide, adam." in output
    assert re.search(r"worker-3 .* \d+%", output), output
    assert re.search(r"Held-out accuracy (0\.9[5-9]|1\.0)\d* after \d+ updates", output), output


@pytest.mark.extended
def test_a_training_that_learns_too_little_fails_in_a_sentence(start_python, tmp_path):
    flags = ("--epochs", "1", "--workers", "1", "--servers", "1", "--picture", str(tmp_path / "demo.png"))
    demo = start_python("-m", "pyps", "demo", *flags)

    assert demo.wait() == 1
    assert "below the 0.95 that this training should reach" in demo.output()
    assert "Traceback" not in demo.output()


def test_what_the_demo_lacks_is_named(monkeypatch):
    monkeypatch.setattr(command, "NEEDED", {"no_such_module": ".[demo]"})

    assert "the demo needs no_such_module: pip install '.[demo]' in a clone" in shell("demo", status=1)


@pytest.mark.parametrize(
    ("flag", "value", "refusal"),
    [
        ("--protocol", "sandblaster", "the demo's workers push gradients, which sandblaster refuses"),
        ("--protocol", " Sandblaster", "the demo's workers push gradients, which sandblaster refuses"),
        ("--optimizer", "adam:amsgrad=1", "one of adagrad, sgd, momentum"),
    ],
)
def test_what_the_demo_cannot_show_is_refused_before_anything_starts(flag, value, refusal):
    assert refusal in shell("demo", flag, value, status=2)


def test_the_demo_says_what_it_waits_for(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "WAITING_SECONDS", 0.1)
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(0.5)\n", encoding="utf-8")
    monkeypatch.setattr(command, "WORKER", slow)

    output = CliRunner().invoke(app, ["demo", "--servers", "1", "--workers", "1"]).output

    lines = output.splitlines()
    assert lines[0] == "Starting 1 server and 1 worker."
    assert "0 s so far: waiting for the first worker, which is still loading them." in lines


def test_the_demo_offers_the_optimizers_of_its_script():
    script = command.WORKER.read_text(encoding="utf-8")
    offered = re.findall(r'^    "(\w+)": \(torch\.optim', script, re.MULTILINE)
    assert tuple(offered) == command.OPTIMIZERS
