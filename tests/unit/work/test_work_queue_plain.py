"""Plain work: epochs without a coordinator, each portion with one worker."""

from dataclasses import asdict
from unittest.mock import Mock

import pytest

from pyps.work import DataSpec, WorkQueue
from pyps_wire.errors import InvalidArgument, Superseded, WaitTimedOut
from pyps_wire.work_pb2 import LeaseReply
from shards import (
    begin_pass,
    counted,
    data_spec,
    effort_of,
    examples_of,
    is_leased,
    nothing_now,
    pass_done,
    pass_of,
    plain_queue,
    refusal,
    restored_queue,
)


def lease(queue: WorkQueue, name: str = "a", pass_: int | None = 0, *, now: float = 0.0, again: bool = False, **more):
    if "wake" in more and not again:
        queue.announce(name, more["wake"])
    return queue.lease(name, more.pop("incarnation", 1), pass_=pass_, now=now, **more)


def deliver(queue: WorkQueue, *leased: LeaseReply, name: str = "a", now: float = 1.0, incarnation: int = 1):
    return queue.deliver(
        *(name, incarnation, [answer.portion.lease_id for answer in leased]),
        example_count=sum(examples_of(answer) for answer in leased),
        now=now,
    )


def finish(queue: WorkQueue, pass_: int = 0, name: str = "a") -> None:
    while is_leased(answer := lease(queue, name, pass_)):
        assert deliver(queue, answer, name=name).accepted
    assert answer == pass_done(pass_)


def test_one_worker_goes_through_the_data_in_order():
    queue, given = plain_queue(10, 3), []
    while is_leased(answer := lease(queue)):
        given.append((answer.portion.start, answer.portion.stop))
        deliver(queue, answer)
    assert given == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert answer == pass_done(0)
    assert counted(queue, 0) == list(range(10))


def test_the_next_pass_begins_when_all_is_delivered_and_somebody_asks_for_it():
    queue = plain_queue(6, 3)
    # Who is ahead of a restored queue takes part in the older pass.
    assert pass_of(lease(queue, "ahead", pass_=7)) == 0
    queue.release("ahead", lost=False)
    assert (queue.progress().lost, queue.progress().pending) == (0, 2), "it left by itself"
    finish(queue)
    assert queue.pass_ == 0
    assert lease(queue, pass_=0) == pass_done(0)
    answer = lease(queue, pass_=1)
    assert is_leased(answer) and pass_of(answer) == queue.pass_ == 1
    assert lease(queue, "late", 0) == pass_done(0)
    # Who asks for no pass in particular gets the present one and then the next.
    deliver(queue, answer)
    assert pass_of(lease(queue, pass_=None)) == 1
    queue.release("a", lost=False)
    finish(queue, 1)
    assert pass_of(lease(queue, pass_=None)) == 2


def test_who_is_done_with_a_pass_waits_for_those_that_are_not():
    queue = plain_queue(6, 3)
    first, second = lease(queue, "a"), lease(queue, "b")
    deliver(queue, first)
    woken = Mock()
    assert lease(queue, "a", 1, wake=woken) == nothing_now(0)
    assert queue.waits_for("a") == ("b",)
    deliver(queue, second, name="b")
    assert woken.call_count == 1
    assert pass_of(lease(queue, "a", 1, wake=woken, again=True)) == 1


def test_portions_of_a_minibatch_where_the_server_has_no_growth():
    queue = WorkQueue(stall_seconds=60, accumulate=lambda: 4)
    queue.open(DataSpec("train", 50, batch_size=5), worker_id="a")
    assert examples_of(lease(queue)) == 20


def ahead_queue(num_portions: int, *, ahead: int = 1, **more) -> WorkQueue:
    """A queue of portions of one example."""
    return plain_queue(num_portions, 1, epochs_ahead=lambda: ahead, **more)


