"""What every test of faults may ask of the process it runs in."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from local_worker import segments_of


@pytest.fixture
def segments_of_others() -> Iterator[set[int]]:
    """What this process held of shared memory before the test; looks afterwards that no more is left.

    Memory that is shared has no name: it is gone when nobody maps it or has it open.
    """
    others = segments_of(os.getpid())
    yield others
    gc.collect()
    assert segments_of(os.getpid()) <= others, "memory of the test's workers is still mapped or open here"
