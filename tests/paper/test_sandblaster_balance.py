"""Portions and copies against slow machines, in virtual time (Dean et al. 2012, section 4.2), on one crew.

Twenty workers, two of them eight times as slow; docs/experiments.md has the verdict over ten crews. That each portion
counts once, and who gets which, is in unit/work/.
"""

from experiments.sandblaster_balance import COPIES, MODES, PORTIONS, SHARES, Makespan


def test_copies_end_a_pass_soon_after_the_ideal_and_equal_shares_lose_most():
    measured = {mode: Makespan(seed=0, mode=mode, passes=1).measure() for mode in MODES}

    assert measured[SHARES]["first"] >= 5
    assert 1.15 < measured[PORTIONS]["first"] <= 2
    assert measured[COPIES]["first"] <= 1.15
    assert 0 < measured[COPIES]["wasted"] <= 0.1
