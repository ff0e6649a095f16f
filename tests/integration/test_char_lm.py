import re
import sys

import pytest

from support import ROOT

SCRIPT = ROOT / "examples" / "char_lm.py"


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_workers_share_an_epoch_and_the_first_scores_it(start_python, tmp_path):
    picture = tmp_path / "char_lm.png"
    script = (sys.executable, str(SCRIPT), "--epochs", "2", "--training-bytes", "120000", "--picture", str(picture))
    job = start_python("-m", "pyps", "run", "--servers", "2", "--workers", "2", "--", *script)

    assert job.wait(450) == 0, job.output()
    output = job.output()
    # 1,874 stretches of text in batches of 32, by whomever: 59 an epoch.
    done = [int(batches) for batches in re.findall(r"(\d+) batches here", output)]
    assert sum(done) == 2 * 59, output
    untrained, trained = (float(bits) for bits in re.findall(r"(\d\.\d+) bits/char", output))
    assert trained < 5 < untrained
    assert picture.read_bytes().startswith(b"\x89PNG")
