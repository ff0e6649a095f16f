"""examples/char_lm.py: the text it makes, and workers that share its epochs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support import ROOT, PythonProcess

SCRIPT = ROOT / "examples" / "char_lm.py"


def test_the_text_is_python_what_is_held_out_follows_it_and_each_untrained_guess_costs_a_whole_character() -> None:
    spec = importlib.util.spec_from_file_location("char_lm", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    training, held_out = (part.tensors[0] for part in script.standard_library())
    parameters = {name: values.detach().numpy() for name, values in script.Network().named_parameters()}

    assert training.shape == ((script.TRAINING_BYTES - 1) // 64, 65)
    assert held_out.shape == ((script.HELD_OUT_BYTES - 1) // 64, 65)
    assert 0 < int(training.max()) < 128
    assert torch.equal(training[:-1, -1], training[1:, 0]), "each character but the first is guessed once"
    assert b"import " in bytes(training.flatten().tolist())
    assert script.evaluate(parameters)["bits_per_character"] == pytest.approx(7, abs=0.3)


@pytest.mark.extended
def test_workers_share_an_epoch_and_the_first_scores_it(
    start_python: Callable[..., PythonProcess], tmp_path: Path
) -> None:
    picture = tmp_path / "char_lm.png"
    script = (sys.executable, str(SCRIPT), "--epochs", "2", "--training-bytes", "120000", "--picture", str(picture))
    job = start_python("-m", "pyps", "run", "--servers", "2", "--workers", "2", "--", *script)

    assert job.wait(250) == 0, job.output()
    output = job.output()
    # 1,874 stretches of text in batches of 32, by whomever: 59 an epoch.
    done = [int(batches) for batches in re.findall(r"(\d+) batches here", output)]
    assert sum(done) == 2 * 59, output
    untrained, trained = (float(bits) for bits in re.findall(r"(\d\.\d+) bits/char", output))
    assert trained < 5 < untrained
    assert picture.read_bytes().startswith(b"\x89PNG")
