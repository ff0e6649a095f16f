"""A worker's memory in the server: how long it is touched, and that a closed link leaves a push undone."""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from pyps.config import ServerConfig
from pyps.core.gradient import Gradient, Reply
from pyps.service.shm import listener
from pyps.service.shm.segment import AT_ONCE_BYTES, Segment
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import ServerUnavailable
from shards import make_shard, roster
from wire_worker import make_segment

LENGTH = 1024


class Memory:
    """A segment, and what it has handed over to threads."""

    def __init__(self, num_bytes: int):
        self.handed_over: list[Callable[[], None]] = []
        descriptor = make_segment(num_bytes)
        self.segment = Segment(descriptor, num_bytes=num_bytes, hand_over=self.handed_over.append)
        os.close(descriptor)

    @property
    def is_mapped(self) -> bool:
        return not self.segment._memory.closed


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(8 * LENGTH)
    yield made
    made.segment.close()


def gradient_in(view: memoryview) -> Gradient:
    return Gradient("a", 1, 1, base_version=0, epoch=0, codec=FLOAT32, payload=view, volatile=True)


@pytest.mark.parametrize("pulls", [True, False])
def test_a_push_is_left_undone_once_its_memory_is_attached_no_longer(memory, pulls):
    numbers, place = memory.segment.view(0, 4 * LENGTH), memory.segment.view(4 * LENGTH, 4 * LENGTH)
    shard = make_shard(np.ones(LENGTH, np.float32))
    reply = Reply(place, 0, FLOAT32) if pulls else None
    np.frombuffer(numbers, np.float32)[:] = 1.0
    memory.segment.hold()
    memory.segment.close()
    with pytest.raises(ServerUnavailable, match="attached no longer"):
        shard.push(gradient_in(numbers), roster=roster(), reply=reply, memory=memory.segment)
    assert (shard.version, shard.num_receipts) == (0, 0)
    assert not np.frombuffer(place, np.float32).any()
    # It has no receipt: sent again over another transport it is applied.
    receipt = shard.push(gradient_in(numbers), roster=roster()).receipt
    assert (receipt.version_after, receipt.duplicate) == (1, False)
    memory.segment.let_go()


def test_memory_is_used_until_the_last_lets_go_and_cannot_be_held_once_it_is_closed(memory):
    memory.segment.hold()
    memory.segment.hold()
    memory.segment.close()
    with pytest.raises(ServerUnavailable):
        memory.segment.hold()
    memory.segment.let_go()
    assert not memory.segment.unused.done()
    assert memory.is_mapped
    memory.segment.let_go()
    assert memory.segment.unused.done()
    assert not memory.is_mapped


def test_large_memory_is_unmapped_on_a_thread():
    memory = Memory(AT_ONCE_BYTES)
    view = memory.segment.view(0, AT_ONCE_BYTES)
    view[-1] = 1
    memory.segment.close()
    # A wait for the end of its use does not include the unmapping.
    assert memory.segment.unused.done()
    assert memory.is_mapped
    [unmap] = memory.handed_over
    unmap()
    assert not memory.is_mapped


def test_hello_is_refused_while_an_earlier_request_does_not_end(memory, monkeypatch):
    monkeypatch.setattr(listener, "UNUSED_SECONDS", 0.05)

    async def come_back() -> None:
        with ThreadPoolExecutor(1) as executor:
            server = listener.SharedMemory(SimpleNamespace(config=ServerConfig()))
            memory.segment.hold()
            memory.segment.close()
            server._leaving.append(("a", memory.segment))
            with pytest.raises(ServerUnavailable, match=r"'a' that was cut off has worked in its memory for 0\.05 s"):
                await server.wait_unused("a")
            await server.wait_unused("another")
            waits = asyncio.create_task(server.wait_unused("a"))
            await asyncio.sleep(0)
            executor.submit(memory.segment.let_go)
            await waits

    asyncio.run(come_back())
