import numpy as np
import pytest

from pyps_client.vectors import FiniteGuard, first_non_finite
from pyps_wire.codecs import BFLOAT16
from pyps_wire.errors import NotFinite


def test_the_first_bad_value_is_found_wherever_it_stands():
    for value in (np.nan, np.inf, -np.inf):
        for index in (0, 7, 4095, 4096):
            gradient = np.ones(4097, np.float32)
            gradient[index:] = value
            bfloat16 = (gradient.view(np.uint32) >> 16).astype(np.uint16)
            for words in (gradient, gradient.astype(np.float16), bfloat16):
                assert first_non_finite(words, BFLOAT16) == index, (value, words.dtype)
    # In a sum they would cancel.
    assert first_non_finite(np.array([1, np.inf, -np.inf], np.float32), BFLOAT16) == 1


def test_large_finite_values_whose_sum_overflows_pass():
    assert first_non_finite(np.full(1000, 3e38, np.float32), BFLOAT16) is None
    assert first_non_finite(np.full(1000, 65504, np.float16), BFLOAT16) is None
    assert first_non_finite(np.empty(0, np.float32), BFLOAT16) is None


def test_ten_in_a_row_end_the_worker_and_a_good_one_starts_anew(caplog):
    guard = FiniteGuard()
    for _ in range(9):
        guard.skipped("w", (1, 2), float("nan"))
    guard.passed()
    for _ in range(9):
        guard.skipped("w", (1, 2), float("nan"))

    with pytest.raises(NotFinite, match=r"gradient of w\[1, 2\] is nan; 10 gradients in a row"):
        guard.skipped("w", (1, 2), float("nan"))

    assert guard.skips_total == 19
    assert "the gradient of w[1, 2] is nan" in caplog.text
