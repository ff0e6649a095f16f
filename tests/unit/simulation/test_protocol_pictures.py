"""experiments/protocol_pictures.py: the pictures are of what the protocols promise."""

from itertools import pairwise

import pytest

from experiments.protocol_pictures import PROTOCOLS, WORKERS, tell


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_story_has_the_waits_and_the_staleness_of_its_protocol(protocol):
    story = tell(protocol)

    assert story.steps.keys() == WORKERS.keys()
    ages = [receipt.staleness for receipt in story.taken]
    name = protocol.partition(":")[0]
    assert (max(ages) == 0) == (name in ("hardsync", "backup", "serial"))
    assert (story.waited == pytest.approx(0)) == (name in ("async", "softsync"))
    assert story.updates == sorted(story.updates)
    if name == "serial":
        turns = sorted((start, end) for steps in story.steps.values() for start, end, _ in steps)
        assert all(end <= start for (_, end), (start, _) in pairwise(turns))
