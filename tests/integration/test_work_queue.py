"""The WorkQueue service on a real server: workers, deaths, waits, a coordinator, and what people see of it."""

from __future__ import annotations

import contextlib
import json
import math
import urllib.request
from functools import partial

from client_support import Clock
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as wire
from pyps_wire.contract import WORK_QUEUE, stub_of
from sandblaster import WireCoordinator
from support import DEADLINE_SECONDS, inspect, shell, status_of, wait_for_event, wait_until
from wire_worker import QUICK_LEASES, WireWorker, beating, crew, refusal_of

TRAIN = wire.DataSpec(name="train", num_examples=20, portion_examples=4)
COORDINATED = wire.DataSpec(name="train", num_examples=20, coordinated=True)


def test_updates_of_an_epoch_follow_the_growing_minibatch(start_server):
    """A4: b(e) never falls, and an epoch has ceil(N / (K b(e))) updates, each of a portion."""
    growth = ("--batch-growth", "start=4,maximum=16,every=1", "--epoch-examples", "100")
    server = start_server("--protocol", "asgd:accumulate=2", *growth)
    with opened(server, 1, wire.DataSpec(name="train", num_examples=100, batch_size=4)) as [a]:
        for epoch, size in enumerate((4, 8, 16, 16)):
            a.finish(epoch)
            assert work_of(server).num_portions == math.ceil(100 / (2 * size)), epoch
            assert counted(server, epoch) == list(range(100))


def test_a_worker_waits_for_the_last_portions_and_is_answered_when_they_are_delivered(start_server):
    server = start_server()
    with opened(server) as [a, b]:
        last = [b.lease(0) for _ in range(5)]
        call = a.waiting(1)
        [wait] = wait_for_waits(server, 1)
        assert wait == "w0 waits for a portion, for w1"
        for leased in last:
            b.deliver(leased)
        reply = call.result(60)
        assert (reply.outcome, getattr(reply, "pass")) == (wire.LeaseReply.OUTCOME_LEASED, 1)
        assert not status_of(server).waiting_for


def test_a_wait_for_a_portion_ends_by_its_deadline_with_the_names(start_server):
    server = start_server()
    with opened(server) as [a, b]:
        for _ in range(5):
            b.lease(0)
        status, name, text = refusal_of(a.lease, 0, 0.3)
        assert (status, name) == ("DEADLINE_EXCEEDED", "WaitTimedOut")
        assert text == "after 0.3 s: w0 waits for a portion, for w1"
        assert a.lease(0).outcome == wire.LeaseReply.OUTCOME_NOTHING_NOW


def test_a_call_that_is_cancelled_takes_nothing_from_those_that_wait(start_server):
    server = start_server("--lease-seconds", "60")
    with opened(server, 3) as [a, b, c]:
        for _ in range(5):
            b.lease(0)
        given_up, call = a.waiting(0), c.waiting(0)
        wait_for_waits(server, 2)
        given_up.cancel()
        wait_for_waits(server, 1)
        b.worker.leave()
        reply = call.result(60)
        assert reply.outcome == wire.LeaseReply.OUTCOME_LEASED
        assert work_of(server).running == 1


def test_what_a_dead_worker_held_goes_to_one_that_waits_within_its_lease(start_server):
    clock = Clock()
    server = start_server(*QUICK_LEASES, clock=clock)
    with opened(server) as [dead, alive]:
        lost = [dead.lease(0) for _ in range(5)]
        with beating([alive.worker]):
            asking = partial(alive.stub.Lease, alive.request(0, 50.0), timeout=DEADLINE_SECONDS)
            reply = clock.during(asking, server, living=["w1"])
            assert reply.outcome == wire.LeaseReply.OUTCOME_LEASED
            alive.held = [reply.portion.lease_id]
            assert alive.deliver(reply).accepted
            alive.finish(0)
            assert not dead.deliver(lost[0]).accepted
            assert counted(server, 0) == list(range(20))
        assert "worker w0, portions 5" in wait_for_event(server, "work", "lost worker")
        assert work_of(server).lost == 5


def test_a_worker_that_says_hello_anew_leaves_its_portions_to_others(start_server):
    server = start_server()
    with opened(server) as [a, b]:
        former = a.lease(0)
        with WireWorker(server.data, "w0") as again:
            again.hello()
            assert work_of(server).running == 0
            status, name, _ = refusal_of(a.deliver, former)
            assert (status, name) == ("ABORTED", "Superseded")
        b.finish(0)


