"""What fits a shard and what does not, in words that name the numbers; and the arrays that it is kept in."""

import math

import numpy as np
import pytest

from pyps.core.arrays import aligned, aligned_zeros, read_only
from pyps.core.gradient import EXTENTS_MAX, FINITE, Extent, Finding, made_native, require_fitting, scan
from pyps_wire.codecs import DELTA, FLOAT16, FLOAT32, INT4, TOPK
from pyps_wire.errors import PypsError
from shards import gradient, refusal


def check(num_values: int, **fields: object) -> None:
    require_fitting(gradient([0.0] * num_values, **fields), shard_id=3, shard_length=8)


def test_a_whole_shard_and_ascending_disjoint_extents_fit():
    check(8)
    check(4, extents=(Extent(0, 1), Extent(1, 2), Extent(7, 1)))


def test_what_does_not_fit_is_refused_in_words_that_name_the_numbers():
    for num_values, fields, words in (
        (2, {"extents": (Extent(2, 1), Extent(0, 1))}, "begins before 3"),
        (2, {"extents": (Extent(0, 3), Extent(2, 1))}, "extent at 2 begins before 3"),
        (2, {"extents": (Extent(4, 0),)}, "0 parameters long"),
        (2, {"extents": (Extent(-1, 2),)}, "extent at -1 begins before 0"),
        (2, {"extents": (Extent(7, 2),)}, "ends at 9; the shard has 8"),
        # So many would hold the lock for long.
        (0, {"extents": (Extent(0, 1),) * (EXTENTS_MAX + 1)}, f"at most {EXTENTS_MAX}"),
        (8, {"codec": FLOAT16}, "32 bytes long; 8 parameters as float16 are 16 bytes"),
        # Kernels take factors and rates in float32.
        (8, {"scale": 1e39}, "gradient_scale is 1e+39; expected a finite float32"),
        (8, {"scale": math.nan}, "gradient_scale is nan"),
        (8, {"learning_rate": 1e39}, "learning_rate is 1e+39; expected a finite float32"),
        (1, {"worker_id": "rack-1", "sequence": 12}, "shard 3, push 12 of worker 'rack-1'"),
    ):
        assert words in refusal(check, num_values, **fields, error=PypsError)


def test_an_array_that_fits_is_taken_as_it_is_and_another_copied():
    fitting = aligned_zeros(40)
    assert aligned(fitting) is fitting
    for other in (fitting[1:], fitting[:32:2], read_only(fitting)):
        copy = aligned(other)
        assert not np.shares_memory(copy, fitting)
        assert copy.ctypes.data % 64 == 0 and copy.flags.writeable


@pytest.mark.parametrize("codec", [FLOAT32, INT4], ids=repr)
def test_numbers_that_their_scale_makes_infinite_are_found(codec):
    pushed = gradient([], codec=codec, payload=codec.encode(np.array([1.0, -1e10], np.float32)))
    for scale, finding in ((0.5, FINITE), (1e28, FINITE), (1e38, Finding(3, 1))):
        assert scan(pushed._replace(scale=scale), shard_id=3, shard_length=2) == finding, scale


@pytest.mark.parametrize("codec", [DELTA, TOPK], ids=repr)
@pytest.mark.parametrize("read", [scan, made_native])
def test_a_malformed_payload_is_refused_with_its_shard_push_and_worker(codec, read):
    pushed = gradient([], codec=codec, payload=b"\xff" * 12, sequence=12, worker_id="rack-1")
    assert refusal(read, pushed, shard_id=3, shard_length=8).startswith("shard 3, push 12 of worker 'rack-1': ")
