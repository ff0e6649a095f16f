import itertools
import random

from pyps.work.portions import Division, PendingPortions


def test_every_example_is_in_one_portion():
    for cut in (
        *(Division.by_size(num_examples, size) for num_examples in (1, 7, 12, 100) for size in (1, 3, 12, 1000)),
        *(
            Division.by_number(num_examples, number)
            for num_examples in (1, 7, 12, 100)
            for number in (1, 3, 7, 99, 1000)
        ),
    ):
        portions = [cut.portion(portion_id) for portion_id in range(cut.num_portions)]
        covered = [example for portion in portions for example in range(portion.start, portion.stop)]
        assert covered == list(range(cut.num_examples)), cut
        assert all(portion.num_examples > 0 for portion in portions), cut
        where = [p.portion_id for p in portions for _ in range(p.num_examples)]
        assert [cut.containing(example) for example in covered] == where, cut


def test_runs_are_what_a_set_would_hold():
    chance, expected = random.Random(1), set(range(20))
    pending = PendingPortions([(0, 20)])
    for _ in range(1000):
        portion_id = chance.randrange(20)
        if portion_id in expected:
            assert portion_id in pending
            pending.remove(portion_id)
            expected.remove(portion_id)
        else:
            assert portion_id not in pending
            pending.add(portion_id)
            expected.add(portion_id)
        runs = pending.runs
        assert [number for run in runs for number in range(*run)] == sorted(expected)
        assert len(pending) == len(expected)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))
        if runs:
            start, stop = pending.longest()
            assert stop - start == max(b - a for a, b in runs)
        assert PendingPortions(runs).runs == runs


def test_runs_that_touch_or_overlap_become_one():
    assert PendingPortions([(4, 6), (0, 2), (2, 4), (5, 9), (11, 11)]).runs == [(0, 9)]
