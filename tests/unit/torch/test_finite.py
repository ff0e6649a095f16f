from itertools import product

import torch

from pyps_client.torch.gradients import all_finite, all_fit, surely_fit

BAD = [float("nan"), float("inf"), -float("inf")]
HALVES = [torch.float16, torch.bfloat16]


def test_one_bad_element_is_found_wherever_it_is_in_any_memory_format():
    assert not all_finite([torch.tensor([float("inf"), -float("inf"), 1.0])]), "a sum in which they cancel"
    for bad, dtype in product(BAD, [torch.float32, torch.float64, *HALVES]):
        for place in (0, 500, 999):
            values = torch.zeros(1000, dtype=dtype)
            values[place] = bad
            assert not all_finite([torch.zeros(3), values]), (bad, dtype, place)
            assert not all_finite([values, torch.zeros(3)])
            assert not surely_fit([torch.zeros(3), values], torch.float32)
            assert not all_fit([torch.zeros(3), values], torch.float32)
        values = torch.zeros(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
        values[1, 2, 3, 4] = bad
        assert not all_finite([values])
        assert not all_finite([values.transpose(0, 1)])


def test_finite_values_whose_sum_and_squares_overflow_are_finite():
    for dtype in (torch.float32, *HALVES):
        assert all_finite([torch.full((10,), torch.finfo(dtype).max, dtype=dtype)])


def test_nothing_is_finite_and_fits():
    assert all_finite([]) and all_finite([torch.zeros(0)])
    assert surely_fit([torch.zeros(0)], torch.float16) and all_fit([torch.zeros(0)], torch.float16)


def test_the_quick_check_passes_small_numbers_and_none_that_the_type_cannot_hold():
    # The least float32 that is rounded to infinity, among values that would hide it in a careless sum.
    least = {torch.float16: 65520.0, torch.bfloat16: 3.3961776e38, torch.float32: float("inf")}
    for (dtype, beyond), count in product(least.items(), [1, 33, 4096]):
        values = torch.full((count,), 0.5)
        assert surely_fit([values], dtype)
        values[count // 2] = beyond
        assert not values.to(dtype).isfinite().all()
        assert not surely_fit([values], dtype), (dtype, count)
        assert not all_fit([values], dtype), (dtype, count)
        # The largest that it holds fits, though a quick look leaves it open.
        values[count // 2] = -torch.finfo(dtype).max
        assert not surely_fit([values], dtype)
        assert all_fit([values], dtype)
    assert not surely_fit([torch.zeros(3, dtype=torch.float64)], torch.float32)
    assert not surely_fit([torch.zeros(3, 4).t()], torch.float32)