def test_a_wait_for_a_portion_ends_with_the_server_s_run(start_server):
    for reset in (True, False):
        server = start_server()
        with opened(server) as [a, b]:
            for _ in range(5):
                b.lease(0)
            call = a.waiting(0)
            wait_for_waits(server, 1)
            if reset:
                inspect(server.control, "Reset", pb.ResetRequest(run_id="run-1"))
                assert refusal_of(lambda call=call: call.result(60))[1] == "NotInitialized"
            else:
                server.stop()
                assert refusal_of(lambda call=call: call.result(60))[0] == "UNAVAILABLE"


def test_strangers_are_refused(start_server):
    server = start_server()
    with WireWorker(server.data, "a") as worker:
        assert refusal_of(Portions(worker).open)[1] == "NotInitialized"
        assert refusal_of(WireCoordinator(worker, epoch=1).wait, 1)[1] == "NotInitialized"
        worker.join()
        with WireWorker(server.data, "stranger") as stranger:
            assert refusal_of(Portions(stranger).open)[1] == "UnknownWorker"
        with WireWorker(server.data, "a", run_id="other") as other:
            assert refusal_of(Portions(other).open)[1] == "RunMismatch"
            assert refusal_of(WireCoordinator(other, run_id="other", epoch=1).wait, 0)[1] == "RunMismatch"


def test_another_server_than_the_first_says_where_to_ask(start_server):
    server = start_server()
    with WireWorker(server.data, "a", server_index=1, num_servers=2) as worker:
        worker.hello()
        worker.initialize(0)
        status, _, text = refusal_of(Portions(worker).open)
        assert status == "INVALID_ARGUMENT"
        assert text == "this is server 1: ask server 0, which hands out the data set"


def test_a_coordinator_makes_a_pass_and_hears_what_it_came_to(start_server):
    server = start_server("--protocol", "sandblaster")
    with opened(server, 2, COORDINATED) as [a, b]:
        coordinator = attached(a.worker)
        asked = a.waiting()
        [wait] = wait_for_waits(server, 1)
        assert wait == "w0 waits for a portion, for the coordinator"
        assert coordinator.begin(1, scalars={"loss": 0.5}).num_workers == 2
        first = asked.result(60)
        a.held = [first.portion.lease_id]
        end = coordinator.waiting(1)
        second, copy = b.lease(), b.lease()
        assert copy.portion.portion_id == first.portion.portion_id
        assert b.claim(copy).granted
        refused = a.claim(first)
        assert (refused.granted, refused.message) == (False, "portion 0 was claimed by worker 'w1' before")
        a.held = []
        assert b.claim(second).granted
        assert not coordinator.wait(1).complete
        invented = wire.DeliverRequest(
            sender=b.worker.sender, lease_ids=[copy.portion.lease_id], stage_id=2**64 - 1, example_count=10
        )
        assert "which is none of its leases" in refusal_of(lambda: b.stub.Deliver(invented, timeout=60))[2]
        stages = [leased.portion.lease_id for leased in (copy, second)]
        assert b.deliver(copy, stage_id=stages[0], loss_sum=1.0).accepted
        assert b.deliver(second, stage_id=stages[1], loss_sum=2.0).accepted
        done = end.result(60)
        assert (done.complete, done.loss_sum, done.example_count, list(done.stage_ids)) == (True, 3.0, 20, stages)
        assert (done.progress.stolen, done.progress.wasted, done.progress.scalars["loss"]) == (1, 1, 0.5)
        asked = a.waiting()
        coordinator.end("converged")
        assert (asked.result(60).outcome, asked.result().message) == (wire.LeaseReply.OUTCOME_ENDED, "converged")


def test_a_coordinator_waits_for_workers_that_open_a_data_set(start_server):
    server = start_server()
    with crew(server, 1) as [worker]:
        coordinator = WireCoordinator(worker, epoch=1)
        assert not coordinator.wait(0, 0.1).progress.HasField("data")
        call = coordinator.waiting(0)
        assert wait_for_waits(server, 1)[0].startswith("the coordinator waits for workers that open a data set")
        Portions(worker).open(COORDINATED)
        assert call.result(60).progress.data.num_examples == 20


def test_waits_end_with_the_run_and_with_its_reset(start_server):
    server = start_server("--protocol", "sandblaster")
    with opened(server, 1, COORDINATED) as [a]:
        coordinator = attached(a.worker)
        coordinator.begin(1, copies_max=1)
        calls = [a.waiting(), coordinator.waiting(1)]
        a.held = [calls[0].result(60).portion.lease_id]
        wait_for_waits(server, 1)
        inspect(server.control, "Stop")
        assert refusal_of(lambda: calls[1].result(60))[1] == "RunFinished"
        assert a.lease(None, 10.0).message == "the run has finished"