def test_a_free_worker_begins_the_next_pass_as_far_as_it_may_and_is_allowed():
    for ahead, passes, begun in (
        (1, 9, [1, 1]),
        (2, 9, [1, 1, 2, 2]),
        (2, 2, [1, 1]),
        (1, 1, []),
        (1, 0, []),
        (0, 9, []),
    ):
        queue, given = ahead_queue(2, ahead=ahead), []
        slow = lease(queue, "slow", passes=passes)
        deliver(queue, lease(queue, "quick", passes=passes), name="quick")
        while is_leased(answer := lease(queue, "quick", passes=passes)):
            given.append(pass_of(answer))
            deliver(queue, answer, name="quick")
        # Nothing is over before the portion that is missing is in; then all is that has all of its own.
        assert (given, answer, queue.progress().passes_done) == (begun, nothing_now(0), 0), (ahead, passes)
        assert (queue.pass_, queue.progress().ahead, queue.waits_for("quick")) == (0, len(begun), ("slow",))
        deliver(queue, slow, name="slow")
        assert queue.progress().passes_done == 1 + len(begun) // 2
        assert lease(queue, "quick", queue.pass_, passes=passes) == pass_done(queue.pass_)


def test_who_holds_a_portion_itself_does_not_mix_passes_and_is_woken_once_it_is_free():
    queue = ahead_queue(2)
    slow, own = lease(queue, "slow", passes=9), lease(queue, "quick", passes=9)
    woken = Mock()
    assert lease(queue, "quick", passes=9, wake=woken) == nothing_now(0)
    deliver(queue, own, name="quick")
    assert woken.call_count == 1
    ahead = [lease(queue, "quick", passes=9, wake=woken, again=True), lease(queue, "quick", passes=9)]
    assert [pass_of(answer) for answer in ahead] == [1, 1]
    # One delivery may be of several passes.
    queue.release("slow", lost=True)
    back = lease(queue, "quick", passes=9)
    assert (pass_of(back), back.portion.portion_id) == (0, slow.portion.portion_id)
    assert deliver(queue, ahead[0], back, name="quick").accepted
    assert (queue.pass_, queue.progress().done, queue.progress().running) == (1, 1, 1)
    assert deliver(queue, ahead[1], name="quick").accepted
    assert [counted(queue, pass_) for pass_ in range(2)] == [[0, 1], [0, 1]]


def test_passes_that_were_begun_ahead_go_on_with_a_restored_server_whatever_its_bound():
    queue = ahead_queue(3, ahead=2)
    lost = lease(queue, "slow", passes=9)
    for _ in range(6):
        deliver(queue, lease(queue, "quick", passes=9), name="quick")
    assert queue.progress().ahead == 4
    after = restored_queue(queue)
    assert not deliver(after, lost, name="slow").accepted
    finish(after, 0)
    assert (after.pass_, after.progress().done) == (2, 1)
    assert lease(after, pass_=1) == pass_done(1)
    finish(after, 2)
    assert [counted(after, pass_) for pass_ in range(3)] == [[0, 1, 2]] * 3


def test_consecutive_portions_go_to_the_same_worker():
    queue = plain_queue(12, 1)
    mine = {"a": [], "b": []}
    for _ in range(4):
        for name in mine:
            answer = lease(queue, name)
            mine[name].append(answer.portion.portion_id)
            deliver(queue, answer, name=name)
    assert mine == {"a": [0, 1, 2, 3], "b": [6, 7, 8, 9]}


def test_a_worker_begins_each_pass_where_it_began_the_last():
    queue = plain_queue(12, 1)
    first = {name: lease(queue, name) for name in "abc"}
    for name, answer in first.items():
        deliver(queue, answer, name=name)
    finish(queue)
    again = {name: lease(queue, name, 1) for name in "cba"}
    assert {name: a.portion.start for name, a in again.items()} == {n: a.portion.start for n, a in first.items()}


def test_what_comes_next_is_told_and_not_held():
    queue = plain_queue(9, 3)
    answer = lease(queue, "a")
    assert (answer.next.portion_id, answer.next.lease_id) == (1, 0)
    assert lease(queue, "a").portion.portion_id == 1
    assert not lease(queue, "b").HasField("next")


