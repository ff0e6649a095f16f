"""Each worker's own part of the data, and the number of examples in each batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from inspect import getattr_static
from itertools import islice
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pyps_client.launch import torchrun_place
from pyps_wire.errors import InvalidArgument

T = TypeVar("T")


class WorkerSampler:
    """The indices of this worker's part of a dataset: DataLoader(dataset, sampler=...).

    In each epoch all workers draw the same permutation and each takes every count-th index of it, so that
    their parts are disjoint, cover the dataset, and differ in size by one at the most. Every iteration is the
    next epoch.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool, index: int, count: int) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._index = index
        self._count = count
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch, as after a restart."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(range(self._index, self._length, self._count))

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if not self._shuffle:
            return iter(range(self._index, self._length, self._count))
        return iter(permutation(self._length, self._seed, epoch)[self._index :: self._count].tolist())


def permutation(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return an epoch's order of the examples, the same in all workers."""
    # RandomState's sequence never changes between numpy versions, and workers may have different ones.
    return np.random.RandomState([seed, epoch]).permutation(length)


def worker_sampler(
    dataset: Sized, *, seed: int = 0, shuffle: bool = True, index: int | None = None, count: int | None = None
) -> WorkerSampler:
    """A sampler of this worker's part of a dataset.

    `index` and `count` say which worker of how many this is; by default PYPS_WORKER_INDEX and
    PYPS_WORKER_COUNT say so, or else torchrun does, and without them there is one worker. `seed` must be the same in
    all workers.
    """
    for name, value in (("seed", seed), ("index", index), ("count", count)):
        if value is not None:
            _check_whole(name, value)
    if not isinstance(dataset, Sized):
        raise InvalidArgument(f"The data set, a {type(dataset).__name__}, has no length; expected one with __len__.")
    torchrun = torchrun_place(os.environ)
    if torchrun and index is None and count is None:
        index, count = torchrun
    index = _place("PYPS_WORKER_INDEX", index)
    count = _place("PYPS_WORKER_COUNT", count)
    if (index is None) != (count is None):
        given, missing = ("index", "count") if count is None else ("count", "index")
        raise InvalidArgument(
            f"The worker's {given} is known but not its {missing}: set both PYPS_WORKER_INDEX and "
            f"PYPS_WORKER_COUNT, or pass both index= and count=."
        )
    index, count = (0, 1) if index is None or count is None else (index, count)
    if count < 1 or not 0 <= index < count:
        raise InvalidArgument(f"The worker's index is {index} of {count} workers; expected 0 to {max(count, 1) - 1}.")
    if not 0 <= seed < 2**32:
        raise InvalidArgument(f"seed is {seed}; expected 0 to {2**32 - 1}.")
    return WorkerSampler(len(dataset), seed=seed, shuffle=shuffle, index=index, count=count)


class GrowingBatchSampler:
    """Batches of this worker's part of a dataset, each as large as the servers' schedule then asks for.

    For DataLoader(dataset, batch_sampler=...). A server started with a batch growth (Zhang et al. 2013: the
    minibatch starts small and grows as training goes on) tells the size with its answers to pushes, and learns
    from each push how many examples it has seen: the sampler tells the optimizer. A loader with processes of
    its own asks, and tells, as many batches ahead as it fetches ahead.
    """

    def __init__(self, sampler: WorkerSampler, optimizer: Any, *, default: int) -> None:
        self.sampler = sampler
        self._optimizer = optimizer
        self._default = default

    @property
    def batch_size(self) -> int:
        """Examples in a batch that is drawn now."""
        return int(self._optimizer.batch_size or self._default)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch, as after a restart."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches in an epoch, if the batch stays as large as it is now."""
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(islice(indices, self.batch_size)):
            # Growth goes by the examples counted: uncounted ones would never let it begin.
            self._optimizer.examples_in_batch = len(batch)
            yield batch


def growing_batches(
    dataset: Sized,
    optimizer: Any,
    *,
    batch_size: int = 32,
    seed: int = 0,
    shuffle: bool = True,
    index: int | None = None,
    count: int | None = None,
) -> GrowingBatchSampler:
    """A batch sampler of this worker's part of a dataset, in batches as large as the servers ask for.

    `optimizer`: a RemoteOptimizer, or a Client. `batch_size` is the size where the servers leave it open. The rest is
    as for `worker_sampler`.
    """
    _check_whole("batch_size", batch_size)
    if batch_size < 1:
        raise InvalidArgument(f"batch_size is {batch_size}; expected 1 or more.")
    # Without a look at its value, for which the optimizer would join its run.
    if getattr_static(optimizer, "batch_size", None) is None:
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}; expected a RemoteOptimizer or a Client, whose servers set the "
            "size of batches."
        )
    sampler = worker_sampler(dataset, seed=seed, shuffle=shuffle, index=index, count=count)
    return GrowingBatchSampler(sampler, optimizer, default=batch_size)


def length_of(dataset: Any) -> int:
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise InvalidArgument(
            f"The data set, a {type(dataset).__name__}, has no length; expected one with __len__ and __getitem__: "
            "portions are ranges of its indices."
        ) from None
    if length == 0:
        raise InvalidArgument(f"The data set, a {type(dataset).__name__}, is empty; expected at least one example.")
    return length


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidArgument(f"{name} is {value!r}; expected a whole number.")


def _place(variable: str, given: int | None) -> int | None:
    text = os.environ.get(variable, "").strip()
    if given is not None or not text:
        return given
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{variable} is {text!r}; expected a whole number.") from None
