"""What hostile or broken callers send to the local socket: each is refused in words, and the server goes on."""

import contextlib
import fcntl
import mmap
import os
import socket
import sys
import tempfile
import threading

import numpy as np
import pytest

from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire import work_pb2 as work
from pyps_wire.errors import InvalidArgument, NotAllowed, PypsError, Superseded, UnknownWorker
from pyps_wire.partition import Model, Tensor
from support import status_of, wait_until
from wire_worker import (
    LENGTH,
    QUICK_LEASES,
    SEALS,
    LocalSocket,
    LocalWorker,
    beating,
    descriptors_of,
    local_worker,
    make_segment,
    maps_of,
)

LARGE = Model((Tensor("x", (400_000,)),), shard_size=160_000)
TWO_SHARDS = Model((Tensor("x", (32,)),), shard_size=16)
PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def joined(server, worker_id: str = "a", **options):
    with LocalWorker(server.data, worker_id, **options) as worker:
        worker.join()
        yield worker


def refusal_of(worker: LocalWorker, request: local.LocalRequest, *descriptors: int) -> PypsError:
    link = LocalSocket(worker.offer.address)
    try:
        with pytest.raises(PypsError) as caught:
            link.ask(request, *descriptors)
        assert link.is_closed_by_the_server
    finally:
        link.close()
    return caught.value


def vectors(*offsets: int, codec: int = common.CODEC_FLOAT32) -> local.LocalVectors:
    return local.LocalVectors(codec=codec, offsets=offsets)


def test_vectors_that_cannot_lie_so_are_refused(start_server_process):
    server = start_server_process()
    with joined(server) as worker:
        for fields, words in (
            ({"parameters": vectors(2 * PAGE + 64 * 1024)}, "of a segment of"),
            ({"parameters": vectors(2**64 - 64)}, "of a segment of"),
            ({"parameters": vectors(2 * PAGE + 1)}, "multiple of 64"),
            ({"parameters": vectors(PAGE)}, "where what lies before it ends"),
            ({"parameters": vectors(PAGE + 64)}, "where what lies before it ends"),
            ({"parameters": vectors(0)}, "before 64"),
            ({"parameters": vectors()}, "names 0 vectors; the model has 1 groups"),
            ({"parameters": vectors(PAGE, 2 * PAGE)}, "names 2 vectors; the model has 1 groups"),
            ({"parameters": vectors(2 * PAGE, codec=17)}, "codec is 17"),
            ({"gradients": []}, "0 sets of gradients"),
            ({"gradients": [vectors(PAGE)] * 5}, "5 sets of gradients"),
            ({"segment_bytes": 3 * PAGE + 64 * PAGE}, "need"),
            ({"segment_bytes": 2 * PAGE}, "of a segment of 8192 bytes"),
            ({"segment_bytes": 4 * PAGE}, "has 12288 bytes, and Attach says 16384"),
        ):
            error = refusal_of(worker, worker.attach_request(**fields), worker.descriptor)
            assert isinstance(error, InvalidArgument)
            assert words in str(error)
            assert maps_of(server.pid) == []
        worker.attach()


def test_memory_that_its_worker_could_take_away_is_refused(start_server_process):
    server = start_server_process()
    with joined(server) as worker, tempfile.TemporaryFile() as file:
        size = worker.layout.num_bytes
        file.truncate(size)
        read_only = make_segment(size)
        sparse = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(sparse, size)
        fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, SEALS)
        cases = [
            (make_segment(size, seals=fcntl.F_SEAL_SEAL), "seals are 0x1:"),
            (make_segment(size, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), "seals are 0x6:"),
            (make_segment(size, seals=SEALS | fcntl.F_SEAL_WRITE), "not against writing"),
            (make_segment(size, seals=SEALS | 0x10), "not against writing"),
            (make_segment(size - PAGE), f"has {size - PAGE} bytes"),
            (os.open(f"/proc/self/fd/{read_only}", os.O_RDONLY), "cannot be mapped"),
            (sparse, f"0 of the segment's {size} bytes are there: allocate it in full"),
            (os.dup(file.fileno()), "no memfd"),
            (os.open("/dev/null", os.O_RDWR), "no memfd"),
        ]
        for descriptor, words in cases:
            error = refusal_of(worker, worker.attach_request(), descriptor)
            assert isinstance(error, InvalidArgument)
            assert words in str(error)
            os.close(descriptor)
        os.close(read_only)
        wait_until(lambda: not any("memfd" in name for name in descriptors_of(server.pid)), 60, "no memfd left")
        assert maps_of(server.pid) == []


