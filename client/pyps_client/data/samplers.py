"""Samplers of one worker's part of the data, and batches whose size the servers set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from inspect import getattr_static
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.data import place
from pyps_client.launch import torchrun_place
from pyps_wire.errors import InvalidArgument

SEED_MAX = 2**32 - 1


class WorkerSampler:
    """The indices of this worker's part of a dataset: DataLoader(dataset, sampler=...).

    In each epoch all workers draw the same permutation, and each takes every count-th index of it. Their parts are
    disjoint, cover the dataset, and differ in size by one at most. Each iteration is the next epoch.

    How far its examples are trained goes to the servers with each push. A worker that takes another's place, as after
    a restart, goes on there: its first iteration has the rest of the epoch. To know it, that iteration joins the run.
    """

    def __init__(self, length: int, *, seed: int, shuffle: bool, index: int, count: int) -> None:
        self.key = f"{length} {seed} {shuffle} {index}/{count}"
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._index = index
        self._count = count
        # Of the next iteration: its epoch, and how many of its examples are trained already.
        self._epoch = self._start = 0
        self._resumed = False
        # Of the present one: its epoch, where it began (before 0 in the rest of the epoch before), the examples drawn,
        # and the steps. A loader with processes draws ahead, so that steps say how many are trained.
        self._present = self._began = self._drawn = self._steps = 0
        # Examples drawn at its first step; and those that each further step draws, 0 if not known yet.
        self._drawn_first = self._per_step = 0
        # Those that the whole iteration draws.
        self._drawn_last = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration: for epoch in range(sampler.epoch, 20). Reading it joins the run."""
        self._resume()
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._resume()
        self._resumed = True
        if epoch != self._epoch:
            self._epoch, self._start = epoch, 0

    def __len__(self) -> int:
        return len(range(self._index, self._length, self._count))

    def __iter__(self) -> Iterator[int]:
        self._resume()
        indices, start = self._indices(self._epoch)[self._start :], self._start
        if start and len(indices) < max(1, self._per_step):
            # Too few for a batch, without which a loop may not expect an epoch: the next one follows at once.
            self._epoch += 1
            start, indices = -len(indices), indices + self._indices(self._epoch)
        self._present, self._began, self._drawn, self._steps = self._epoch, start, 0, 0
        self._drawn_last = len(indices)
        self._epoch, self._start = self._epoch + 1, 0
        return self._draw(indices)

    def stepped(self) -> None:
        self._resumed = True
        self._steps += 1
        if self._steps == 1:
            self._drawn_first = self._drawn
        elif self._steps == 2 and self._drawn_first < self._drawn < self._drawn_last:
            self._per_step = self._drawn - self._drawn_first

    def place(self) -> list[int]:
        ahead = self._drawn_first > self._per_step
        trained = self._began + (min(self._drawn, self._steps * self._per_step) if ahead else self._drawn)
        before = trained < 0
        return [self._present - before, trained + before * len(self), self._per_step]

    def _draw(self, indices: list[int]) -> Iterator[int]:
        for index in indices:
            self._drawn += 1
            place.drew(self)
            yield index

    def _resume(self) -> None:
        """Go on where the worker was whose place this one took."""
        if not self._resumed and (restored := place.restored(self.key)) is not None:
            self._resumed = True
            self._epoch, self._start, self._per_step = restored

    def _indices(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self._index, self._length, self._count))
        indices: list[int] = permutation(self._length, self._seed, epoch)[self._index :: self._count].tolist()
        return indices


def permutation(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of an epoch's examples, the same in all workers."""
    # Workers may have different versions of numpy, and RandomState draws the same numbers in all of them.
    return np.random.RandomState([seed, epoch]).permutation(length)


def worker_sampler(
    dataset: Sized, *, seed: int = 0, shuffle: bool = True, index: int | None = None, count: int | None = None
) -> WorkerSampler:
    """Return a sampler of this worker's part of a dataset.

    `index` and `count`: this worker's number, from 0, and the number of workers; by default those of torchrun, else
    PYPS_WORKER_INDEX and PYPS_WORKER_COUNT, else one worker. `seed` must be the same in all workers.
    """
    if not isinstance(dataset, Sized):
        raise InvalidArgument(f"The data set, a {type(dataset).__name__}, has no length; expected one with __len__.")
    torchrun = torchrun_place(os.environ)
    if torchrun and index is None and count is None:
        index, count = torchrun
    index = _from_environment("PYPS_WORKER_INDEX") if index is None else index
    count = _from_environment("PYPS_WORKER_COUNT") if count is None else count
    if (index is None) != (count is None):
        given, missing = ("index", "count") if count is None else ("count", "index")
        raise InvalidArgument(
            f"The worker's {given} is known but not its {missing}: set both PYPS_WORKER_INDEX and "
            f"PYPS_WORKER_COUNT, or pass both index= and count=."
        )
    index, count = (0, 1) if index is None or count is None else (index, count)
    check_whole("seed", seed, most=SEED_MAX)
    check_whole("count", count, least=1)
    check_whole("index", index, most=count - 1)
    return WorkerSampler(len(dataset), seed=seed, shuffle=shuffle, index=index, count=count)


class GrowingBatchSampler:
    """Batches of this worker's part, of the size that the servers set: DataLoader(dataset, batch_sampler=...).

    Under a batch growth (Zhang et al. 2013) batches grow with the number of examples that the servers have counted. The
    size comes with the answers to pushes; for the count, the sampler sets the optimizer's `examples_in_batch`. If a
    loader with processes of its own fetches batches ahead, size and count are early by as many batches.
    """

    def __init__(self, sampler: WorkerSampler, optimizer: Any, *, default: int) -> None:
        self.sampler = sampler
        self._optimizer = optimizer
        self._default = default

    @property
    def batch_size(self) -> int:
        """Examples in the next batch."""
        return int(self._optimizer.batch_size or self._default)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as after a restart."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, if their size does not grow."""
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while batch := list(islice(indices, self.batch_size)):
            # The servers count these: without a count the batches would never grow.
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
    """Return a batch sampler of this worker's part of a dataset, in batches of the size that the servers set.

    `optimizer`: a RemoteOptimizer, or a Client. `batch_size`: the size if the servers set none. The rest is as for
    `worker_sampler`.
    """
    check_whole("batch_size", batch_size, least=1)
    # To read the value, the optimizer would join its run.
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


def check_whole(name: str, value: object, *, least: int = 0, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise InvalidArgument(f"{name} is {value!r}; expected a whole number, {least} to {most}.")


def _from_environment(variable: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        raise InvalidArgument(f"{variable} is {text!r}; expected a whole number.") from None
