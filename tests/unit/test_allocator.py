"""pyps_wire.allocator: blocks of messages stay mapped, unless somebody else says how."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import child_environment

FAULTS = """
import resource, sys
from pyps_wire.allocator import keep_large_blocks

kept = keep_large_blocks()
blocks = [bytes(4 << 20) for _ in range(8)]
del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    bytes(4 << 20)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


GIVEN_BACK = """
from pyps_wire.allocator import give_back_free_memory, keep_large_blocks

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

kept = keep_large_blocks()
blocks = [b"x" * (4 << 20) for _ in range(8)]
# In use, so that the heap's end stays where it is.
last = b"x" * (1 << 20)
del blocks
before = resident()
print(kept, give_back_free_memory() and before - resident())
"""


def run(program: str = FAULTS, **variables: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(variables), capture_output=True, text=True, check=True
    )
    kept, number = done.stdout.split()
    return kept, int(number)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_blocks_of_messages_are_not_mapped_anew() -> None:
    kept, faults = run()
    if kept == "False":
        pytest.skip("not glibc")
    assert faults < 1024, "one block's pages, of the fifty blocks' 51,200"


def test_whoever_set_the_allocator_keeps_his_settings() -> None:
    assert run(MALLOC_ARENA_MAX="2")[0] == "False"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_free_amid_the_heap_is_given_back() -> None:
    kept, num_bytes = run(GIVEN_BACK)
    if kept == "False":
        pytest.skip("not glibc")
    assert num_bytes > 24 << 20, "most of eight blocks of 4 MiB"
