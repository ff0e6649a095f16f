"""How the processes of a replica come to one view: of results, of errors, of the run."""

import pytest

from pyps_client.replica.group import own_partition
from pyps_client.run_state import View
from pyps_wire.common_pb2 import OUTCOME_REJECTED, REASON_FINISHED, Receipt
from pyps_wire.errors import InvalidArgument
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.partition import Model, Tensor, partition
from replicas import Meeting, ThreadPeers, on_all

# Part 0 fills server 0, part 1 server 1; with three servers the last holds nothing.
MODEL = Model((Tensor("a", (64,), 0, part=0), Tensor("b", (64,), 1, part=1)), shard_size=64)


def test_of_several_processes_each_names_its_parts():
    whole = partition(MODEL, num_servers=1)
    [first, _] = Meeting("r", 2).peers

    assert own_partition(whole, (), None) is own_partition(whole, (1, 0), first) is whole
    assert own_partition(whole, (1,), first).shards == whole.of_parts([1]).shards
    with pytest.raises(InvalidArgument, match="process 0 of replica 'r' holds no part of the model"):
        own_partition(whole, (), first)


def test_what_one_process_hears_counts_once_all_have_met_and_the_leaders_terms_go_before():
    over = Receipt(outcome=OUTCOME_REJECTED, reason=REASON_FINISHED, version_after=9)

    def act(peers: ThreadPeers) -> tuple[object, ...]:
        view = View(peers)
        leads = peers.index == 0
        leaders = {"protocol": "hardsync", "staleness": "none", "batch_size": 16, "clip_norm": 2.0}
        others = {"protocol": "async", "staleness": "divide", "batch_size": 8, "clip_norm": 0.0}
        view.note_hello(0, HelloReply(accumulate=3, **(leaders if leads else others)))  # type: ignore[arg-type]
        if not leads:
            view.note_receipts(1, [over], sent_at=0.0)
        before = view.state.finished, view.state.terms.batch_size, view.state.global_step
        view.meet(pull_needed=not leads)
        terms = view.state.terms
        return (
            before,
            view.state.finished,
            view.state.pull_agreed,
            view.state.global_step,
            (terms.protocol, terms.staleness, terms.batch_size, terms.accumulate, terms.clip_norm),
        )

    results = on_all(Meeting("r", 2), act)
    # The version that the other process heard of is not the leader's.
    assert results == [((False, 0, 0), True, True, 0, ("hardsync", "none", 16, 3, 2.0))] * 2


def test_what_a_worker_of_one_process_hears_counts_at_once():
    view = View()
    view.note_hello(0, HelloReply(batch_size=16))
    view.note_receipts(1, [Receipt(reason=REASON_FINISHED, version_after=4)], sent_at=0.0)
    assert (view.state.finished, view.state.terms.batch_size, view.state.global_step) == (True, 16, 4)
