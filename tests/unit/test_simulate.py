"""`pyps simulate` as a user calls it, on scripts of the test's own."""

import csv
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from pyps.cli.laboratory.report import _cells
from pyps.cli.laboratory.settings import Settings
from pyps.cli.laboratory.sweep import grid
from pyps.cli.laboratory.trial import Outcome, Trial
from pyps.cli.main import app
from pyps.units import parse_bandwidth, parse_seconds
from pyps_client.torch.problem import Problem, seed_all
from pyps_wire.errors import InvalidArgument, PypsError

SCRIPT = """
import torch

x = torch.randn(256, 4)
data = x, x @ torch.tensor([1.0, -2.0, 0.5, 3.0])

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(SCRIPT)
    return path


def problem(text: str = SCRIPT, seed: int = 0) -> Problem:
    defined: dict[str, object] = {}
    seed_all(0)
    exec(text, defined)
    return Problem(defined, script="my_model.py", seed=seed)


def trial(text: str = SCRIPT, protocol: str = "async", rate: float = 0.1, **flags: object) -> Outcome:
    of_script = problem(text)
    settings = Settings(**flags)  # type: ignore[arg-type]
    sized = settings.sized(num_parameters=of_script.num_parameters, num_examples=of_script.num_examples)
    return Trial(protocol, "none", rate, 0).run(sized, of_script)


def simulate(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_users_script_gets_a_table_files_and_a_picture_that_are_the_same_in_any_number_of_processes(script, tmp_path):
    flags = [script, "--workers", 4, "--protocol", "async,hardsync", "--staleness", "none,divide", "--target", 1]
    flags += ["--batch-size", 16, "--seeds", 2, "--latency", "10ms", "--bandwidth", "1mbit", "--pull-codec", "int8"]
    said = simulate(*flags, "--out", tmp_path / "one", "--processes", 1)
    simulate(*flags, "--out", tmp_path / "two", "--processes", 2)

    assert "6 trials of 1,280 examples in 80 pushes, 4 virtual workers, 5 parameters" in said
    assert "hardsync: one row for all policies, as no gradient is stale there." in said
    names = ["curves.csv", "simulation.json", "simulation.png", "trials.csv"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    rows = list(csv.DictReader((tmp_path / "one" / "trials.csv").open()))
    assert [(row["protocol"], row["staleness"]) for row in rows[::2]] == [
        ("async", "none"),
        ("async", "divide"),
        ("hardsync", "none"),
    ]
    assert all(float(row["figure"]) < 1 for row in rows if row["staleness"] == "none")
    assert 0 < float(rows[0]["target_seconds"]) < float(rows[0]["seconds"])
    with pytest.raises(InvalidArgument, match="csv cannot be written: File exists"):
        simulate(*flags, "--out", tmp_path / "one" / "trials.csv")
    assert json.loads((tmp_path / "one" / "simulation.json").read_text())["settings"]["workers"] == 4


def test_without_gradients_a_large_model_costs_its_bytes_and_no_memory():
    said = simulate("--no-gradients", "--workers", 20, "--parameters", 10**9, "--bandwidth", "100gbit", "--seeds", 1)

    assert "1 trial of 12,800 examples in 400 pushes, 20 virtual workers, 1,000,000,000 parameters" in said
    # 4 GB there and 4 GB back for 32 examples; a shard takes 0.8 s for both.
    [row] = [line.split() for line in said.splitlines() if line.startswith(" async")]
    assert float(row[-1].replace(",", "")) == pytest.approx(8e9 / 32, rel=0.06)
    assert float(row[2]) == pytest.approx(1 / 0.8, rel=0.05)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def model(): pass", r"my_model.py defines no loss\(model, batch\); a script to simulate defines model\(\), "),
        (SCRIPT.replace("data =", "date ="), r"(?s)defines no data; .*example:.*def model\(\): return torch.nn.Linear"),
        (SCRIPT + "\ndef model(): return 3", r"model\(\) of my_model.py returns int; expected a torch.nn.Module"),
        (
            SCRIPT + "\nmodel = model()",
            "model of my_model.py is no function; expected one that returns a new torch.nn.M",
        ),
        (
            SCRIPT + "\ndata = x, x[:5]",
            r"data of my_model.py is tuple of a tensor of shape \[256, 4\], a tensor of shape \[5, 4\]; expected a tup",
        ),
        (
            SCRIPT + "\ndata = x.numpy(), x",
            r"is tuple of ndarray, a tensor of shape \[256, 4\]; expected a",
        ),
        (SCRIPT + "\ndata = ()", "data of my_model.py is tuple; expected a tuple .* and not empty"),
        (SCRIPT.replace("Flatten(0))", "Flatten(0)).double()"), "parameters of torch.float64 on cpu; expected float32"),
    ],
)
def test_a_script_that_cannot_be_simulated_is_told_what_to_define(text, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        problem(text)


OTHERS = "my_model.py gives its model other parameters, or gradients of its own"
LOSS, EVALUATE = r"loss\(model, batch\) returns ", r"evaluate\(model\) returns "


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("if torch.is_grad_enabled(): model.zero_grad()", OTHERS),
        ("if torch.is_grad_enabled(): model[0] = torch.nn.Linear(4, 1)", OTHERS),
        ("return (model(batch[0]) - batch[1])[:, None]", LOSS + r"a tensor of shape \[256, 1\]; expected a number"),
        ("return torch.tensor(1.0)", LOSS + r"a tensor of shape \[\]; expected a number with a gradient"),
        ("return 1.0", LOSS + "float; expected a number with a gradient"),
        ("def evaluate(model): pass", EVALUATE + "NoneType; expected a number"),
        ("def evaluate(model): return '0.5'", EVALUATE + "str; expected a number"),
        ("def evaluate(model): return {'loss': 1}", EVALUATE + "dict; expected a number"),
    ],
)
def test_a_loss_or_an_evaluate_that_cannot_be_taken_is_refused(line, sentence):
    at, indent = ("\ndef loss", "") if line.startswith("def") else ("    return ((model(", "    ")
    with pytest.raises(InvalidArgument, match=sentence):
        trial(SCRIPT.replace(at, f"{indent}{line}\n{at}"))


def test_an_error_of_the_script_is_shown_with_its_own_frames_only(script):
    script.write_text(SCRIPT.replace(".mean()", ".mien()"))
    result = CliRunner().invoke(app, ["simulate", str(script), "--seeds", "1"])

    assert result.exit_code == 1
    assert "AttributeError: 'Tensor' object has no attribute 'mien'" in result.output
    assert f"pyps: {script} failed with the error above." in result.output
    assert "simulation.py" not in result.output

    script.write_text("raise SystemExit(3)")
    ended = CliRunner().invoke(app, ["simulate", str(script)])
    assert (ended.exit_code, ended.output) == (1, f"pyps: {script} ended with exit status 3.\n")

    # Outside the script's own lines all frames are shown, so that what is at fault can be told.
    (script.parent / "mine.py").write_text("class Data:\n    __len__ = lambda self: 99\n    __getitem__ = None")
    script.write_text(SCRIPT + "\nimport mine\ndata = mine.Data()")
    assert "problem.py" in CliRunner().invoke(app, ["simulate", str(script), "--seeds", "1"]).output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"slow": "3"}, "--slow is '3'; expected at most 8 workers"),
        ({"slow": "9x2"}, "--slow is '9x2'; expected at most 8 workers"),
        ({"failures": "60"}, "--failures is '60'; expected two times, as 3600,60"),
        (
            {"failures": "0.1,1"},
            "'0.1,1', but what a worker computes before a push takes 1 s: hardly any push would come",
        ),
        ({"bandwidth": "1gb"}, "--bandwidth is '1gb'; expected a link such as 1gbit"),
        ({"bandwidth": "0"}, "--bandwidth is '0'; expected a link"),
        ({"latency": "-1"}, "--latency is '-1'; expected a time such as 0.01"),
        ({"latency": "inf"}, "--latency is 'inf'; expected a time"),
        ({"step_seconds": "1e400"}, "--step-seconds is '1e400'; expected a time"),
        ({"service_seconds": "inf"}, "--service-seconds, unless kernel, is 'inf'; expected a time"),
        ({"failures": "inf,1"}, "--failures is 'inf,1'; expected two times"),
        ({"epochs": math.nan}, "--epochs is nan; expected a finite number"),
        ({"cores": math.inf}, "--cores is inf; expected a finite number"),
        ({"target": math.nan}, "--target is nan; expected a finite number"),
        ({"optimizer": "sgd:learning_rate=1.2.3"}, "learning_rate is '1.2.3', but must be a number"),
        ({"service_seconds": "quick"}, "--service-seconds, unless kernel, is 'quick'"),
        ({"service_seconds": "1,2,3"}, "--service-seconds, unless kernel, is '1,2,3'; expected one or two"),
        ({"rate": "0"}, "--rate is '0'; expected numbers above 0"),
        ({"rate": "1", "optimizer": "sgd:learning_rate=1"}, "both set it: leave one out"),
        ({"optimizer": "sgd:speed=1"}, "speed"),
        ({"times": "normal"}, "the times are 'normal'; expected fixed"),
        ({"codec": "delta"}, "--codec is 'delta'; expected one of float32"),
        ({"pull_codec": "topk"}, "--pull-codec is 'topk'; expected one of float32"),
        ({"schedule": "sometimes"}, "sometimes"),
        ({"protocol": "sandblaster"}, "--protocol names sandblaster, under which no worker pushes"),
        ({"protocol": "backup:b=8"}, "backup:b=8 waits for none of 8 workers"),
        ({"staleness": "some"}, "staleness policy 'some' is unknown"),
        ({"protocol": ","}, "--protocol and --staleness must name one or more each"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_with_what_was_expected(flags, sentence):
    with pytest.raises((PypsError, ValueError), match=sentence):
        grid(Settings(**flags))


def test_a_grid_has_each_combination_that_differs_once():
    names = "async,softsync:n=2,merge=all,serial,downpour"
    trials, remarks = grid(Settings(protocol=names, staleness="auto,divide,none", rate="1,2", seeds=2))

    assert [(each.protocol, each.staleness) for each in trials if (each.rate, each.seed) == (1, 0)] == [
        ("async", "divide"),
        ("async", "none"),
        ("softsync:n=2,merge=all", "divide"),
        ("softsync:n=2,merge=all", "none"),
        ("serial", "none"),
    ]
    assert len(trials) == 5 * 2 * 2
    assert Settings(optimizer="sgd:learning_rate=1E-3").rates == [0.001]
    assert remarks == ["serial: one row for all policies, as no gradient is stale there."]


def test_one_worker_takes_the_steps_of_torchs_own_sgd():
    import torch

    of_script = problem()
    model, draws = of_script.model, np.random.default_rng([0, 0])
    twin = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    twin.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, y = of_script._data
    for _ in range(20):
        batch = torch.from_numpy(draws.integers(256, size=8))
        optimizer.zero_grad()
        ((twin(x[batch]) - y[batch]) ** 2).mean().backward()
        optimizer.step()
    settings = Settings(workers=1, batch_size=8, examples=160, times="fixed", shards=2)

    outcome = Trial("async", "none", 0.1, 0).run(settings.sized(num_parameters=5, num_examples=256), of_script)

    assert outcome.measured["examples"] == 160
    assert outcome.measured["figure"] == pytest.approx(((twin(x) - y) ** 2).mean().item(), rel=1e-5)


def test_local_steps_push_what_they_changed_and_servers_average():
    once, often = (trial(workers=1, times="fixed", examples=640, local_steps=steps) for steps in (1, 4))

    # The same 20 steps, of one worker.
    assert often.measured["figure"] == pytest.approx(once.measured["figure"], rel=1e-4)
    assert often.measured["bytes_per_example"] == pytest.approx(once.measured["bytes_per_example"] / 4, rel=0.2)


def test_buffers_stay_with_the_worker():
    text = SCRIPT.replace("torch.nn.Linear(4, 1)", "torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)")
    of_script = problem(text)
    for worker_id, examples in (("a", [0, 1]), ("b", [2, 3]), ("a", [0, 1]), ("a", [4, 5])):
        of_script.gradient(worker_id, np.array(examples))

    counts = {worker_id: int(buffers[2]) for worker_id, buffers in of_script._buffers_of.items()}
    assert counts == {"a": 3, "b": 1}


def test_the_answer_to_a_push_brings_parameters_and_no_other_push_comes_between():
    # All wait for the server, which takes 10 ms for a push and its pull.
    queued = trial(workers=4, step_seconds="1ms", times="fixed", service_seconds="7ms,3ms", epochs=99)
    assert queued.measured["mean_staleness"] == pytest.approx(3, abs=0.02)
    assert queued.measured["examples_per_second"] == pytest.approx(32 / 0.01, rel=0.02)


def test_a_trial_that_diverges_or_is_refused_ends_and_says_so():
    diverged = trial(rate=1e20, examples=100_000)
    assert (diverged.measured["note"], np.isfinite(diverged.points[-1].figure)) == ("diverged", False)
    of_script = problem()
    settings = Settings(workers=32, times="fixed", examples=10_000).sized(num_parameters=5, num_examples=256)
    cells = _cells([trial(target=1e9), diverged], Settings(target=1e9), trained=True)
    assert cells["s to\ntarget"] == "1 of 2\nby 0"
    refused = Trial("async", "drop:spread=0", 0.1, 0).run(settings, of_script)
    assert refused.measured["note"] == "refused"
    assert float(refused.measured["refused"]) > 0.9


def test_a_trial_whose_workers_die_before_they_push_ends_and_says_so(monkeypatch):
    monkeypatch.setattr("pyps.cli.laboratory.trial.LIVES_MAX", 100)
    # A pull takes 160 s, and a life 10.
    lost = trial(protocol="hardsync", bandwidth="1bit", failures="10,1", workers=5)
    assert str(lost.measured["note"]).startswith("without a push at ")
    # All die, and none comes back.
    gone = trial(failures="10,inf", workers=5, epochs=99)
    assert str(gone.measured["note"]).startswith("without a push at ") and gone.measured["examples"]


HELD = """
import os, time
from pyps.cli.laboratory.sweep import Pool, ended_by_signals
with ended_by_signals(), Pool(None, 1) as pool:
    print(pool._executor.submit(os.getpid).result(), flush=True)
    pool._executor.submit(time.sleep, 600).result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed_leaves_no_trial_behind(number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HELD], text=True, **pipes) as command:
        assert command.stdout is not None
        trial_process = psutil.Process(int(command.stdout.readline()))
        command.send_signal(number)
        # The pipes have ends at the trial's process too.
        said = command.communicate(timeout=60)[1]
    assert number == signal.SIGKILL or (command.returncode, said) == (128 + number, "")
    assert not trial_process.is_running() or trial_process.status() == psutil.STATUS_ZOMBIE


def test_amounts_are_read_with_their_units():
    assert [parse_seconds(text, what="x") for text in ("2", "10 ms", "0.05 ms", "1e-3")] == [2.0, 0.01, 5e-05, 0.001]
    assert [parse_bandwidth(text, what="x") for text in ("1gbit", "100mbit", "12.5MB")] == [125e6, 12.5e6, 12.5e6]


def test_a_shards_time_follows_its_size_or_is_given():
    kernel = Settings(shards=2).service
    assert kernel(10**7)[0] == pytest.approx(7.5e-5 + 6e-3)
    assert Settings(service_seconds="3ms").service(10) == pytest.approx((0.003, 0.001))
    assert Settings(service_seconds="3ms,0").service(10) == (0.003, 0.0)
