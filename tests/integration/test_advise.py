"""`pyps advise` on a script of the test's own, with a real server and real workers."""

import re
from pathlib import Path

import pytest

from support import shell

SCRIPT = """
import torch

x = torch.randn(512, 16)
data = x, x @ torch.linspace(-1, 1, 16)

def model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1), torch.nn.Flatten(0))

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(SCRIPT)
    return path


def test_a_user_gets_a_page_a_picture_and_a_prediction_beside_what_was_measured(script, tmp_path):
    flags = ["--workers", "2", "--batch-size", "16", "--epochs", "2", "--seeds", "1", "--rate", "0.03,0.1"]
    # A step that takes long is worth the workers.
    flags += ["--step-seconds", "50ms", "--check", "--check-seconds", "2", "--out", str(tmp_path / "advice")]
    said = shell("advise", str(script), *flags)
    assert "A step of 16 examples takes 50 ms (as given" in said
    assert re.search(
        r"To a figure of [\d.]+: one process [\d.]+ s, pyps [\d.]+ s, DDP at its best ([\d.]+ s|never)", said
    )
    assert "pyps run --workers 2 --protocol" in said and "Not modelled: " in said
    page = (tmp_path / "advice" / "advice.md").read_text()
    (measured,) = re.findall(r"examples/s [\d.,]+ predicted, ([\d.,]+) measured, [+-]\d+%; mean staleness", page)
    assert float(measured.replace(",", "")) > 0 and measured in said
    assert page.startswith("# Advice for ") and "![" in page and (tmp_path / "advice" / "advice.png").stat().st_size > 0


def test_what_cannot_be_advised_on_is_refused_in_a_sentence(script, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "defines no model()" in shell("advise", str(tmp_path / "empty.py"), status=2)
    (tmp_path / "nan.py").write_text(SCRIPT.replace(".mean()", ".mean() * float('nan')"))
    assert "first loss is not finite" in shell("advise", str(tmp_path / "nan.py"), status=2)
    assert "There is no script" in shell("advise", str(tmp_path / "none.py"), status=2)
    assert "--bandwidth is 'fast'" in shell("advise", str(script), "--bandwidth", "fast", status=2)
    assert "expected more epochs" in shell("advise", str(script), "--epochs", "0.01", status=2)
