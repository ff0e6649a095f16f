"""What fits a shard and what does not, in words that name the numbers."""

from __future__ import annotations

import pytest

from pyps.core.gradient import EXTENTS_MAX, Extent, require_fitting
from pyps_wire.errors import BadRequest, WrongSize
from shards import gradient


def check(values: list[float], **fields: object) -> None:
    require_fitting(gradient(values, **fields), shard_id=3, shard_length=8)


def test_a_whole_shard_fits() -> None:
    check([0.0] * 8)


def test_ascending_disjoint_extents_fit() -> None:
    check([0.0] * 4, extents=(Extent(0, 1), Extent(1, 2), Extent(7, 1)))


def test_kind_zero_is_read_as_a_gradient() -> None:
    check([0.0] * 8, kind=0)


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ((Extent(2, 1), Extent(0, 1)), "begins before 3"),
        ((Extent(0, 3), Extent(2, 1)), "extent at 2 begins before 3"),
        ((Extent(4, 0),), "0 parameters long"),
        ((Extent(-1, 2),), "extent at -1 begins before 0"),
    ],
)
def test_disordered_extents_are_refused(extents: tuple[Extent, ...], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        check([0.0] * 2, extents=extents)


def test_an_extent_beyond_the_shard_is_refused_with_both_numbers() -> None:
    with pytest.raises(WrongSize, match="ends at 9; the shard has 8"):
        check([0.0] * 2, extents=(Extent(7, 2),))


def test_a_number_of_extents_that_would_hold_the_lock_for_long_is_refused() -> None:
    with pytest.raises(BadRequest, match=f"at most {EXTENTS_MAX}"):
        check([], extents=(Extent(0, 1),) * (EXTENTS_MAX + 1))


@pytest.mark.parametrize("codec", [0, 4, -1])
def test_an_unknown_codec_is_refused(codec: int) -> None:
    with pytest.raises(BadRequest, match=f"codec is {codec}"):
        check([0.0] * 8, codec=codec)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BadRequest, match="payload kind is 4"):
        check([0.0] * 8, kind=4)


def test_a_payload_of_another_codec_is_refused_by_its_size() -> None:
    with pytest.raises(WrongSize, match="32 bytes long; 8 of the shard's 8 parameters as float16 are 16 bytes"):
        check([0.0] * 8, codec=2)


def test_a_refusal_names_shard_worker_and_push() -> None:
    with pytest.raises(WrongSize, match="shard 3, push 12 of worker 'rack-1'"):
        check([0.0], worker_id="rack-1", sequence=12)


@pytest.mark.parametrize(("payload_index", "parameter"), [(0, 1), (1, 2), (2, 6)])
def test_a_payload_index_leads_to_its_parameter(payload_index: int, parameter: int) -> None:
    partial = gradient([0.0] * 3, extents=(Extent(1, 2), Extent(6, 1)))
    assert partial.parameter_index(payload_index) == parameter
