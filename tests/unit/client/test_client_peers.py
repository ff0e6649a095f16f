"""How the processes of a replica come to one view: of results, of errors, of the run."""

from __future__ import annotations

import pytest

from peer_threads import Meeting, ThreadPeers, on_all
from pyps_client.peers import ALONE, agreed, led, own_partition
from pyps_client.servers import contacts_of
from pyps_client.standing import Standing
from pyps_wire.common_pb2 import OUTCOME_REJECTED, REASON_FINISHED, Receipt
from pyps_wire.errors import BadRequest, ModelMismatch, PypsError, ReplicaLost, Superseded
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.partition import Model, Tensor, partition

# Part 0 fills server 0, part 1 server 1; with three servers the last holds nothing.
MODEL = Model((Tensor("a", (64,), 0, part=0), Tensor("b", (64,), 1, part=1)), shard_size=64)


def failure_of(call: object) -> tuple[str, str]:
    """The class and the message of what a call raises."""
    with pytest.raises(PypsError) as caught:
        call()  # type: ignore[operator]
    return type(caught.value).__name__, str(caught.value)


def test_the_leaders_result_and_error_are_everybodys() -> None:
    asked: list[int] = []

    def ask(peers: ThreadPeers) -> str:
        asked.append(peers.index)
        return f"said by {peers.index}"

    def refuse() -> None:
        raise ModelMismatch("another model")

    assert on_all(Meeting("r", 3), lambda peers: led(peers, lambda: ask(peers))) == ["said by 0"] * 3
    assert asked == [0]
    failures = on_all(Meeting("r", 2), lambda peers: failure_of(lambda: led(peers, refuse)))
    assert failures == [("ModelMismatch", "another model")] * 2


def test_an_error_of_one_process_is_raised_on_all_and_the_first_one_where_there_are_two() -> None:
    def act(peers: ThreadPeers) -> int:
        if peers.index > 0:
            raise Superseded(f"process {peers.index} was superseded")
        return 7

    failures = on_all(Meeting("r", 3), lambda peers: failure_of(lambda: agreed(peers, lambda: act(peers))))
    assert failures == [("Superseded", "process 1 was superseded")] * 3
    assert on_all(Meeting("r", 2), lambda peers: agreed(peers, lambda: peers.index)) == [0, 1]


def test_a_worker_of_one_process_gets_its_own_result_and_its_own_error() -> None:
    error = BadRequest("no")

    def refuse() -> None:
        raise error

    assert led(ALONE, lambda: 1) == agreed(ALONE, lambda: 1) == 1
    for way in (led, agreed):
        with pytest.raises(BadRequest) as caught:
            way(ALONE, refuse)
        assert caught.value is error


def test_whoever_waits_for_a_process_that_is_gone_learns_of_it() -> None:
    def act(peers: ThreadPeers) -> None:
        if peers.index == 1:
            raise ZeroDivisionError
        peers.gather("here")

    with pytest.raises(ReplicaLost, match="process 0 of r lost another"):
        on_all(Meeting("r", 2), act)


def test_a_process_has_to_do_with_server_0_and_its_own_and_the_leader_with_those_of_nobody() -> None:
    whole = partition(MODEL, num_servers=3)
    holders = [shard.server_index for shard in whole.shards]
    assert holders == [0, 1], "server 2 holds nothing"

    assert contacts_of(whole, whole, leads=True) == [0, 1, 2]
    assert contacts_of(whole.of_parts([0]), whole, leads=True) == [0, 2]
    assert contacts_of(whole.of_parts([1]), whole, leads=False) == [0, 1]


def test_of_several_processes_each_names_its_parts() -> None:
    whole = partition(MODEL, num_servers=1)
    [first, _] = Meeting("r", 2).peers

    assert own_partition(whole, (), None) is own_partition(whole, (1, 0), first) is whole
    assert own_partition(whole, (1,), first).shards == whole.of_parts([1]).shards
    with pytest.raises(BadRequest, match="process 0 of replica 'r' holds no part of the model"):
        own_partition(whole, (), first)


def hello(**told: object) -> HelloReply:
    return HelloReply(protocol="hardsync", **told)  # type: ignore[arg-type]


def test_what_one_process_hears_counts_once_all_have_met_and_the_leaders_terms_go_before() -> None:
    over = Receipt(outcome=OUTCOME_REJECTED, reason=REASON_FINISHED, version_after=9)

    def act(peers: ThreadPeers) -> tuple[object, ...]:
        standing = Standing(peers)
        leads = peers.index == 0
        standing.greeted(0, hello(batch_size=16 if leads else 8, clip_norm=2.0 if leads else 0.0, accumulate=3))
        if not leads:
            standing.answered(1, [over])
        before = standing.finished, standing.terms.batch_size, standing.global_step
        standing.meet(pull_needed=not leads)
        terms = standing.terms
        return (
            before,
            standing.finished,
            standing.pull_agreed,
            standing.global_step,
            (terms.protocol, terms.batch_size, terms.accumulate, terms.clip_norm),
        )

    results = on_all(Meeting("r", 2), act)
    # The version that the other process heard of is not the leader's.
    assert results == [((False, 0, 0), True, True, 0, ("hardsync", 16, 3, 2.0))] * 2


def test_all_processes_go_by_the_leaders_words_whatever_they_heard_themselves() -> None:
    def act(peers: ThreadPeers) -> list[tuple[str, str]]:
        standing = Standing(peers)
        seen = []
        for leaders, others in (("async", "hardsync"), ("async", "serial"), ("ssp:s=1", "async")):
            protocol = others if peers.index else leaders
            standing.greeted(0, HelloReply(protocol=protocol, staleness=f"of {protocol}"))
            standing.meet(pull_needed=False)
            seen.append((standing.terms.protocol, standing.terms.staleness))
        return seen

    expected = [("async", "of async"), ("async", "of async"), ("ssp:s=1", "of ssp:s=1")]
    assert on_all(Meeting("r", 2), act) == [expected] * 2


def test_what_a_worker_of_one_process_hears_counts_at_once() -> None:
    standing = Standing()
    standing.greeted(0, hello(batch_size=16))
    standing.answered(1, [Receipt(reason=REASON_FINISHED, version_after=4)])
    assert (standing.finished, standing.terms.batch_size, standing.global_step) == (True, 16, 4)