def test_a_lease_costs_as_much_however_many_workers_have_left():
    lines = []
    for departed in (1, 300):
        queue = plain_queue(1000, 1)
        for number in range(departed):
            lease(queue, f"departed-{number}")
            queue.release(f"departed-{number}", lost=False)
        lease(queue, "other")
        lines.append(effort_of(lambda queue=queue: lease(queue)))
    # A look at each of them would take hundreds; a few are the interpreter's own, which collects what is left over.
    assert lines[1] < lines[0] + 100


def test_what_a_lost_worker_held_goes_to_another_and_its_own_delivery_is_refused():
    queue = plain_queue(6, 3)
    lost = lease(queue, "a")
    queue.release("a", lost=True)
    refused = deliver(queue, lost)
    assert not refused.accepted
    assert "worker 'a' left or was lost" in refused.message
    finish(queue, 0, "b")
    assert not deliver(queue, lost).accepted
    assert counted(queue, 0) == list(range(6))
    assert queue.progress().lost == 1


def test_what_an_earlier_life_held_goes_back_when_the_next_one_asks():
    queue = plain_queue(6, 3)
    former = lease(queue, "a", incarnation=1)
    assert lease(queue, "a", incarnation=2) is not None
    assert not deliver(queue, former, incarnation=2).accepted
    with pytest.raises(Superseded, match="a newer process has the name of worker 'a'"):
        deliver(queue, former, incarnation=1)


def test_a_delivery_is_repeated_without_harm_also_in_the_next_pass():
    queue = plain_queue(3, 3)
    answer = lease(queue)
    assert deliver(queue, answer).accepted
    assert deliver(queue, answer).accepted
    lease(queue, pass_=1)
    assert deliver(queue, answer).accepted
    assert counted(queue, 0) == list(range(3))


def test_another_worker_s_lease_is_refused():
    queue = plain_queue(6, 3)
    mine, theirs = lease(queue, "a"), lease(queue, "b")
    refused = deliver(queue, theirs, name="a")
    assert refused.message == f"lease {theirs.portion.lease_id} is worker 'b''s, not 'a''s"
    assert deliver(queue, theirs, name="b").accepted
    assert "was delivered by worker 'b' before" in deliver(queue, theirs, name="a").message
    assert deliver(queue, mine, name="a").accepted


def test_a_delivery_counts_as_a_whole_or_not_at_all():
    queue = plain_queue(9, 3)
    first = lease(queue, "a")
    queue.release("a", lost=True)
    second = lease(queue, "a")
    third = lease(queue, "a")
    assert not deliver(queue, first, second, third).accepted
    assert queue.progress().done == 0
    assert queue.progress().pending == 3


def test_a_delivery_names_leases_that_were_given_out_each_once_and_all_their_examples():
    queue = plain_queue(6, 3)
    answer = lease(queue)
    for leases, example_count, words in (
        ([], 3, "expected one or more, each once"),
        ([1, 1], 3, "expected one or more, each once"),
        *(([lease_id], 3, f"lease {lease_id} was never given out") for lease_id in (0, 2, 99)),
        ([answer.portion.lease_id], 2, "worker 'a' delivers 2 examples, but its portions have 3"),
    ):
        assert words in refusal(queue.deliver, "a", 1, leases, example_count=example_count, now=0.0)
    assert deliver(queue, answer).accepted


def test_plain_work_needs_no_claim_and_no_coordinator():
    queue = plain_queue(6, 3)
    answer = lease(queue)
    for call in (
        lambda: queue.claim("a", 1, answer.portion.lease_id, now=0.0),
        lambda: begin_pass(queue),
        lambda: queue.end(coordinator_epoch=1, message="done"),
    ):
        words = "the workers opened the data set 'train' for passes without a coordinator: have them call"
        assert words in refusal(call)


def test_a_portion_that_others_wait_for_is_taken_from_a_worker_that_gives_nothing():
    told = []
    queue = plain_queue(3, 3, stall_seconds=10.0, on_event=lambda kind, what, **facts: told.append((kind, what, facts)))
    stuck = lease(queue, "stuck", now=0.0)
    queue.tick(500.0)
    woken = Mock()
    assert lease(queue, "b", now=500.0, wake=woken) == nothing_now(0)
    queue.tick(509.0)
    assert not woken.call_count
    queue.tick(510.5)
    assert woken.call_count == 1
    assert lease(queue, "b", now=510.5, wake=woken, again=True).portion.start == stuck.portion.start
    refused = deliver(queue, stuck, name="stuck")
    assert "worker 'stuck' delivered nothing for 10.5 s, and others waited" in refused.message
    assert queue.progress().lost == 1
    assert told[-1][2]["worker"] == "stuck"


