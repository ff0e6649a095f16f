"""The batches of a portion, loaded on a thread while the ones before them are computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

import torch.utils.data

from pyps_client.data.samplers import length_of
from pyps_client.retry import SIGNAL_SECONDS
from pyps_wire.errors import BadRequest
from pyps_wire.work_pb2 import Portion

# Batches that are loaded before they are asked for.
BATCHES_AHEAD = 4


class MapDataset(Protocol):
    """A data set of which every example has a number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PortionLoader:
    """Reads a data set batch by batch, in order, and on into the portion that is likely to come next.

    One thread reads, so that a data set need not stand several; it is a daemon and does not hold up the program's end.
    """

    def __init__(
        self, dataset: MapDataset, *, batch_size: int, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """`collate` makes a batch of a list of examples; by default as torch's DataLoader does."""
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = collate or torch.utils.data.default_collate
        self._tasks: queue.SimpleQueue[tuple[Future[Any], range] | None] = queue.SimpleQueue()
        # What was asked for, by its examples.
        self._asked: dict[range, Future[Any]] = {}
        threading.Thread(target=self._load, name="pyps-portion-loader", daemon=True).start()

    def batches(self, portion: Portion, upcoming: Portion | None = None) -> Iterator[tuple[Any, int]]:
        """The portion's batches, each with its number of examples; the last may have fewer.

        What goes wrong in the data set is raised here.
        """
        own = self._ranges(portion)
        order = own + (self._ranges(upcoming) if upcoming is not None else [])
        self._forget_others(order)
        for place, examples in enumerate(own):
            for wanted in order[place : place + 1 + BATCHES_AHEAD]:
                self._ask(wanted)
            batch = self._asked.pop(examples)
            while not batch.done():
                wait([batch], SIGNAL_SECONDS)
            yield batch.result(), len(examples)

    def close(self) -> None:
        """Ends the thread, after the batch that it reads now."""
        self._forget_others([])
        self._tasks.put(None)

    def _ranges(self, portion: Portion) -> list[range]:
        begins = range(portion.start, portion.stop, self._batch_size)
        return [range(begin, min(begin + self._batch_size, portion.stop)) for begin in begins]

    def _ask(self, examples: range) -> None:
        if examples not in self._asked:
            future: Future[Any] = Future()
            self._asked[examples] = future
            self._tasks.put((future, examples))

    def _forget_others(self, wanted: Sequence[range]) -> None:
        """Drops what was loaded on a hint that came to nothing."""
        for examples in self._asked.keys() - set(wanted):
            self._asked.pop(examples).cancel()

    def _load(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, examples = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                batch = self._collate(self._examples(examples))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(batch)
            # Nothing is kept of a batch while waiting for the next.
            task = future = batch = None  # type: ignore[assignment]

    def _examples(self, indices: range) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            # As torch's loader prefers it.
            return list(fetch_many(list(indices)))
        return [self._dataset[index] for index in indices]


def checked_length(dataset: Any) -> int:
    """The number of examples, if portions of them can be read."""
    length = length_of(dataset)
    if not hasattr(dataset, "__getitem__"):
        raise BadRequest(
            f"The data set, a {type(dataset).__name__}, cannot be read by index; expected one with __len__ and "
            "__getitem__, such as torch.utils.data.TensorDataset."
        )
    return length
