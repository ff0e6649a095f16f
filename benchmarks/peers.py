"""Runs a peer's script under our rules: rewrite the gradient each round, end in one's own torch parameters.

    python benchmarks/peers.py FOLDER SCRIPT [its arguments]

FOLDER holds the peers' scripts and the `_common.py` that they share. They are run from a copy of the folder in
which `_common` is ours: it hands through theirs, and wraps the timed step.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = '''
"""The peers' own `_common`, with the timed step wrapped."""
import _common_original as original
from _common_original import *  # noqa: F403

make_grads_original, timed_original = original.make_grads, original.timed
gradients = []


def make_grads(n, k):
    made = make_grads_original(n, k)
    gradients.extend(made)
    return made


def timed(step, *rest):
    import numpy as np
    import torch

    sources = [g.copy() for g in gradients]
    parameters = [torch.nn.Parameter(torch.zeros(len(g))) for g in gradients]

    def whole_step():
        for gradient, source in zip(gradients, sources):
            np.copyto(gradient, source)
        pulled = step()
        with torch.no_grad():
            for parameter, values in zip(parameters, pulled):
                if not isinstance(values, torch.Tensor):
                    values = torch.frombuffer(values, dtype=torch.float32)
                parameter.copy_(values)
        return pulled

    return timed_original(whole_step, *rest)


original.make_grads, original.timed = make_grads, timed
'''


def main() -> int:
    folder, script, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="pyps-peers-") as copy:
        for path in Path(folder).glob("*.py"):
            shutil.copyfile(path, Path(copy) / path.name)
        (Path(copy) / "_common.py").rename(Path(copy) / "_common_original.py")
        (Path(copy) / "_common.py").write_text(COMMON)
        command = [sys.executable, "-W", "ignore::UserWarning", str(Path(copy) / script), *arguments]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
