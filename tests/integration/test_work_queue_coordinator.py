"""The WorkQueue service on a real server for a coordinator: its passes, its end, and others after it."""

from __future__ import annotations

from inspection import inspect
from pyps_wire import work_pb2 as wire
from wire_coordinator import COORDINATED, Coordinator, Portions, WireCoordinator, opened, wait_for_waits, work_of
from wire_worker import crew, refusal_of


def test_a_coordinator_makes_a_pass_and_hears_what_it_came_to(start_server):
    server = start_server()
    with opened(server, 2, COORDINATED) as [a, b]:
        coordinator = Coordinator(a.worker)
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


def test_a_coordinator_s_wait_ends_with_the_progress(start_server):
    server = start_server()
    with opened(server, 1, COORDINATED) as [a]:
        coordinator = Coordinator(a.worker)
        coordinator.begin(1, num_portions=4)
        a.lease()
        reply = coordinator.wait(1, 0.2)
        assert not reply.complete
        assert (reply.progress.running, reply.progress.pending) == (1, 3)


def test_a_coordinator_waits_for_workers_that_open_a_data_set(start_server):
    server = start_server()
    with crew(server, 1) as [worker]:
        coordinator = Coordinator(worker)
        assert not coordinator.wait(0, 0.1).progress.HasField("data")
        call = coordinator.waiting(0)
        assert wait_for_waits(server, 1)[0].startswith("the coordinator waits for workers that open a data set")
        Portions(worker).open(COORDINATED)
        assert call.result(60).progress.data.num_examples == 20


def test_an_earlier_coordinator_is_refused_also_amid_its_wait(start_server):
    server = start_server()
    with opened(server, 1, COORDINATED) as [a]:
        former, present = Coordinator(a.worker), Coordinator(a.worker, epoch=2)
        former.begin(1)
        call = former.waiting(1)
        wait_for_waits(server, 1)
        present.begin(2)
        status, name, text = refusal_of(lambda: call.result(60))
        assert (status, name) == ("ABORTED", "Superseded")
        assert text == "coordinator 1 was followed by coordinator 2: stop this one"


def test_waits_end_with_the_run_and_with_its_reset(start_server):
    server = start_server()
    with opened(server, 1, COORDINATED) as [a]:
        coordinator = Coordinator(a.worker)
        coordinator.begin(1, copies_max=1)
        calls = [a.waiting(), coordinator.waiting(1)]
        a.held = [calls[0].result(60).portion.lease_id]
        wait_for_waits(server, 1)
        inspect(server.control, "Stop")
        assert refusal_of(lambda: calls[1].result(60))[1] == "RunFinished"
        assert a.lease(None, 10.0).message == "the run has finished"


def test_a_coordinator_that_was_followed_begins_no_pass_any_more(start_server):
    server = start_server("--protocol", "sandblaster")
    with opened(server, 1, COORDINATED) as [a]:
        lives = [WireCoordinator(a.worker).attach().coordinator_epoch for _ in range(2)]
        former, present = (Coordinator(a.worker, epoch=epoch) for epoch in lives)

        status, name, text = refusal_of(former.begin, 1)

        assert (status, name) == ("ABORTED", "Superseded")
        assert text == "coordinator 1 was followed by coordinator 2: stop this one"
        assert present.begin(1).num_workers == 1
        assert present.wait(1).progress.pending == 2


def test_work_that_was_ended_goes_on_with_the_next_coordinator(start_server):
    server = start_server("--protocol", "sandblaster")
    with opened(server, 1, COORDINATED) as [a]:
        Coordinator(a.worker, epoch=WireCoordinator(a.worker).attach().coordinator_epoch).end("enough")
        assert a.lease().outcome == wire.LeaseReply.OUTCOME_ENDED
        assert work_of(server).ended

        present = Coordinator(a.worker, epoch=WireCoordinator(a.worker).attach().coordinator_epoch)

        assert not work_of(server).ended
        # Workers that come before its first pass wait for it.
        assert a.lease().outcome == wire.LeaseReply.OUTCOME_NOTHING_NOW
        present.begin(1)
        assert a.lease().outcome == wire.LeaseReply.OUTCOME_LEASED


def test_a_coordinator_that_waits_hears_that_another_attached(start_server):
    server = start_server("--protocol", "sandblaster")
    with opened(server, 1, COORDINATED) as [a]:
        former = Coordinator(a.worker, epoch=WireCoordinator(a.worker).attach().coordinator_epoch)
        former.begin(1)
        call = former.waiting(1)
        wait_for_waits(server, 1)

        WireCoordinator(a.worker).attach()

        assert refusal_of(lambda: call.result(60))[1] == "Superseded"
