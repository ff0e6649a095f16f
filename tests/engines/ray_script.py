"""Trains until its folder holds a file `end`, and leaves its process number there: in workers, with options of run."""

import logging
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

import pyps.ray
from pyps_client import Client


def train(folder: Path) -> str:
    client = Client({"w": np.zeros(8, np.float32)}, ("sgd", {"learning_rate": 1.0}))
    while not (folder / "end").exists():
        client.push({"w": np.ones(8, np.float32)})
        client.pull()
        (folder / f"life-{os.getpid()}").touch()
        if os.environ["PYPS_WORKER_INDEX"] == "1" and (folder / "raise").exists():
            raise KeyError("a bug of worker 1")
    client.close()
    return os.environ["PYPS_SERVERS"]


if __name__ == "__main__":
    work = partial(train, Path(sys.argv[1]))
    if not sys.argv[2:]:
        work()
        sys.exit()
    logging.basicConfig(level=logging.INFO, format="pyps: %(message)s")
    pyps.ray.LOST_SECONDS = pyps.ray.LOG_SECONDS = 1
    places = {"resources": {"worker": 1}, "server_resources": {"server": 1}}
    print("returned", pyps.ray.run(work, **(places | eval(sys.argv[2]))))