def test_status_and_metrics_show_the_work(start_server):
    server = start_server()
    with opened(server) as [a, b]:
        for _ in range(2):
            a.deliver(a.lease(0))
        b.lease(0)
        work = work_of(server)
        assert (work.num_portions, work.done, work.running, work.pending) == (5, 2, 1, 2)
        assert work.data == TRAIN
        assert {worker.worker_id: (worker.done, worker.running) for worker in work.workers} == {
            "w0": (2, 0),
            "w1": (0, 1),
        }
        shown = shell("status", "--servers", server.control)
        assert "train, 20 examples" in shown
        assert "2 of 5 done, 1 running, 2 pending" in shown
        [answer] = json.loads(shell("status", "--json", "--servers", server.control))["servers"]
        assert (answer["work"]["done"], answer["work"]["data"]["name"]) == (2, "train")
        page = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60).read().decode()
        assert 'pyps_work_portions{state="done"} 2.0' in page
        assert 'pyps_work_portions{state="pending"} 2.0' in page
        assert "pyps_work_lost_total 0.0" in page


def test_status_without_portions_says_nothing_of_them(start_server):
    server = start_server()
    with crew(server, 1):
        assert "portions" not in shell("status", "--servers", server.control)
        assert not work_of(server).HasField("data")


class Portions:
    def __init__(self, worker: WireWorker) -> None:
        self.worker = worker
        self.stub = stub_of(WORK_QUEUE, worker.channel)
        self.held: list[int] = []

    def open(self, data: wire.DataSpec = TRAIN) -> wire.OpenWorkReply:
        return self.stub.Open(wire.OpenWorkRequest(sender=self.worker.sender, data=data), timeout=DEADLINE_SECONDS)

    def request(self, pass_: int | None = None, seconds: float = 0.0) -> wire.LeaseRequest:
        request = wire.LeaseRequest(sender=self.worker.sender, wait_milliseconds=round(seconds * 1000), held=self.held)
        if pass_ is not None:
            setattr(request, "pass", pass_)
        return request

    def lease(self, pass_: int | None = None, seconds: float = 0.0) -> wire.LeaseReply:
        reply = self.stub.Lease(self.request(pass_, seconds), timeout=DEADLINE_SECONDS)
        if reply.outcome == wire.LeaseReply.OUTCOME_LEASED:
            self.held.append(reply.portion.lease_id)
        return reply

    def waiting(self, pass_: int | None = None, seconds: float = 50.0):
        return self.stub.Lease.future(self.request(pass_, seconds), timeout=DEADLINE_SECONDS)

    def claim(self, leased: wire.LeaseReply) -> wire.ClaimReply:
        request = wire.ClaimRequest(sender=self.worker.sender, lease_id=leased.portion.lease_id)
        return self.stub.Claim(request, timeout=DEADLINE_SECONDS)

    def deliver(self, leased: wire.LeaseReply, *, stage_id: int = 0, loss_sum: float = 0.0) -> wire.DeliverReply:
        request = wire.DeliverRequest(
            sender=self.worker.sender,
            lease_ids=[leased.portion.lease_id],
            stage_id=stage_id,
            loss_sum=loss_sum,
            example_count=leased.portion.stop - leased.portion.start,
        )
        self.held.remove(leased.portion.lease_id)
        return self.stub.Deliver(request, timeout=DEADLINE_SECONDS)

    def finish(self, pass_: int) -> None:
        while (reply := self.lease(pass_)).outcome == wire.LeaseReply.OUTCOME_LEASED:
            assert self.deliver(reply).accepted
        assert reply.outcome == wire.LeaseReply.OUTCOME_PASS_DONE


def attached(worker: WireWorker) -> WireCoordinator:
    coordinator = WireCoordinator(worker)
    coordinator.attach()
    return coordinator


@contextlib.contextmanager
def opened(server, num_workers: int = 2, data: wire.DataSpec = TRAIN):
    with crew(server, num_workers) as workers:
        portions = [Portions(worker) for worker in workers]
        for portion in portions:
            portion.open(data)
        yield portions


def work_of(server, *, deliveries: bool = False) -> wire.WorkProgress:
    return inspect(server.control, "GetWork", wire.GetWorkRequest(deliveries=deliveries))


def counted(server, pass_: int) -> list[int]:
    """The examples of a pass in the delivery log."""
    log = work_of(server, deliveries=True).deliveries
    return sorted(
        example for d in log if getattr(d, "pass") == pass_ for example in range(d.portion.start, d.portion.stop)
    )


def wait_for_waits(server, count: int) -> list[str]:
    return wait_until(lambda: (waits := list(status_of(server).waiting_for)) and len(waits) == count and waits, 60)
