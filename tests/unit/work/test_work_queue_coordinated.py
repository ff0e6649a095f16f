"""Coordinated work: passes that a coordinator begins, claims and backup copies (Dean et al. 2012, section 4.2)."""

import math

import pytest

from pyps.core.effects import Wake
from pyps.work import WorkQueue, lease_reply
from pyps.work.passes import Verdict
from pyps_wire.errors import InvalidArgument, StateLost, Superseded
from pyps_wire.work_pb2 import AwaitPassReply, LeaseReply
from shards import (
    begin_pass,
    coordinated_queue,
    counted,
    data_spec,
    examples_of,
    is_leased,
    nothing_now,
    pass_of,
    refusal,
    restored_queue,
)


def lease(queue: WorkQueue, name: str, *, now: float = 0.0, wake: Wake | None = None):
    if wake is not None:
        queue.announce(name, wake)
    return queue.lease(name, 1, now=now, wake=wake)


def claim(queue: WorkQueue, name: str, leased: LeaseReply, *, now: float = 1.0):
    return queue.claim(name, 1, leased.portion.lease_id, now=now)


def deliver(queue: WorkQueue, name: str, *leased: LeaseReply, stage_id: int = 1, loss_sum: float = 0.0) -> Verdict:
    return queue.deliver(
        *(name, 1, [answer.portion.lease_id for answer in leased]),
        stage_id=stage_id,
        loss_sum=loss_sum,
        example_count=sum(examples_of(answer) for answer in leased),
        now=2.0,
    )


def outcome(queue: WorkQueue, pass_: int = 1, *, epoch: int = 1, **more) -> AwaitPassReply:
    return queue.await_pass(pass_, coordinator_epoch=epoch, **more)


def test_portions_are_equal_but_for_one_example():
    queue = coordinated_queue(23)
    begin_pass(queue, num_portions=5, portions_per_stage=4)
    portions = [lease(queue, "a") for _ in range(5)]
    sizes = [examples_of(answer) for answer in portions]
    assert sum(sizes) == 23
    assert max(sizes) - min(sizes) == 1
    assert {answer.portions_per_stage for answer in portions} == {4}
    few = coordinated_queue(3)
    begin_pass(few, num_portions=80)
    assert few.progress().num_portions == 3


def test_between_passes_there_is_nothing_and_the_coordinator_is_waited_for():
    queue, woken = coordinated_queue(4), []
    assert lease(queue, "a", wake=lambda: woken.append("a")) == nothing_now(0)
    assert queue.waits_for("a") == ("the coordinator",)
    begin_pass(queue, 3, num_portions=1)
    assert woken == ["a"]
    only = lease(queue, "a")
    assert pass_of(only) == 3
    claim(queue, "a", only)
    deliver(queue, "a", only)
    assert lease(queue, "a") == nothing_now(3)
    assert queue.waits_for("a") == ("the coordinator",)


def test_a_coordinator_may_wait_for_the_data_set():
    queue, woken = WorkQueue(stall_seconds=60), []
    assert not outcome(queue, 0, wake=lambda: woken.append(1)).complete
    queue.open(data_spec(4, 0, coordinated=True), worker_id="a")
    assert woken == [1]


def test_a_new_pass_ends_the_leases_of_the_one_before():
    queue = coordinated_queue(4)
    begin_pass(queue, 1, num_portions=2)
    running, claimed = lease(queue, "a"), lease(queue, "b")
    claim(queue, "b", claimed)
    begin_pass(queue, 2, num_portions=2)
    assert (
        claim(queue, "a", running).message
        == f"lease {running.portion.lease_id} ended with its pass, or the server was restored since"
    )
    assert not deliver(queue, "b", claimed).accepted
    assert queue.progress().pending == 2


def test_a_pass_number_is_not_used_twice_and_no_pass_is_of_nothing():
    queue = coordinated_queue(4)
    for name in ("num_portions", "copies_max", "portions_per_stage"):
        assert f"{name} is 0; expected 1 at least" in refusal(begin_pass, queue, **{name: 0})
    begin_pass(queue, 2)
    for pass_ in (1, 2):
        words = f"pass {pass_} cannot begin: pass 2 has begun before; take a higher one"
        assert words in refusal(begin_pass, queue, pass_, epoch=2)
    assert "pass 1 is awaited, but the present one is 2" in refusal(outcome, queue, 1)
    begin_pass(queue, 3, epoch=2)


@pytest.mark.parametrize("follow", [lambda queue: queue.attach(2), lambda queue: begin_pass(queue, 2, epoch=2)])
def test_an_earlier_coordinator_is_refused_everywhere(follow):
    queue, woken = coordinated_queue(4), []
    begin_pass(queue, 1)
    outcome(queue, 1, wake=lambda: woken.append(1))
    follow(queue)
    assert woken == [1], "it waits no longer"
    for call in (
        lambda: queue.attach(1),
        lambda: begin_pass(queue, 3, epoch=1),
        lambda: outcome(queue, 2, epoch=1),
        lambda: queue.end(coordinator_epoch=1, message="done"),
    ):
        with pytest.raises(Superseded, match="coordinator 1 was followed by coordinator 2: stop this one"):
            call()


