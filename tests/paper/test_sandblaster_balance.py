"""Portions and backup copies against slow machines, in virtual time (Dean et al. 2012, section 4.2).

Twenty workers, two of them eight times as slow, ten portions a worker: the crews of experiments/sandblaster.py.
"""

from collections import Counter

from experiments import sandblaster_balance as balance

SEEDS = balance.SEEDS[:4]


def test_backup_copies_end_a_pass_soon_after_the_ideal_and_equal_shares_lose_most():
    for seed in SEEDS:
        rows = balance.measure(seed)
        backup = [row for row in rows if row.mode == "backup"]
        assert len(backup) == balance.PASSES
        assert max(row.makespan for row in backup) <= 1.15, seed
        assert max(row.wasted for row in backup) <= 0.10, seed
        first = {row.mode: row.makespan for row in rows if row.pass_number == 0}
        assert first["static"] >= 5, seed
        assert first["backup"] <= first["dynamic"] <= 2, seed


def test_every_portion_counts_once_a_pass_however_many_copies_there_are():
    """B1: the counts of a pass add up to the batch."""
    crew, _ = balance.run_crew("backup", seed=0)

    counted = Counter((span.pass_, span.portion.portion_id) for span in crew.spans if span.counted)
    assert counted == {
        (number + 1, portion): 1 for number in range(balance.PASSES) for portion in range(balance.PORTIONS)
    }
    assert len(crew.spans) > len(counted), "there were copies"


def test_workers_pull_parameters_once_a_pass_at_most():
    """B2: pulls per worker and pass <= 1."""
    crew, _ = balance.run_crew("backup", seed=0)

    assert crew.messages["pull"] <= balance.WORKERS * balance.PASSES


def test_most_portions_go_to_the_worker_that_had_them_or_the_one_before_them():
    rows = [row for row in balance.measure(0) if row.mode == "backup"]

    assert min(row.consecutive for row in rows) >= 0.6
    assert min(row.repeated for row in rows[1:]) >= 0.6
