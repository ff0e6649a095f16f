"""The scripts of docs/trainers.md as they stand, each as two workers on two servers, to their own and the run's end."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from environments import environment, scripts_of
from support import ROOT, StartPython

# The environment takes a minute to build, and more than a gigabyte while it is there.
pytestmark = [pytest.mark.extended, pytest.mark.compat, pytest.mark.timeout(600)]

TRAINERS = ("accelerate==1.15.0", "lightning==2.6.6", "transformers==5.23.0")
# What torch and the client need in the versions of everything else here; torch not as another build.
BENEATH = ("--constraint", "constraints.txt", "torch", "numpy", "grpcio", "protobuf")

PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
SCRIPTS = scripts_of(PAGE)
# How the page's table saves, each worker its own copy, and goes on from that: what stands in the script, then what is
# put there first, and what the second time.
OWN = "os.environ['PYPS_WORKER_INDEX']"
PREPARES = "remote, model, optimizer, loader = prepare("
LOADED = f"model = accelerator.prepare(model)\naccelerator.load_state({OWN})\n"
CONTINUED = {
    "Accelerate": (
        (PREPARES, PREPARES, LOADED + PREPARES),
        ("    print(", f"    accelerator.save_state({OWN})\n    print(", "    print("),
    ),
    "Lightning": (
        ("max_epochs=10", "max_epochs=10", "max_epochs=12"),
        ("(), loader)", f"(), loader)\ntrainer.save_checkpoint({OWN})", f"(), loader, ckpt_path={OWN})"),
    ),
    "Hugging Face Trainer": (
        ('"out"', OWN, OWN),
        ('"no"', '"epoch"', '"no"'),
        ('_epochs": 10', '_epochs": 10', '_epochs": 12'),
        (".train()", ".train()", ".train(resume_from_checkpoint=True)"),
    ),
}
# Two workers, ten epochs, 1024 examples of each worker's own, a step for twice 32.
UPDATES = 2 * 10 * 1024 // 64


python = environment(*BENEATH, *TRAINERS)


@pytest.fixture(params=SCRIPTS)
def run_job(
    request: pytest.FixtureRequest, python: Path, tmp_path: Path, start_python: StartPython
) -> Callable[..., str]:
    [command] = re.findall(r"^pyps (run .*) -- python worker\.py$", PAGE, re.M)

    def run(life: int | None = None, **environment: str) -> str:
        script = SCRIPTS[request.param]
        if life is not None:
            for there, *instead in (("import torch\n", *(2 * ["import os, torch\n"])), *CONTINUED[request.param]):
                assert script.count(there) == 1, there
                script = script.replace(there, instead[life])
        (tmp_path / "worker.py").write_text(script, encoding="utf-8")
        arguments = ("-m", "pyps", *command.split(), "--", str(python), "worker.py")
        job = start_python(*arguments, cwd=tmp_path, env={"PYTHONPATH": None, **environment})
        assert job.wait(240) == 0, job.output()
        return job.output()

    return run


def printed(output: str) -> list[tuple[int, float]]:
    """Update and loss of each line with both, of both workers."""
    return [(int(update), float(loss)) for update, loss in re.findall(r"update (\d+): loss (\d\.\d+)", output)]


def test_the_page_names_the_versions_that_are_tried():
    assert f"pip install {' '.join(TRAINERS)}\n" in PAGE
    assert len(SCRIPTS) == len(TRAINERS)


def test_a_trainer_trains_through_the_servers_to_its_own_end(run_job):
    lines = printed(run_job())
    assert max(update for update, _ in lines) == UPDATES
    losses = [loss for _, loss in sorted(lines)]
    assert max(losses[-2:]) < losses[0] / 2


def test_a_trainer_ends_with_the_run(run_job):
    output = run_job(PYPS_STOP_AFTER="updates=60")
    assert 60 <= max(update for update, _ in printed(output)) < UPDATES
    # The warning of a loop that goes on.
    assert "steps do nothing any more" not in output


def test_a_new_run_begins_at_the_parameters_of_a_trainer_s_checkpoint(run_job):
    first, second = (printed(run_job(life)) for life in (0, 1))

    # The run begins anew, the parameters do not: after one more epoch the first lines tell of less than those before.
    assert second[0][0] < UPDATES / 2
    assert sum(loss for _, loss in second[:2]) < 0.7 * sum(loss for _, loss in first[:2])