def test_the_end_is_told_to_those_who_wait_and_to_those_who_come():
    queue, woken = coordinated_queue(4), []
    lease(queue, "a", wake=lambda: woken.append("a"))
    queue.end(coordinator_epoch=1, message="converged")
    assert woken == ["a"]
    assert lease(queue, "b") == lease_reply(LeaseReply.OUTCOME_ENDED, 0, message="converged")
    assert queue.progress().ended
    with pytest.raises(InvalidArgument, match=r"the coordinator has ended the work \(converged\)"):
        begin_pass(queue, 1)
    begin_pass(queue, 1, epoch=2)
    assert is_leased(lease(queue, "b"))


@pytest.mark.parametrize("winner", ["original", "copy"])
def test_of_two_copies_the_first_to_claim_wins(winner):
    queue = coordinated_queue(2)
    begin_pass(queue, num_portions=1)
    leased = {name: lease(queue, name) for name in ("original", "copy")}
    assert leased["original"].portion.portion_id == leased["copy"].portion.portion_id
    for _ in range(2):
        assert claim(queue, winner, leased[winner]).accepted
    [loser] = leased.keys() - {winner}
    for _ in range(2):
        refused = claim(queue, loser, leased[loser])
        assert (refused.accepted, refused.message) == (False, f"portion 0 was claimed by worker '{winner}' before")
    progress = queue.progress()
    assert (progress.copies, progress.stolen, progress.wasted) == (1, winner == "copy", 1)


def test_a_copy_that_comes_after_the_delivery_is_wasted():
    queue = coordinated_queue(2)
    begin_pass(queue, num_portions=1)
    original, copy = lease(queue, "a"), lease(queue, "b")
    claim(queue, "a", original)
    deliver(queue, "a", original)
    assert "portion 0 was delivered by worker 'a' before" in claim(queue, "b", copy).message
    progress = queue.progress()
    assert (progress.copies, progress.stolen, progress.wasted) == (1, 0, 1)


def test_no_copies_while_a_portion_is_pending_and_no_more_than_allowed():
    queue = coordinated_queue(6)
    begin_pass(queue, num_portions=3, copies_max=2)
    first = [lease(queue, name, now=float(now)) for now, name in enumerate("abc")]
    assert queue.progress().copies == 0
    copies = [lease(queue, name, now=5.0) for name in "abcd"]
    # Those that were given out the longest ago come first; nobody gets a copy of what it has.
    assert [answer.portion.portion_id for answer in copies[:2]] == [
        first[1].portion.portion_id,
        first[0].portion.portion_id,
    ]
    assert queue.progress().copies == 3
    woken = []
    assert lease(queue, "e", now=5.0, wake=lambda: woken.append("e")) == nothing_now(1)
    queue.release("c", lost=True)
    assert woken == ["e"], "a copy may be made again"
    assert is_leased(lease(queue, "e", now=6.0))


def test_one_copy_at_most_means_none_and_a_claimed_portion_gets_none():
    for copies_max in (1, 2):
        queue = coordinated_queue(2)
        begin_pass(queue, num_portions=1, copies_max=copies_max)
        mine = lease(queue, "a")
        if copies_max > 1:
            claim(queue, "a", mine)
        assert lease(queue, "b") == nothing_now(1), copies_max


def test_a_backup_copy_does_not_move_anybody_s_place_in_the_next_pass():
    queue = coordinated_queue(4)
    begin_pass(queue, 1, num_portions=2)
    first = [lease(queue, "a", now=5.0), lease(queue, "a", now=0.0)]
    assert lease(queue, "b", now=6.0).portion.portion_id == 1
    for answer in first:
        claim(queue, "a", answer)
        deliver(queue, "a", answer)
    begin_pass(queue, 2, num_portions=2)
    assert lease(queue, "b").portion.portion_id == 0


def test_a_worker_that_claimed_and_gives_nothing_is_not_waited_for_without_end():
    queue = coordinated_queue(2, stall_seconds=10.0)
    begin_pass(queue, num_portions=1)
    mine = lease(queue, "a", now=0.0)
    claim(queue, "a", mine, now=1.0)
    lease(queue, "b", now=2.0, wake=lambda: None)
    queue.tick(11.0)
    assert queue.progress().lost == 0
    queue.tick(13.0)
    assert queue.progress().lost == 1
    assert is_leased(lease(queue, "b", now=13.0))


def test_losses_are_added_in_the_order_of_portions_whenever_they_come():
    losses = [1e16, 1.0, -1e16, 1.0, 3.0]
    sums = set()
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 3, 4, 0, 2]):
        queue = coordinated_queue(5)
        begin_pass(queue, num_portions=5)
        leases = {(answer := lease(queue, "a")).portion.portion_id: answer for _ in range(5)}
        for portion_id in order:
            claim(queue, "a", leases[portion_id])
            deliver(queue, "a", leases[portion_id], stage_id=100 - portion_id, loss_sum=losses[portion_id])
        done = outcome(queue)
        assert done.stage_ids == [100, 99, 98, 97, 96]
        sums.add(done.loss_sum)
    assert sums == {(((1e16 + 1.0) - 1e16) + 1.0) + 3.0}


