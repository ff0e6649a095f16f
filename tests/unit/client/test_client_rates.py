import pytest

from pyps_client.push import GroupRate, LearningRates
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, OUTCOME_REJECTED, Receipt
from pyps_wire.errors import InvalidArgument

TAKEN = [Receipt(outcome=OUTCOME_APPLIED), Receipt(outcome=OUTCOME_PENDING)]
REFUSED = [Receipt(outcome=OUTCOME_APPLIED), Receipt(outcome=OUTCOME_REJECTED)]


def test_a_rate_is_owed_to_each_server_until_a_push_of_it_was_taken():
    rates = LearningRates(2, num_groups=2)
    assert rates.owed(0, epoch=1) == {}

    rates.change({1: GroupRate(0.5)})
    assert rates.owed(0, epoch=1) == rates.owed(1, epoch=1) == {1: GroupRate(0.5)}

    rates.answered(0, epoch=1, receipts=TAKEN)
    rates.answered(1, epoch=1, receipts=REFUSED)
    assert rates.owed(0, epoch=1) == {}
    assert rates.owed(1, epoch=1) == {1: GroupRate(0.5)}


def test_a_restored_server_is_told_again_and_a_change_of_one_group_is_told_with_the_others():
    rates = LearningRates(1, num_groups=2)
    rates.change({0: GroupRate(0.5)})
    rates.answered(0, epoch=1, receipts=TAKEN)
    assert rates.owed(0, epoch=2) == {0: GroupRate(0.5)}

    rates.change({1: GroupRate(0.25)})

    assert rates.owed(0, epoch=1) == {0: GroupRate(0.5), 1: GroupRate(0.25)}


def test_a_provisional_rate_goes_with_each_push():
    rates = LearningRates(1, num_groups=2)
    rates.change({0: GroupRate(0.5, provisional=True)})
    for _ in range(2):
        assert rates.owed(0, epoch=1) == {0: GroupRate(0.5, None, True)}
        rates.answered(0, epoch=1, receipts=TAKEN)


def test_a_rate_that_no_server_would_take_is_refused():
    for rates, complaint in (
        ({2: GroupRate(0.5)}, "names parameter group 2; expected 0 to 1"),
        ({0: GroupRate(-0.5)}, "rate of group 0 is -0.5; expected a number, 0 or more"),
        ({1: GroupRate(float("nan"))}, "rate of group 1 is nan"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            LearningRates(1, num_groups=2).change(rates)
