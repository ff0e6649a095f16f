"""How a model joins a run, as far as no server is needed."""

import pytest
import torch

from pyps_client import Launch
from pyps_client.replica.group import Group
from pyps_client.torch.joining import Joining
from pyps_client.torch.schedule import Settings


class Follower(Group):
    """The second of two processes, whose leader broadcasts its own name and place."""

    index, count = 1, 2

    def broadcast(self, word):
        return ("leader", 3, 4), None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("leader", 3, 4)),
        ({"TORCHELASTIC_RUN_ID": "job", "RANK": "1", "WORLD_SIZE": "2"}, ("leader", 3, 4)),
        ({"PYPS_WORKER_ID": "own"}, ("own", None, None)),
    ],
)
def test_a_replica_has_its_leaders_name_unless_somebody_chose_one(environment, expected) -> None:
    model = torch.nn.Linear(2, 1)
    launch = Launch("127.0.0.1:1", environment=environment)
    joining = Joining(model, torch.optim.SGD(model.parameters(), lr=0.1), launch, Settings(), Follower())

    joining._take_one_name()

    found = joining.launch
    assert (found.worker_id, found.worker_index, found.worker_count) == expected