def test_memory_in_huge_pages_is_refused(start_server):
    size = 2 * 2**20
    model = Model((Tensor("x", (size // 8 - 2048,)),))
    descriptor = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    with joined(start_server(), model=model) as worker:
        # As many bytes as two vectors need, rounded up to huge pages.
        assert worker.layout.num_bytes <= size
        request = worker.attach_request(segment_bytes=size)
        error = refusal_of(worker, request, descriptor)
        assert f"pages of {size} bytes" in str(error)
    os.close(descriptor)


def test_one_descriptor_comes_with_attach_and_none_else_stays_open(start_server_process):
    server = start_server_process()
    with joined(server) as worker:
        before = len(descriptors_of(server.pid))
        error = refusal_of(worker, worker.attach_request())
        assert "with the segment's descriptor" in str(error)
        refusal_of(worker, worker.attach_request(ticket=b"no"), *[worker.descriptor] * 50)
        link = worker.attach()
        # Later ones are nobody's.
        link.send(worker.exchange_request(), *[worker.descriptor] * 3)
        assert link.receive().exchanged.replies[0].version == 1
        # The socket, and the descriptor that the mapping keeps.
        assert len(descriptors_of(server.pid)) == before + 2
        worker.detach()
        wait_until(lambda: len(descriptors_of(server.pid)) == before, 60, "no descriptor left")


def test_a_ticket_is_of_one_life_of_a_worker_for_one_use_and_a_short_time(start_server, monkeypatch):
    server = start_server()
    with joined(server, "a") as a, joined(server, "b") as b:

        def refused(ticket: bytes, **fields: object) -> bool:
            error = refusal_of(a, a.attach_request(ticket=ticket, **fields), a.descriptor)
            return isinstance(error, NotAllowed) and "ticket" in str(error)

        own = a.hello().local.ticket
        assert all(map(refused, (b"", bytes(16), b.offer.ticket)))
        earlier = common.Sender()
        earlier.CopyFrom(a.sender)
        earlier.incarnation -= 1
        error = refusal_of(a, a.attach_request(ticket=own, sender=earlier), a.descriptor)
        assert isinstance(error, Superseded)
        # Several threads of a worker may have said Hello meanwhile.
        newer = a.hello().local.ticket
        for ticket in (own, newer):
            a.offer.ticket = ticket
            a.attach()
            assert refused(ticket)
        monkeypatch.setattr("pyps.service.listener.TICKET_SECONDS", 0.0)
        assert refused(a.hello().local.ticket)
        # Nor is any of them kept for ever.
        monkeypatch.undo()
        first, *_ = [a.hello().local.ticket for _ in range(5)]
        assert refused(first)
        assert "ticket" not in server.output()
        # One that is right, for another run.
        strange = a.attach_request()
        strange.attach.sender.run_id = "other"
        assert "'other'" in str(refusal_of(a, strange, a.descriptor))
        # One that is right, for a worker that nobody knows any more.
        reset = b.attach_request()
        b.leave()
        reset.attach.sender.run_id = "other"
        error = refusal_of(b, reset, b.descriptor)
        assert "'other'" in str(error)


def test_a_request_before_attach_is_refused(start_server):
    with joined(start_server()) as worker:
        for request in (worker.exchange_request(), worker.pull_request(), local.LocalRequest()):
            error = refusal_of(worker, request, worker.descriptor)
            assert "LocalAttach" in str(error)


def test_nobody_speaks_for_another_worker_or_of_what_was_not_attached(start_server):
    with local_worker(start_server().data, model=TWO_SHARDS) as worker:

        def refused(request: local.LocalRequest, words: str) -> None:
            with pytest.raises(InvalidArgument, match=words):
                worker.link.ask(request)

        for field, value in (("worker_id", "b"), ("incarnation", 1), ("run_id", "other")):
            request = worker.exchange_request()
            request.exchange.shards[0].sender.CopyFrom(worker.sender)
            setattr(request.exchange.shards[0].sender, field, value)
            refused(request, "on a connection of worker 'a'")
        refused(worker.exchange_request([7]), "shard 7 is not on server 0")
        refused(worker.exchange_request(gradients=1), "gradients 1; 1 were attached")
        refused(worker.exchange_request(each={"codec": common.CODEC_FLOAT16}), "codec 2")
        refused(worker.exchange_request(each={"reply_codec": common.CODEC_FLOAT16}), "codec 2")
        refused(worker.exchange_request(each={"base_version": 5}), "version 5")
        refused(worker.exchange_request(each={"learning_rate": -1.0}), "learning_rate")
        refused(worker.exchange_request(each={"momentum": 1.5}), "momentum is 1.5")
        refused(worker.attach_request(), "attached once a connection")
        refused(worker.exchange_request([0, 0]), "a shard twice")
        two = worker.exchange_request([0, 1])
        two.exchange.shards[1].sequence += 1
        refused(two, "one sequence")
        refused(local.LocalRequest(exchange=local.LocalExchange()), "names no shard")
        for fields, words in (
            ({"wants": [wire.PullRequest.Want(shard_id=0)] * 40}, "names 40 shards, and this server holds 2"),
            ({"portion": work.LeaseRequest(sender=worker.sender)}, "wants a portion"),
            ({"codec": common.CODEC_FLOAT16}, "attached with float32"),
        ):
            request = wire.PullRequest(sender=worker.sender, epoch=worker.epoch, **fields)
            refused(local.LocalRequest(pull=local.LocalPull(request=request)), words)
        assert worker.exchange()[0].version == 1


def test_extents_that_lie_elsewhere_are_refused(start_server):
    with local_worker(start_server().data) as worker:
        for extents, words in (
            ([(30, 8)], "ends at 38"),
            ([(0, 0)], "at least 1"),
            ([(5, 5), (0, 5)], "before 10"),
            ([(0, 30), (0, 30)], "longer than shard 0"),
            ([(2**63, 2)], "the shard has 37"),
            ([(0, 2**63)], "longer than shard 0"),
        ):
            each = {"extents": [common.Extent(offset=offset, length=length) for offset, length in extents]}
            with pytest.raises(InvalidArgument, match=words):
                worker.exchange(each=each)
        assert worker.exchange()[0].version == 1


def test_a_crowd_of_extents_is_refused_before_it_is_read(start_server):
    model = Model((Tensor("x", (200_000,)),))
    with local_worker(start_server().data, model=model) as worker:
        crowd = [common.Extent(offset=2 * index, length=1) for index in range(66_000)]
        with pytest.raises(InvalidArgument, match="66000 extents"):
            worker.exchange([0], each={"extents": crowd})
        worker.gradients[0][0][:] = 1.0
        worker.exchange([0], each={"extents": crowd[:10_000]})
        assert worker.parameters[0].sum() == -10_000


def test_a_request_that_could_list_millions_is_refused_before_it_comes(start_server):
    with local_worker(start_server().data) as worker:
        worker.link.socket.sendall(LENGTH.pack(4 * 2**20))
        failure = worker.link.receive().failure
        assert (failure.name, worker.link.is_closed_by_the_server) == ("LimitExceeded", True)
        assert "list less in it" in failure.details


def test_messages_that_are_none_or_too_long_end_their_connection_alone(start_server_process):
    server = start_server_process("--max-message-bytes", "65536")
    with local_worker(server.data, "good") as good, joined(server) as worker:

        def ends(data: bytes) -> str:
            link = LocalSocket(worker.offer.address)
            link.socket.sendall(data)
            failure = link.receive().failure
            assert link.is_closed_by_the_server
            link.close()
            return failure.name

        assert ends(LENGTH.pack(5) + b"\xff" * 5) == "MalformedFrame"
        assert ends(LENGTH.pack(2**32 - 1)) == "LimitExceeded"
        worker.attach()
        worker.link.socket.sendall(LENGTH.pack(65_537))
        assert worker.link.receive().failure.name == "LimitExceeded"
        assert worker.link.is_closed_by_the_server
        worker.attach()
        worker.link.socket.sendall(LENGTH.pack(3) + b"\xff" * 3)
        assert worker.link.receive().failure.name == "MalformedFrame"
        assert worker.link.is_closed_by_the_server
        worker.attach()
        worker.link.socket.sendall(LENGTH.pack(60_000) + bytes(100))
        worker.detach()
        assert good.exchange()[0].version == 1
        wait_until(lambda: len(maps_of(server.pid)) == 1, 60, "the vanished worker's memory unmapped")


def test_silent_callers_are_hung_up_on_and_kept_few(start_server):
    server = start_server("--max-workers", "4")
    with local_worker(server.data, "good") as good:
        silent = [LocalSocket(good.offer.address) for _ in range(24)]
        for caller in silent[:4]:
            assert caller.is_closed_by_the_server
        assert good.exchange()[0].version == 1
        # After ten seconds of silence.
        assert silent[-1].is_closed_by_the_server
        with joined(server, "late") as late:
            late.attach()
        for caller in silent:
            caller.close()


def test_a_caller_of_another_user_is_turned_away(start_server):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    server = start_server()
    with joined(server) as worker:
        code = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(20);"
            "s.connect('\\0' + sys.argv[1]); sys.exit(len(s.recv(1)))"
        )
        # Root itself comes from another process in the same way, and stays.
        assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code, worker.offer.address[1:]]) == 0
        wait_until(lambda: "it is another user's process" in server.output(), 60, "the warning")
        worker.attach()


def test_nan_that_appears_between_the_look_and_the_update_never_reaches_the_parameters(start_server):
    server = start_server()
    with local_worker(server.data, model=LARGE) as worker:
        gradient, ends = worker.gradients[0][0], threading.Event()

        def flip() -> None:
            while not ends.is_set():
                gradient[:] = np.nan
                gradient[:] = 1.0

        flipper = threading.Thread(target=flip)
        flipper.start()
        try:
            outcomes: set[int] = set()

            def both_were_met() -> bool:
                for _ in range(100):
                    outcomes.update(reply.receipt.outcome for reply in worker.exchange())
                    assert np.isfinite(worker.parameters[0]).all()
                return {common.OUTCOME_APPLIED, common.OUTCOME_REJECTED} <= outcomes

            wait_until(both_were_met, 60, f"a NaN that is seen and one that is not: {outcomes}")
        finally:
            ends.set()
            flipper.join(20)
        assert outcomes == {common.OUTCOME_APPLIED, common.OUTCOME_REJECTED}
        for shard in worker.pull():
            assert np.isfinite(np.frombuffer(shard.payload, np.float32)).all()


def test_a_worker_that_the_server_does_not_know_any_more_cannot_attach(start_server_process):
    server = start_server_process(*QUICK_LEASES)
    with local_worker(server.data) as worker:
        # Its lease runs out: the server hangs up.
        assert worker.link.is_closed_by_the_server
        wait_until(lambda: maps_of(server.pid) == [], 60, "the memory unmapped")
        with beating([worker]):
            worker.attach()
            assert worker.exchange()[0].version == 1
        unknown = LocalWorker(server.data, "unknown")
        unknown.offer = wire.LocalTransport(address=worker.offer.address, ticket=bytes(16))
        with pytest.raises((NotAllowed, UnknownWorker)), unknown:
            unknown.attach()


def test_a_caller_that_takes_no_answers_holds_up_nobody(start_server):
    server = start_server()
    with local_worker(server.data, "deaf") as deaf, local_worker(server.data, "good") as good:
        request = deaf.exchange_request(pull=False).SerializeToString()
        frame = LENGTH.pack(len(request)) + request
        deaf.link.socket.settimeout(0.2)
        deaf.link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(TimeoutError):
            while True:
                # Until neither direction takes any more.
                deaf.link.socket.sendall(frame * 50)
        good.exchange()
        assert status_of(server).version_max >= 1
