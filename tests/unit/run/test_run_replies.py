"""Pushes that bring parameters back through a run: what is counted, logged and refused together."""

import time

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.core.gradient import Finding, Gradient, PushPlan, Reply, first_of
from pyps.core.receipt import Outcome, Reason
from pyps.core.recorder import Pulled
from pyps.storage.replay import ShardLog, log_paths, replay
from pyps.storage.update_log import UpdateLog, decode
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import InvalidArgument, RunMismatch
from shards import SHARD_SIZE, serving


class Wish:
    """Memory that takes whatever there is."""

    def __init__(self) -> None:
        self.parameters = np.full(SHARD_SIZE, np.nan, np.float32)
        self.reply = Reply(self.parameters.view(np.uint8).data, 0, FLOAT32)


def gradient(memory: Floats, sequence: int = 1, *, volatile: bool = True, base_version: int = 0) -> Gradient:
    payload = memory.view(np.uint8).data
    return Gradient("a", 1, sequence, base_version, 0, FLOAT32, payload, volatile=volatile)


def ones() -> Floats:
    return np.ones(SHARD_SIZE, np.float32)


@pytest.mark.parametrize("protocol", ["async", "asgd"])
def test_parameters_that_come_with_receipts_are_counted_as_pulled(protocol):
    run, wish = serving(protocol=protocol), Wish()
    plans = [PushPlan(0, gradient(ones()), wish.reply), PushPlan(1, gradient(ones()))]
    pushed = run.push_whole(plans) if protocol == "asgd" else [run.push(plan) for plan in plans]
    assert [each.receipt.outcome for each in pushed] == [Outcome.APPLIED] * 2
    for tally in (run.statistics.total(), run.statistics.worker("a")):
        assert (tally.pushes_applied, tally.bytes_in, tally.bytes_out) == (2, 2 * 4 * SHARD_SIZE, 4 * SHARD_SIZE)
    np.testing.assert_array_equal(wish.parameters, -ones())


def test_one_number_refuses_all_parts_of_a_push_that_was_scanned_as_a_whole():
    for protocol in ("async", "asgd"):
        run = serving(protocol=protocol)
        bad = ones()
        bad[3] = np.nan
        parts = [(0, gradient(ones())), (1, gradient(bad))]
        finding = first_of(run.scan(part, shard_id, run_id="r") for shard_id, part in parts)
        assert finding == Finding(1, 3)
        if run.mutex is not None:
            pushed = run.push_whole([PushPlan(*part) for part in parts], run_id="r", finding=finding)
        else:
            pushed = [run.push(PushPlan(*part), run_id="r", finding=finding) for part in parts]
        assert {each.receipt.reason for each in pushed} == {Reason.NOT_FINITE}, protocol
        assert run.content.version_max == 0, protocol
        assert run.statistics.total().reasons == {Reason.NOT_FINITE: 2}, protocol


def test_a_scan_asks_what_a_push_asks_and_changes_nothing():
    run = serving()
    with pytest.raises(RunMismatch):
        run.scan(gradient(ones()), 0, run_id="another")
    with pytest.raises(InvalidArgument, match="shard 2"):
        run.scan(gradient(ones()), 2)
    with pytest.raises(InvalidArgument, match="shard 0"):
        run.scan(gradient(np.ones(3, np.float32)), 0)
    assert run.scan(gradient(ones()), 0).finite
    # Nor is heard of who pushes what does not fit.
    with pytest.raises(InvalidArgument, match="shard 0"):
        run.push(PushPlan(0, gradient(np.ones(3, np.float32))))
    assert (run.content.version_max, run.membership.roster.num_workers) == (0, 0)


def test_a_log_tells_what_happened_to_the_run_and_what_its_workers_report(tmp_path):
    log = UpdateLog(tmp_path)
    run = serving(recorder=log)
    run.push(PushPlan(0, gradient(ones())))
    for loss in (0.5, 0.5, 0.25):
        run.heartbeat("r", "a", 1, clock=7, scalars={"loss": loss})
    run.finish("enough")
    log.end()
    [path] = tmp_path.rglob("run-0.jsonl")
    begin, *lines = [line for text in path.open("rb") if (line := decode(text))]
    assert (begin["event"], begin["server_index"]) == ("begin", 0)
    assert [(line["kind"], line["worker_id"]) for line in lines if line["event"] == "run"] == [
        *(("joined", "a"), ("counts", "a"), ("finished", "")),
    ]
    reports = [(line["worker_id"], line["clock"], line["scalars"]) for line in lines if line["event"] == "report"]
    assert reports == [("a", 7, {"loss": 0.5}), ("a", 7, {"loss": 0.25})]
    for path in tmp_path.rglob("*.jsonl"):
        times = [decode(text)["at"] for text in path.open("rb")]
        assert 0 <= time.time() - max(times) < 60 and times[1:] == sorted(times[1:])


def test_a_log_of_pushes_from_shared_memory_replays_to_the_bit(tmp_path):
    log = UpdateLog(tmp_path, log_gradients=True)
    run = serving(recorder=log)
    memory = ones()
    for sequence in range(1, 4):
        # What the worker writes after the copy was made is in neither.
        part = gradient(memory, sequence, base_version=sequence - 1)
        finding = run.scan(part, 0)
        memory[0] = float(sequence)
        receipt = run.push(PushPlan(0, part, Wish().reply), finding=finding).receipt
        assert (receipt.outcome, receipt.message) == (Outcome.APPLIED, "")
    log.end()
    for path in log_paths(tmp_path):
        assert replay(path).difference == ""
    [first, _] = log_paths(tmp_path)
    pulls = [event for event in ShardLog(first).events() if isinstance(event, Pulled)]
    assert pulls == [Pulled(0, "a", 1), Pulled(0, "a", 2), Pulled(0, "a", 3)]
