from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyps_client.data import growing_batches, worker_sampler
from pyps_wire.errors import InvalidArgument


@given(st.integers(0, 60), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_parts_are_disjoint_and_cover_the_dataset_in_every_epoch(length, count, shuffle, seed):
    samplers = [worker_sampler(range(length), index=i, count=count, shuffle=shuffle, seed=seed) for i in range(count)]
    for _ in range(2):
        parts = [list(sampler) for sampler in samplers]
        assert sorted(index for part in parts for index in part) == list(range(length))
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_epochs_differ_and_come_again_with_set_epoch():
    sampler = worker_sampler(range(100), index=1, count=3)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(worker_sampler(range(100), index=1, count=3, seed=1)) != first


def test_the_place_comes_from_the_environment_and_without_one_there_is_one_worker(monkeypatch):
    assert list(worker_sampler(range(3), shuffle=False)) == [0, 1, 2]
    monkeypatch.setenv("PYPS_WORKER_INDEX", "2")
    monkeypatch.setenv("PYPS_WORKER_COUNT", "4")
    assert list(worker_sampler(range(10), shuffle=False)) == [2, 6]


def test_a_place_that_cannot_be_is_refused(monkeypatch):
    for index, count, message in [
        ("1", None, "index is known but not its count"),
        (None, "4", "count is known but not its index"),
        ("4", "4", "index is 4; expected a whole number, 0 to 3"),
        ("x", "4", "PYPS_WORKER_INDEX is 'x'"),
    ]:
        for name, value in (("PYPS_WORKER_INDEX", index), ("PYPS_WORKER_COUNT", count)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        with pytest.raises(InvalidArgument, match=message):
            pytest.fail(f"{worker_sampler(range(10))} of worker {index} of {count}")


def test_each_batch_is_as_large_as_the_servers_then_ask_for():
    """Zhang et al. 2013: the minibatch starts small and grows; each example is handed out once an epoch."""
    optimizer = SimpleNamespace(batch_size=2)
    samplers = [growing_batches(range(21), optimizer, index=index, count=2) for index in range(2)]
    parts = []
    for sampler in samplers:
        optimizer.batch_size = 2
        sizes = []
        for batch in sampler:
            sizes.append(len(batch))
            parts += batch
            optimizer.batch_size = min(4, optimizer.batch_size + 1)
        assert sizes[:3] == [2, 3, 4]
    assert sorted(parts) == list(range(21))


def test_the_optimizer_is_given_each_batchs_size_which_is_the_given_one_where_the_servers_leave_it_open():
    for size, options in ((4, {}), (0, {"batch_size": 4})):
        optimizer = SimpleNamespace(batch_size=size, examples_in_batch=None, steps=0)
        sampler = growing_batches(range(10), optimizer, **options)
        first, sizes = zip(*((batch, optimizer.examples_in_batch) for batch in sampler), strict=True)
        assert sizes == (4, 4, 2)
        assert len(sampler) == 3
        sampler.set_epoch(0)
        assert tuple(sampler) == first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: growing_batches(range(10), SimpleNamespace(batch_size=0), batch_size=0), "batch_size is 0; expected"),
        (
            lambda: growing_batches(range(10), SimpleNamespace(batch_size=0), batch_size="x"),
            "batch_size is 'x'; expect",
        ),
        (lambda: growing_batches(range(10), 5), "optimizer is a int; expected a RemoteOptimizer or a Client"),
        (lambda: worker_sampler(range(10), seed="x"), "seed is 'x'; expected a whole number"),
        (lambda: worker_sampler(range(10), index=1.5, count=2), "index is 1.5; expected a whole number"),
        (lambda: worker_sampler(5), "The data set, a int, has no length; expected one with __len__"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
