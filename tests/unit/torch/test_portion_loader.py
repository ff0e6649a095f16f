"""The batches of a portion: in order, loaded ahead, and on into the portion that is likely to come next."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pyps_client.lbfgs.gradient import PortionLoader, checked_length
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import Portion
from support import wait_until


class Squares:
    """A data set that remembers what was read of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> int:
        self.read.append(index)
        if index == 13:
            raise ValueError("example 13 is damaged")
        return index * index


@pytest.fixture
def dataset() -> Squares:
    return Squares(40)


@pytest.fixture
def loader(dataset: Squares) -> Iterator[PortionLoader]:
    loader = PortionLoader(dataset, batch_size=4)
    yield loader
    loader.close()


def numbers(batches: Iterator[tuple[Any, int]]) -> list[list[int]]:
    return [batch.tolist() for batch, _ in batches]


def test_batches_come_in_order_and_the_last_may_be_smaller(loader):
    found = list(loader.batches(Portion(start=2, stop=12)))
    assert [count for _, count in found] == [4, 4, 2]
    assert torch.cat([batch for batch, _ in found]).tolist() == [n * n for n in range(2, 12)]


def test_the_next_portion_is_read_during_this_one(dataset, loader):
    batches = loader.batches(Portion(start=0, stop=8), Portion(start=20, stop=28))
    next(batches)
    wait_until(lambda: dataset.read == [*range(8), *range(20, 28)], what="reading ahead")
    assert numbers(batches) == [[16, 25, 36, 49]]
    assert numbers(loader.batches(Portion(start=20, stop=28)))[1] == [576, 625, 676, 729]
    assert len(dataset.read) == 16, "each example was read once"


def test_what_was_read_on_a_wrong_hint_is_dropped(dataset, loader):
    numbers(loader.batches(Portion(start=0, stop=4), Portion(start=20, stop=28)))
    assert numbers(loader.batches(Portion(start=30, stop=34))) == [[900, 961, 1024, 1089]]
    assert not loader._ahead


def test_an_error_of_the_data_set_is_raised_where_the_batch_is_used(loader):
    batches = loader.batches(Portion(start=8, stop=20))
    assert next(batches)[0].tolist() == [64, 81, 100, 121]
    with pytest.raises(ValueError, match="example 13 is damaged"):
        next(batches)
    assert numbers(loader.batches(Portion(start=0, stop=2))) == [[0, 1]]


def test_getitems_and_the_callers_collate_are_used():
    class Many:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int, /) -> int:
            raise AssertionError("it reads many at once")

        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    loader = PortionLoader(Many(), batch_size=4, collate=sum)
    assert [batch for batch, _ in loader.batches(Portion(start=0, stop=6))] == [-6, -9]
    loader.close()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ((n for n in range(3)), "The data set, a generator, has no length; expected one with __len__ and __getitem__"),
        ({1, 2}, "The data set, a set, cannot be read by index; expected one with __len__ and __getitem__"),
        ([], "The data set, a list, is empty; expected at least one example"),
    ],
)
def test_a_data_set_without_length_or_index_is_refused_in_one_sentence(dataset, words):
    with pytest.raises(InvalidArgument, match=words):
        checked_length(dataset)