def test_several_portions_in_one_stage_are_one_stage():
    queue = coordinated_queue(6)
    begin_pass(queue, num_portions=3, portions_per_stage=2)
    first, second, third = (lease(queue, "a") for _ in range(3))
    for answer in (first, second, third):
        claim(queue, "a", answer)
    assert deliver(queue, "a", third, stage_id=7, loss_sum=1.0).accepted
    assert not outcome(queue).complete
    assert deliver(queue, "a", second, first, stage_id=8, loss_sum=2.0).accepted
    assert outcome(queue) == AwaitPassReply(complete=True, loss_sum=3.0, example_count=6, stage_ids=[8, 7])
    assert counted(queue, 1) == list(range(6))


def test_what_was_not_claimed_cannot_be_delivered_and_goes_back():
    queue = coordinated_queue(6)
    begin_pass(queue, num_portions=3, portions_per_stage=2)
    claimed, unclaimed = lease(queue, "a"), lease(queue, "a")
    claim(queue, "a", claimed)
    refused = deliver(queue, "a", claimed, unclaimed)
    assert (
        refused.message
        == f"lease {unclaimed.portion.lease_id} was not claimed: claim it before its gradient enters a sum"
    )
    assert queue.progress().pending == 3


def test_a_delivery_repeated_in_another_stage_does_not_count():
    queue = coordinated_queue(4)
    begin_pass(queue, num_portions=2)
    mine = lease(queue, "a")
    claim(queue, "a", mine)
    assert deliver(queue, "a", mine, stage_id=5).accepted
    assert deliver(queue, "a", mine, stage_id=5).accepted
    assert not deliver(queue, "a", mine, stage_id=6).accepted
    rest = lease(queue, "a")
    claim(queue, "a", rest)
    deliver(queue, "a", rest, stage_id=9)
    assert outcome(queue).stage_ids == [5, 9]


def test_a_loss_that_is_not_finite_makes_the_pass_so_and_has_no_stage():
    queue = coordinated_queue(4)
    begin_pass(queue, num_portions=2)
    first, second = lease(queue, "a"), lease(queue, "a")
    claim(queue, "a", first)
    claim(queue, "a", second)
    assert "delivers a finite loss without a stage" in refusal(deliver, queue, "a", first, stage_id=0)
    deliver(queue, "a", first, stage_id=0, loss_sum=math.nan)
    deliver(queue, "a", second, stage_id=4, loss_sum=1.0)
    done = outcome(queue)
    assert math.isnan(done.loss_sum)
    assert (done.stage_ids, done.example_count) == ([4], 4)


# Coordinators after each other: from its Attach on one is the only one, and the work goes on with it.


def test_a_restored_server_has_no_pass_under_way_and_says_so():
    queue = coordinated_queue(4)
    begin_pass(queue, 3, epoch=2)
    after = restored_queue(queue)
    assert after.lease("a", 1, now=0.0) == nothing_now(3)
    with pytest.raises(StateLost, match="pass 3 is not under way: the server was restored from a checkpoint"):
        after.await_pass(3, coordinator_epoch=2)
    with pytest.raises(InvalidArgument, match="pass 3 cannot begin"):
        begin_pass(after, 3, epoch=3)
    with pytest.raises(Superseded):
        begin_pass(after, 4, epoch=1)
    begin_pass(after, 4, epoch=3)
    assert is_leased(after.lease("a", 1, now=0.0))


def test_an_attached_coordinator_does_not_take_the_pass_of_another_for_its_own():
    queue = coordinated_queue(4)
    begin_pass(queue, 3, epoch=1)
    queue.attach(2)
    with pytest.raises(InvalidArgument, match="pass 3 has begun before; take a higher one"):
        begin_pass(queue, 3, epoch=2)
    begin_pass(queue, 4, epoch=2)
    held = queue.lease("a", 1, now=0.0)
    begin_pass(queue, 4, epoch=2)
    assert queue.claim("a", 1, held.portion.lease_id, now=1.0).accepted


def test_an_attached_coordinator_lifts_the_end_of_the_work():
    told: list[str] = []
    queue = coordinated_queue(4, on_event=lambda kind, what, **facts: told.append(what))
    queue.attach(1)
    queue.end(coordinator_epoch=1, message="enough")
    queue.attach(1)
    assert queue.lease("a", 1, now=0.0) == lease_reply(LeaseReply.OUTCOME_ENDED, 0, message="enough")
    queue.attach(2)
    assert not queue.progress().ended
    assert queue.lease("a", 1, now=0.0) == nothing_now(0)
    assert told[-1] == "work continues: another coordinator attached"
