import re

import pytest

from support import ROOT


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_three_ways_train_and_are_drawn(start_python, tmp_path):
    picture = tmp_path / "local_training.png"
    script = start_python(str(ROOT / "examples" / "local_training.py"), "--quick", "--picture", str(picture))

    assert script.wait(450) == 0, script.output()
    ways = re.findall(r"^([a-z ]+): \d\.\d+ bits/char after \d+ s$", script.output(), re.M)
    assert ways == ["local training", "async", "one machine"]
    assert picture.read_bytes().startswith(b"\x89PNG")
