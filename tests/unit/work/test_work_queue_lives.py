"""What goes on with another server, from the queue's state in a checkpoint, and with another coordinator."""

from __future__ import annotations

import json

import pytest

from pyps.work import Ended, Leased, NothingNow, PassDone, WorkQueue
from pyps_wire.errors import BadRequest, StateLost, Superseded
from work_crews import begin, coordinated, counted, plain, spec


def lease(queue: WorkQueue, name: str = "a", pass_: int = 0):
    return queue.lease(name, 1, pass_=pass_, now=0.0)


def deliver(queue: WorkQueue, answer: Leased, name: str = "a"):
    return queue.deliver(name, 1, [answer.lease_id], example_count=answer.portion.num_examples, now=1.0)


def restored(queue: WorkQueue, **more) -> WorkQueue:
    """A queue that goes on from the other's state, which went through JSON."""
    other = WorkQueue(stall_seconds=60, **more)
    other.restore(json.loads(json.dumps(queue.state())))
    return other


def test_what_is_delivered_stays_delivered_and_what_was_running_is_done_again():
    queue = plain(10, 3)
    first, running = lease(queue), lease(queue)
    deliver(queue, first)
    after = restored(queue)
    assert deliver(after, first).accepted
    assert not deliver(after, running).accepted
    given = []
    while isinstance(answer := lease(after), Leased):
        given.append(answer.portion.portion_id)
        deliver(after, answer)
    assert given == [1, 2, 3]
    assert answer == PassDone(0)
    assert counted(after, 0) == list(range(10))


def test_numbers_of_leases_are_never_used_again():
    queue = plain(10, 3)
    before = {lease(queue).lease_id for _ in range(3)}
    kept = queue.state()
    # Given out after the checkpoint: only the owner's first_lease keeps clear of it.
    before.add(lease(queue).lease_id)
    after = WorkQueue(stall_seconds=60, first_lease=500)
    after.restore(kept)
    assert lease(after).lease_id >= 500
    late = restored(queue, first_lease=2)
    assert lease(late).lease_id > max(before)


def test_a_pass_goes_on_as_it_was_cut_whatever_the_settings_are_now():
    queue = WorkQueue(stall_seconds=60, batch_size_of=lambda epoch: 4)
    queue.open(spec(40, 0), worker_id="a")
    after = restored(queue, batch_size_of=lambda epoch: 8)
    answer = lease(after)
    assert (answer.portion.num_examples, answer.batch_size) == (4, 4)
    while isinstance(answer, Leased):
        deliver(after, answer)
        answer = lease(after)
    assert lease(after, pass_=1).portion.num_examples == 8


def test_the_data_set_is_known_to_a_restored_server():
    after = restored(plain(10, 3))
    after.open(spec(10, 3), worker_id="a")
    with pytest.raises(BadRequest, match="num_examples 11"):
        after.open(spec(11, 3), worker_id="a")
    # A queue that nobody opened can be kept too.
    after = restored(WorkQueue(stall_seconds=60))
    after.open(spec(10, 3), worker_id="a")
    assert isinstance(lease(after), Leased)


def test_counts_and_passes_go_on():
    queue = plain(3, 3)
    lease(queue)
    queue.release("a", now=0.0, lost=True)
    for pass_ in range(2):
        deliver(queue, lease(queue, pass_=pass_))
    progress = restored(queue).progress(0.0, deliveries=True)
    assert (progress.pass_, progress.passes_done, progress.lost) == (1, 2, 1)
    assert [delivered.pass_ for delivered in progress.deliveries] == [0, 1]


def test_deliveries_of_the_present_pass_and_seven_before_it_are_remembered():
    queue = plain(3, 3)
    for pass_ in range(20):
        deliver(queue, lease(queue, pass_=pass_))
    assert [delivered.pass_ for delivered in queue.progress(0.0, deliveries=True).deliveries] == list(range(12, 20))


def test_what_is_no_state_is_one_sentence():
    with pytest.raises(BadRequest, match="the checkpoint's work queue cannot be read"):
        WorkQueue(stall_seconds=60).restore({"spec": None})


def test_a_restored_server_has_no_pass_under_way_and_says_so():
    queue = coordinated(4)
    begin(queue, 3, epoch=2)
    after = restored(queue)
    assert after.lease("a", 1, now=0.0) == NothingNow(3)
    with pytest.raises(StateLost, match="pass 3 is not under way: the server came back from a checkpoint"):
        after.await_pass(3, coordinator_epoch=2, now=0.0)
    with pytest.raises(BadRequest, match="pass 3 cannot begin"):
        begin(after, 3, epoch=3)
    with pytest.raises(Superseded):
        begin(after, 4, epoch=1)
    begin(after, 4, epoch=3)
    assert isinstance(after.lease("a", 1, now=0.0), Leased)


# Coordinators after each other: from its Attach on one is the only one, and the work goes on with it.


def test_an_attached_coordinator_fences_off_the_one_before_it():
    queue = coordinated(4)
    queue.attach(1)
    queue.attach(2)
    with pytest.raises(Superseded, match="coordinator 1 was followed by coordinator 2"):
        begin(queue, 1, epoch=1)
    with pytest.raises(Superseded):
        queue.attach(1)
    begin(queue, 1, epoch=2)
    assert queue.pass_ == 1


def test_an_attached_coordinator_does_not_take_the_pass_of_another_for_its_own():
    queue = coordinated(4)
    begin(queue, 3, epoch=1)
    queue.attach(2)
    with pytest.raises(BadRequest, match="pass 3 has begun before; take a higher one"):
        begin(queue, 3, epoch=2)
    begin(queue, 4, epoch=2)
    # Once more is no other pass.
    held = queue.lease("a", 1, now=0.0)
    begin(queue, 4, epoch=2)
    assert queue.claim("a", 1, held.lease_id, now=1.0).granted


def test_an_attached_coordinator_lifts_the_end_of_the_work():
    told: list[str] = []
    queue = coordinated(4, tell=lambda kind, what, **facts: told.append(what))
    queue.attach(1)
    queue.end(coordinator_epoch=1, message="enough")
    queue.attach(1)
    assert queue.lease("a", 1, now=0.0) == Ended(0, "enough")
    queue.attach(2)
    assert not queue.progress(0.0).ended
    assert queue.lease("a", 1, now=0.0) == NothingNow(0)
    assert told[-1] == "work goes on: another coordinator came"


def test_a_coordinator_that_waits_is_woken_when_another_attaches():
    queue, woken = coordinated(4), []
    begin(queue, epoch=1)
    queue.await_pass(1, coordinator_epoch=1, now=0.0, wake=lambda: woken.append("former"))
    queue.attach(2)
    assert woken == ["former"]
