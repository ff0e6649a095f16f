from pyps_client.run_state import View
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


def test_refusals_are_counted_by_reason_and_the_first_of_each_is_logged(caplog):
    view = View()

    view.note_receipts(0, [refusal(REASON_STALE), refusal(REASON_STALE), Receipt(outcome=OUTCOME_APPLIED)], sent_at=0.0)
    # A restore and a finished run refuse every gradient.
    later = [refusal(reason) for reason in (REASON_DROPPED, REASON_STALE, REASON_EPOCH, REASON_FINISHED)]
    view.note_receipts(0, later, sent_at=0.0)

    assert view.refused == {"STALE": 3, "DROPPED": 1}
    assert len(caplog.messages) == 2
    assert "a gradient of shard 3 was not taken: base version 4, expected 5. Pull before" in caplog.messages[0]
