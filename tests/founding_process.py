"""One process of a replica that holds one of two parts, as tests start it.

    python founding_process.py SERVERS SCENARIO RANK STORE

Of two processes, the second stops itself where the scenario says, so that the first waits for it amid a collective
call. No process waits long once it has learned that its replica is lost.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import torch.distributed as dist

from cut_model import CUT, vectors_of, whole_tensors
from pyps_client import Launch, Session, lost_replica, termination
from pyps_client.torch.replica import Replica
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings

SGD = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})] * CUT.num_groups)
NAME = "stops"


def stop() -> None:
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    servers, scenario, rank, store = sys.argv[1:]
    lost_replica.GRACE_SECONDS = termination.GRACE_SECONDS = 0.5
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    replica = Replica()
    replica.bind(NAME)

    def initial() -> list[np.ndarray]:
        print("elected", flush=True)
        if scenario == "founding" and replica.index == 1:
            stop()
        return [vectors_of(whole_tensors())[replica.index]]

    launch = Launch(servers=tuple(servers.split(",")), worker_id=NAME)
    session = Session(CUT, SGD, launch=launch, initial=initial, parts=[replica.index], peers=replica)
    session.connect()
    print("joined", flush=True)
    if replica.index == 1:
        stop()
    replica.gather("here")


if __name__ == "__main__":
    main()
