from pyps_client.run_state import Refusals
from pyps_wire.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    REASON_DROPPED,
    REASON_EPOCH,
    REASON_FINISHED,
    REASON_STALE,
    Reason,
    Receipt,
)


def refusal(reason: Reason) -> Receipt:
    return Receipt(outcome=OUTCOME_REJECTED, reason=reason, shard_id=3, message="base version 4, expected 5")


def test_refusals_are_counted_by_reason_and_told_once_for_each(caplog):
    refusals = Refusals()

    refusals.note([refusal(REASON_STALE), refusal(REASON_STALE), Receipt(outcome=OUTCOME_APPLIED)])
    refusals.note([refusal(REASON_DROPPED), refusal(REASON_STALE)])

    assert refusals.counts == {"STALE": 3, "DROPPED": 1}
    assert len(caplog.messages) == 2
    assert "a gradient of shard 3 was not taken: base version 4, expected 5. Pull before" in caplog.messages[0]


def test_a_restore_and_a_finished_run_are_no_refusals_of_the_gradient():
    refusals = Refusals()

    refusals.note([refusal(REASON_EPOCH), refusal(REASON_FINISHED)])

    assert refusals.counts == {}