def test_a_slow_portion_is_taken_away_after_twice_the_time_each_time():
    queue = plain_queue(3, 3, stall_seconds=10.0)
    taken, now = [], 0.0
    holder, other = "a", "b"
    for _ in range(4):
        lease(queue, holder, now=now, wake=lambda: None)
        began = now
        lease(queue, other, now=now, wake=lambda: None)
        lost = queue.progress().lost
        while queue.progress().lost == lost:
            now += 1.0
            queue.tick(now)
        taken.append(now - began)
        holder, other = other, holder
    assert taken == [10, 20, 40, 80]


def test_a_worker_gets_three_times_as_long_as_its_own_speed_says():
    queue = plain_queue(6, 3, stall_seconds=10.0)
    answer = lease(queue, "slow", now=0.0)
    deliver(queue, answer, name="slow", now=100.0)
    assert [worker.examples_per_second for worker in queue.progress().workers] == [3 / 100]
    lease(queue, "slow", now=100.0)
    lease(queue, "b", now=100.0, wake=lambda: None)
    queue.tick(399.0)
    assert queue.progress().lost == 0, "it gave a portion after 100 s"
    queue.tick(400.0)
    assert queue.progress().lost == 1


def test_of_two_calls_of_one_worker_the_later_one_is_answered():
    queue = plain_queue(3, 3)
    lease(queue, "a")
    lease(queue, "a")
    assert queue.waits_for("a") == ("a",)
    former, later, ended = Mock(), Mock(), Mock()
    lease(queue, "0", wake=ended)
    queue.forget(ended)
    lease(queue, "b", wake=former)
    lease(queue, "b", wake=later)
    assert former.call_count == 1
    with pytest.raises(WaitTimedOut, match="worker 'b' has made another call since"):
        lease(queue, "b", wake=former, again=True)
    queue.release("a", lost=True)
    assert (former.call_count, later.call_count, ended.call_count) == (1, 1, 0)
    assert is_leased(lease(queue, "b", wake=later, again=True))


def test_a_call_that_asks_later_than_the_next_one_of_its_worker_takes_nothing_back():
    queue = plain_queue(6, 3)
    former, later = Mock(), Mock()
    queue.announce("a", former)
    queue.forget(former)
    with pytest.raises(WaitTimedOut):
        lease(queue, "a", held=(), wake=former, again=True)
    assert queue.progress().running == 0, "its caller is gone"
    queue.announce("a", former)
    queue.announce("a", later)
    held = lease(queue, "a", held=(), wake=later, again=True)
    assert is_leased(held)
    with pytest.raises(WaitTimedOut, match="worker 'a' has made another call since"):
        lease(queue, "a", held=(), wake=former, again=True)
    assert queue.progress().running == 1
    assert deliver(queue, held).accepted


def test_a_data_set_that_differs_is_refused_by_the_field():
    queue = plain_queue(10, 3)
    for field, value, words in (
        ("name", "test", "worker 'b' says name 'test' of the data set, but the run's has 'train'"),
        ("num_examples", 11, "says num_examples 11 of the data set, but the run's has 10"),
        ("portion_examples", 4, "says portion_examples 4"),
        ("batch_size", 32, "says batch_size 32"),
        ("shuffle", True, "says shuffle True"),
        ("seed", 1, "says seed 1"),
        ("coordinated", True, "says coordinated True"),
    ):
        fields = asdict(data_spec(10, 3)) | {field: value}
        assert words in refusal(queue.open, DataSpec(**fields), worker_id="b")
    queue.open(data_spec(10, 3), worker_id="b")


