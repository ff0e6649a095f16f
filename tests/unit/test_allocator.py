"""pyps_wire.allocator: blocks of messages stay mapped, unless somebody else says how."""

import os
import platform

import pytest

from support import StartPython

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc, whose allocator it is")

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


def run(start_python: StartPython, program: str, **variables: str) -> tuple[str, int]:
    of_the_shell = dict.fromkeys(name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_")))
    python = start_python("-c", program, env=of_the_shell | variables, fresh=True)
    assert python.wait() == 0
    kept, number = python.output().split()
    return kept, int(number)


def test_blocks_of_messages_are_not_mapped_anew(start_python):
    kept, faults = run(start_python, FAULTS)
    assert kept == "True"
    assert faults < 1024, "one block's pages, of the fifty blocks' 51,200"


def test_whoever_set_the_allocator_keeps_his_settings(start_python):
    assert run(start_python, FAULTS, MALLOC_ARENA_MAX="2")[0] == "False"


def test_what_is_free_amid_the_heap_is_given_back(start_python):
    kept, num_bytes = run(start_python, GIVEN_BACK)
    assert kept == "True"
    assert num_bytes > 24 << 20, "most of eight blocks of 4 MiB"
