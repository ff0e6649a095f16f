"""What a forked child leaves alone of its parent's."""

import gc
import os

from pyps_client.fork import ForkGuard


class Connection:
    """Garbage that only the collector finds, whose end talks to a thread that a child has not got."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        if os.getpid() != PARENT:
            os._exit(1)


PARENT = os.getpid()


def test_a_child_collects_nothing_that_its_parent_had_done_with():
    gc.disable()
    try:
        ForkGuard()
        Connection()
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
