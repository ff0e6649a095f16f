import errno
import faulthandler
import fcntl
import gc
import os
import signal
import weakref

import numpy as np
import pytest

from pyps_client.launch import Launch
from pyps_client.transport.memory import ALIGNMENT_BYTES, Layout, Lent, Segment
from pyps_client.transport.sharing import Sharing
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32
from pyps_wire.common_pb2 import Sender
from pyps_wire.partition import Model, Tensor, partition

MODEL = Model((Tensor("a", (1000,)), Tensor("empty", (0,), 1), Tensor("b", (7,), 2)))
LAYOUT = Layout(MODEL, BFLOAT16, FLOAT32, 2)


@pytest.fixture(params=["segment", "own memory"])
def lent(request: pytest.FixtureRequest) -> Lent:
    return LAYOUT.vectors(Segment(LAYOUT.num_bytes) if request.param == "segment" else None)


def test_vectors_are_of_the_codecs_types_zero_aligned_and_apart(lent):
    assert [[vector.size for vector in vectors] for vectors in (lent.parameters, *lent.gradients)] == [[1000, 0, 7]] * 3
    assert {vector.dtype for vector in lent.parameters} == {FLOAT32.dtype}
    assert {vector.dtype for vectors in lent.gradients for vector in vectors} == {BFLOAT16.dtype}
    everything = [vector for vectors in (lent.parameters, *lent.gradients) for vector in vectors if vector.size]
    for number, vector in enumerate(everything, start=1):
        assert vector.ctypes.data % ALIGNMENT_BYTES == 0
        assert vector.flags.writeable
        assert not vector.any()
        vector[:] = number
    assert [set(vector.tolist()) for vector in everything] == [{number} for number in range(1, len(everything) + 1)]


def test_private_memory_is_float32_if_it_is_converted_when_it_is_sent():
    layout = Layout(MODEL, BFLOAT16, FLOAT16, 2, converts=True)
    own, shared = layout.vectors(), layout.vectors(Segment(layout.num_bytes))
    dtypes = [{vector.dtype.name for vector in (*lent.parameters, *lent.gradients[0])} for lent in (own, shared)]
    assert dtypes == [{"float32"}, {"float16", "uint16"}]
    assert (own.converted_to, shared.converted_to) == (BFLOAT16, None)


def test_lent_vectors_are_known_by_themselves_not_by_their_numbers(lent):
    sharing = Sharing(Launch(servers=("a:1",)), partition(MODEL, num_servers=1), [], Sender())
    assert sharing.gradients(lent.gradients[0]) is None
    sharing._lent = lent
    assert [sharing.gradients(vectors) for vectors in lent.gradients] == [0, 1]
    assert sharing.gradients(list(lent.gradients[1])) == 1
    assert sharing.are_parameters(lent.parameters)
    for others in (lent.parameters, [vector.copy() for vector in lent.gradients[0]], lent.gradients[0][:1], []):
        assert sharing.gradients(others) is None
    mixed = [lent.gradients[0][0], *lent.gradients[1][1:]]
    assert sharing.gradients(mixed) is None
    assert not sharing.are_parameters([vector.copy() for vector in lent.parameters])


def test_the_request_to_attach_says_where_the_numbers_are():
    segment = Segment(LAYOUT.num_bytes)
    lent = LAYOUT.vectors(segment)
    lent.gradients[1][0][:] = 0x3F80
    lent.parameters[2][:] = 0.5

    attach = LAYOUT.attach_request(Sender(worker_id="a"), b"ticket").attach

    whole = os.pread(segment.fd, segment.num_bytes, 0)
    assert attach.segment_bytes == len(whole)
    assert int.from_bytes(whole[:8], "little") == segment.nonce
    gradient = np.frombuffer(whole, np.uint16, 1000, attach.gradients[1].offsets[0])
    assert set(gradient.tolist()) == {0x3F80}
    assert np.frombuffer(whole, np.float32, 7, attach.parameters.offsets[2]).tolist() == [0.5] * 7
    assert (attach.gradients[0].codec, attach.parameters.codec) == (BFLOAT16, FLOAT32)


def test_a_segment_can_neither_shrink_nor_grow_and_goes_with_its_last_vector():
    segment = Segment(1 << 20)
    seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (4096, 1 << 21):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, size)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20, "allocated in full"
    vector = segment.vector(4096, 100, np.dtype(np.float32))
    descriptor, gone = segment.fd, weakref.ref(segment)

    del segment
    gc.collect()

    assert gone() is None
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    vector[:] = 1.0
    assert vector.sum() == 100.0


def test_memory_that_the_system_lacks_is_an_error_of_the_new_segment(monkeypatch):
    """No machine of the tests runs out of memory, so its answer is given in its place."""
    descriptors: list[int] = []

    def refuse(descriptor: int, *_: int) -> None:
        descriptors.append(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        Segment(1 << 20)
    [descriptor] = descriptors
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_forked_childs_writes_stay_its_own_and_other_pages_are_shared():
    segment = Segment(1 << 16)
    vector = segment.vector(4096, 2048, np.dtype(np.float32))
    (reading, writing), (hearing, telling) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # A page of its own, and one that it only reads.
        vector[:1024] = 2.0
        os.write(telling, b"written")
        os.read(reading, 1)
        os._exit(0 if (set(vector[:1024].tolist()), set(vector[1024:].tolist())) == ({2.0}, {7.0}) else 1)
    os.read(hearing, 7)
    assert not vector.any()
    vector[:] = 7.0
    os.write(writing, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(vector.tolist()) == {7.0}


def test_a_forked_child_that_gets_no_copy_can_read_but_not_write():
    segment = Segment(1 << 16)
    vector = segment.vector(4096, 1024, np.dtype(np.float32))
    vector[:] = 1.0
    # What mmap refuses.
    segment.fd = -1
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        if set(vector.tolist()) == {1.0}:
            vector[:] = 2.0
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert set(vector.tolist()) == {1.0}