def test_a_data_set_without_sense_is_refused():
    for fields, words in (
        ({"num_examples": 0}, "the data set 'train' has 0 examples; expected 1 at least"),
        ({"name": "x" * 201}, "has 201 characters; expected 200 at most"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
    ):
        assert words in refusal(DataSpec, **({"name": "train", "num_examples": 10} | fields))


def test_portions_need_a_size_and_may_not_be_too_many():
    queue = WorkQueue(stall_seconds=60)
    with pytest.raises(InvalidArgument, match="give portion_examples or batch_size"):
        queue.open(DataSpec("train", 10), worker_id="a")
    with pytest.raises(InvalidArgument, match="2000000 portions; expected 1000000 at most: take larger portions"):
        queue.open(DataSpec("train", 2_000_000, 1), worker_id="a")
    assert queue.spec is None
    with pytest.raises(InvalidArgument, match="no worker has said what the data set is"):
        queue.lease("a", 1, now=0.0)


# What goes on with another server, from the queue's state in a checkpoint.


def test_what_is_delivered_stays_delivered_and_what_was_running_is_done_again():
    queue = plain_queue(10, 3)
    first, running = lease(queue), lease(queue)
    deliver(queue, first)
    after = restored_queue(queue)
    assert deliver(after, first).accepted
    assert not deliver(after, running).accepted
    given = []
    while is_leased(answer := lease(after)):
        given.append(answer.portion.portion_id)
        deliver(after, answer)
    assert given == [1, 2, 3]
    assert answer == pass_done(0)
    assert counted(after, 0) == list(range(10))


def test_numbers_of_leases_are_never_used_again():
    queue = plain_queue(10, 3)
    before = {lease(queue).portion.lease_id for _ in range(3)}
    kept = queue.state()
    # Given out after the checkpoint: only the owner's first_lease keeps clear of it.
    before.add(lease(queue).portion.lease_id)
    after = WorkQueue(stall_seconds=60, first_lease=500)
    after.restore(kept)
    assert lease(after).portion.lease_id >= 500
    late = restored_queue(queue, first_lease=2)
    assert lease(late).portion.lease_id > max(before)


def test_a_pass_goes_on_as_it_was_cut_whatever_the_settings_are_now():
    queue = WorkQueue(stall_seconds=60, batch_size_of=lambda epoch: 4)
    queue.open(data_spec(40, 0), worker_id="a")
    after = restored_queue(queue, batch_size_of=lambda epoch: 8)
    answer = lease(after)
    assert (examples_of(answer), answer.batch_size) == (4, 4)
    while is_leased(answer):
        deliver(after, answer)
        answer = lease(after)
    assert examples_of(lease(after, pass_=1)) == 8


def test_the_data_set_is_known_to_a_restored_server():
    after = restored_queue(plain_queue(10, 3))
    after.open(data_spec(10, 3), worker_id="a")
    with pytest.raises(InvalidArgument, match="num_examples 11"):
        after.open(data_spec(11, 3), worker_id="a")
    # A queue that nobody opened can be kept too.
    after = restored_queue(WorkQueue(stall_seconds=60))
    after.open(data_spec(10, 3), worker_id="a")
    assert is_leased(lease(after))


def test_counts_and_passes_go_on():
    queue = plain_queue(3, 3)
    lease(queue)
    queue.release("a", lost=True)
    for pass_ in range(2):
        deliver(queue, lease(queue, pass_=pass_))
    after = restored_queue(queue)
    progress = after.progress(deliveries=True)
    assert (after.pass_, progress.passes_done, progress.lost) == (1, 2, 1)
    assert [getattr(delivered, "pass") for delivered in progress.deliveries] == [0, 1]


def test_deliveries_of_the_present_pass_and_seven_before_it_are_remembered():
    queue = plain_queue(3, 3)
    for pass_ in range(20):
        deliver(queue, lease(queue, pass_=pass_))
    assert [getattr(delivered, "pass") for delivered in queue.progress(deliveries=True).deliveries] == list(
        range(12, 20)
    )


def test_what_is_no_state_is_one_sentence():
    with pytest.raises(InvalidArgument, match="the checkpoint's work queue cannot be read"):
        WorkQueue(stall_seconds=60).restore({"spec": None})
