"""The outer storage of dynamicemb's tables (NVIDIA's recsys-examples) on servers: rows that GPUs have no room for.

It was never run with dynamicemb, nor on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyps_client.launch import Launch
from pyps_client.tables import Gradients
from pyps_client.torch.embedding import with_tables
from pyps_client.worker import Worker
from pyps_wire import partition
from pyps_wire.common_pb2 import OUTCOME_REJECTED, GroupSettings, OptimizerSettings
from pyps_wire.errors import InvalidArgument

# Of a file, at a time.
LOADED_ROWS = 1 << 16
# A score is kept in four digits, which float32 holds exactly: the shifts of each.
_DIGITS = np.arange(0, 64, 16, dtype=np.uint64)


@dataclass(frozen=True)
class _Table:
    """Rows of an embedding, the optimizer's state, the score's digits, and 1: a row that is not there is 0."""

    name: str
    dim: int
    value_dim: int

    def tensor(self, num_shards: int, *, group: int) -> partition.Tensor:
        shape = num_shards, self.value_dim + _DIGITS.size + 1
        return partition.Tensor(self.name, shape, group, table="assign:scale=0")


class TableStorage:
    """A group of dynamicemb's tables: `DynamicEmbTableOptions(external_storage=TableStorage, caching=True, ...)`.

    Servers keep the rows, bit for bit, and compute nothing. They have a run of these tables alone, in which each
    process of the job is a worker.
    """

    def __init__(self, options: Sequence[Any], optimizer: Any, launch: Launch | None = None) -> None:
        """Join the run; a functools.partial may give the `launch`."""
        from dynamicemb.types import Storage

        # No subclass, so that the module can be imported without dynamicemb.
        Storage.register(type(self))
        launch = Launch.of(None, launch)
        if {launch.gradient_codec, launch.parameter_codec} != {"float32"}:
            raise InvalidArgument("TableStorage keeps rows bit for bit: leave gradient_codec and parameter_codec out.")
        self._dtype: torch.dtype = options[0].embedding_dtype
        self._initial_state = float(optimizer.get_initial_optim_states())
        self._all = [
            _Table(f"dynamicemb-{number}", each.dim, each.dim + optimizer.get_state_dim(each.dim))
            for number, each in enumerate(options)
        ]
        # A run has one parameter at least.
        model = with_tables(partition.Model((partition.Tensor("dynamicemb", (1,)),)), self._all, launch)  # type: ignore[arg-type]
        settings = OptimizerSettings(rule="sgd", groups=[GroupSettings()])
        self._worker = Worker(model, settings, launch=launch, initial=lambda: [np.zeros(1, np.float32)])
        self._worker.connect()
        assert self._worker.tables is not None
        self._tables = self._worker.tables
        # A prefetch may come from another thread.
        self._lock = threading.Lock()

    def close(self) -> None:
        """Leave the run."""
        self._worker.close()

    def find(
        self, unique_keys: Tensor, table_ids: Tensor, copy_mode: Any, lfu_accumulated_frequency: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Return the number, keys, places, tables and scores of missing rows; and of all: found, score, value.

        Frequencies are added to the scores that are returned; servers get these with the next insert.
        """
        with self._lock:
            arrays = self._rows(_array(unique_keys), _array(table_ids))
        found, score, values = (torch.from_numpy(array).to(unique_keys.device) for array in arrays)
        if copy_mode.name == "EMBEDDING":
            values = values[:, : self.max_embedding_dim()]
        missing, missing_scores = torch.nonzero(~found).reshape(-1), None
        if lfu_accumulated_frequency is not None:
            score += found * lfu_accumulated_frequency
            missing_scores = lfu_accumulated_frequency[missing]
        of_missing = (len(missing), unique_keys[missing], missing, table_ids[missing], missing_scores)
        return (*of_missing, found, score, values.to(self._dtype))

    def insert(
        self,
        keys: Tensor,
        table_ids: Tensor,
        values: Tensor,
        scores: Tensor | None = None,
        preserve_existing: bool = False,
    ) -> None:
        """Write rows, of each key once; `preserve_existing` leaves the scores of those that are there."""
        terms, ids, numbers, given = self._worker.terms, _array(keys), _array(table_ids), _array(values.float())
        if terms.updates_per_round or terms.clip_norm:
            raise InvalidArgument("TableStorage needs servers that apply each push as it is: --protocol async.")
        score = np.zeros(ids.size, np.int64) if scores is None else _array(scores).astype(np.int64)
        with self._lock:
            if preserve_existing:
                found, kept, _ = self._rows(ids, numbers)
                score = np.where(found, kept, score)
            versions = {shard: max(0, at) for held in self._tables.held.values() for shard, at in held.versions.items()}
            for table, places in self._places(numbers):
                places = places[np.argsort(ids[places])]
                rows = np.ones((places.size, self._tables.dims[table.name]), np.float32)
                rows[:, : table.value_dim] = given[places][:, self._columns(table)]
                rows[:, table.value_dim : -1] = score[places].view(np.uint64)[:, None] >> _DIGITS & np.uint64(0xFFFF)
                self._tables.gather(table.name, Gradients(ids[places], rows, versions))
            self._worker.clock += 1
            receipts = self._tables.push(clock=self._worker.clock)
        for receipt in receipts:
            if receipt.outcome == OUTCOME_REJECTED:
                raise InvalidArgument(f"The servers did not take rows: {receipt.message}")

    def load(
        self,
        table_id: int,
        meta_file_path: str,
        emb_file_path: str,
        embedding_file_path: str,
        score_file_path: str | None,
        opt_file_path: str | None,
        include_optim: bool,
        timestamp: int,
    ) -> None:
        """Insert the rows of files that dynamicemb dumped, with the scores as they stand in them."""
        table, start = self._all[table_id], 0
        while (keys := _part(emb_file_path, np.int64, 1, start)).size:
            rows = np.full((len(keys), self.max_value_dim()), self._initial_state, np.float32)
            rows[:, : table.dim] = _part(embedding_file_path, np.float32, table.dim, start)
            if include_optim and opt_file_path and table.value_dim > table.dim:
                states = _part(opt_file_path, np.float32, table.value_dim - table.dim, start)
                rows[:, self._columns(table)[table.dim :]] = states
            scores = torch.from_numpy(_part(score_file_path, np.int64, 1, start)[:, 0]) if score_file_path else None
            numbers = torch.full((len(keys),), table_id)
            self.insert(torch.from_numpy(keys[:, 0]), numbers, torch.from_numpy(rows), scores)
            start += len(keys)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise InvalidArgument."""
        raise InvalidArgument(
            "A worker cannot list the ids of a table: the servers' checkpoints have its rows (`pyps save`), and "
            "`pyps export FILE --checkpoint FOLDER` writes them."
        )

    dump = export_keys_values = _refuse

    def embedding_dtype(self) -> torch.dtype:
        return self._dtype

    def embedding_dim(self, table_id: int) -> int:
        return self._all[table_id].dim

    def value_dim(self, table_id: int) -> int:
        return self._all[table_id].value_dim

    def max_embedding_dim(self) -> int:
        return max(table.dim for table in self._all)

    def max_value_dim(self) -> int:
        return max(table.value_dim for table in self._all)

    def init_optimizer_state(self) -> float:
        return self._initial_state

    def _rows(self, ids: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return which rows are there, their scores, and their values in dynamicemb's columns."""
        found, scores = np.zeros(ids.size, bool), np.zeros(ids.size, np.int64)
        values = np.zeros((ids.size, self.max_value_dim()), np.float32)
        places = self._places(numbers)
        pulled = self._tables.pull({table.name: ids[at] for table, at in places})
        for table, at in places:
            rows, _ = pulled[table.name]
            found[at] = rows[:, -1] == 1
            digits = rows[:, table.value_dim : -1].astype(np.uint64) << _DIGITS
            scores[at] = digits.sum(axis=1, dtype=np.uint64).view(np.int64)
            values[np.ix_(at, self._columns(table))] = rows[:, : table.value_dim]
        return [found, scores, values]

    def _places(self, numbers: npt.NDArray[Any]) -> list[tuple[_Table, npt.NDArray[np.intp]]]:
        """Return where each table's rows stand."""
        return [(table, np.flatnonzero(numbers == number)) for number, table in enumerate(self._all)]

    def _columns(self, table: _Table) -> npt.NDArray[np.intp]:
        """Return where dynamicemb has a row's numbers: states begin behind the longest embedding."""
        columns = np.arange(table.value_dim)
        columns[table.dim :] += self.max_embedding_dim() - table.dim
        return columns


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.detach().cpu().numpy()


def _part(path: str, dtype: type, width: int, start: int) -> npt.NDArray[Any]:
    offset = np.dtype(dtype).itemsize * width * start
    return np.fromfile(path, dtype, LOADED_ROWS * width, offset=offset).reshape(-1, width)
