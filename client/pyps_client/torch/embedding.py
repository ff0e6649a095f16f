"""An embedding table whose rows lie on the servers and come to be by their first updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pyps_client.join import model_of_run
from pyps_client.launch import LOCAL, Launch
from pyps_client.tables import Gradients, Pulled, RowCache, Tables
from pyps_client.vectors import FiniteGuard, first_non_finite
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model, Tensor
from pyps_wire.rows import Ids

_RULES = {"sgd", "adagrad", "rowwise_adagrad", "adam"}


class Embedding(torch.nn.Module):
    """A table of rows by int64 id, without a size: ids need not be known before.

    It has no parameters of its own. RemoteOptimizer finds it in its model and pushes its gradients in each `step`;
    until then `forward` brings rows from the servers. Ids are made unique before the wire, and gradients of one id are
    summed.

        users = pyps_client.Embedding("users", dim=64, optimizer="rowwise_adagrad", lr=0.05)
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: str = "rowwise_adagrad",
        lr: float = 0.01,
        seed: int = 0,
        scale: float = 0.01,
        bfloat16: bool = False,
        max_norm: float = 0.0,
        min_count: int = 1,
        ttl: int = 0,
        capacity: int = 0,
        cache_rows: int = 0,
        cache_versions: int = 0,
        **settings: float,
    ) -> None:
        """`name`: the table's, unique in the model. `dim`: the numbers in a row, 1,024 at most.

        `optimizer`: the rule of its rows on the servers: "sgd", "adagrad", "rowwise_adagrad" or "adam", with `lr` and
        its other `settings` (eps, weight_decay, beta1, ...). Weight decay acts on the rows of an update.
        `seed`, `scale`: a row begins uniform in [-scale, scale), by a hash of seed and id.
        `bfloat16`: rows lie in bfloat16 on the servers, rounded at random; slots in float32.
        `max_norm`: rows are scaled down to it after an update; 0 for no bound.
        `min_count`: an id becomes a row with so many updates; the gradients before are dropped.
        `ttl`: a row without an update in so many versions of its shard is dropped; 0 for never.
        `capacity`: the most rows; for more the one updated longest ago is dropped. 0 for no bound.
        `cache_rows`: how many rows the worker keeps; `cache_versions`: of how many updates of their shard, its own
        among them, they may know nothing.

        Raises InvalidArgument for a name, a dim, a rule or a cache that no table can have. The servers judge the other
        settings when the worker joins.
        """
        super().__init__()
        for key, number, most in (
            ("dim", dim, 1024),
            ("cache_rows", cache_rows, 2**31),
            ("cache_versions", cache_versions, 2**62),
        ):
            least = 1 if key == "dim" else 0
            if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or not least <= number <= most:
                raise InvalidArgument(f"Table {name!r} has {key}={number!r}; expected a number from {least} to {most}.")
        if not (isinstance(name, str) and name and name.isprintable()):
            raise InvalidArgument(f"A table is named {name!r}; expected printable characters.")
        if optimizer not in _RULES:
            raise InvalidArgument(
                f"Table {name!r} has optimizer={optimizer!r}; expected one of {', '.join(sorted(_RULES))}."
            )
        self.name, self.dim = name, int(dim)
        numbers = {"learning_rate": lr, **settings, "seed": seed, "scale": scale, "max_norm": max_norm}
        numbers |= {"min_count": min_count, "ttl": ttl, "capacity": capacity}
        numbers = {key: value.item() if isinstance(value, np.generic) else value for key, value in numbers.items()}
        described = ",".join(f"{key}={value!r}" for key, value in numbers.items())
        self._spec = f"{optimizer}:{described}" + (",bfloat16=true" if bfloat16 else "")
        self._tables: Tables | None = None
        self._cache_rows, self._cache_versions = cache_rows, cache_versions
        self._cache: RowCache | None = None
        # Of backward passes since the last step: ids, their rows' gradients and the versions of these rows.
        self._gradients: list[tuple[Ids, torch.Tensor, dict[int, int]]] = []
        # By ids, since the last step, and since the one before.
        self._prefetched: dict[bytes, _Asked] = {}
        self._prefetched_before: dict[bytes, _Asked] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle what is no minibatch's."""
        return {**self.__dict__, "_gradients": [], "_prefetched": {}, "_prefetched_before": {}}

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}, {self._spec}"

    def tensor(self, num_shards: int, *, group: int) -> Tensor:
        """Return the table's entry in the run's model."""
        return Tensor(self.name, (num_shards, self.dim), group, table=self._spec)

    def bind(self, tables: Tables) -> None:
        """Let the rows come from these tables, once the run is joined."""
        self._tables = tables
        if self._cache_rows:
            rows_max, versions_max = self._cache_rows, self._cache_versions
            self._cache = RowCache(tables, self.name, rows_max=rows_max, versions_max=versions_max)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, of any shape: (*ids.shape, dim)."""
        inverse, rows = self._rows(ids)
        return F.embedding(inverse, rows)

    def bag(self, ids: torch.Tensor, offsets: torch.Tensor | None = None, mode: str = "sum") -> torch.Tensor:
        """Return the "sum" or "mean" of the rows of each bag, (bags, dim): as nn.EmbeddingBag does."""
        if mode not in ("sum", "mean"):
            raise InvalidArgument(f"mode is {mode!r}; expected 'sum' or 'mean'.")
        inverse, rows = self._rows(ids)
        return F.embedding_bag(inverse, rows, offsets, mode=mode)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Bring rows beside the computation, for a `forward` with the same ids in this step or the next."""
        numbers = self._numbers(ids)
        self._prefetched[numbers.tobytes()] = self._asked(numbers, beside=True)

    def clear_gradients(self) -> None:
        """Forget the gradients of backward passes that no step followed, as `zero_grad` does for parameters."""
        self._gradients.clear()

    def take_gradients(self) -> list[Gradients]:
        """Return the gradients of each lookup since the last call, and forget what was prefetched before that."""
        gradients, self._gradients = self._gradients, []
        self._prefetched_before, self._prefetched = self._prefetched, {}
        return [
            Gradients(ids, gradient.detach().to("cpu", torch.float32).numpy(), versions)
            for ids, gradient, versions in gradients
        ]

    def _numbers(self, ids: torch.Tensor) -> Ids:
        if not isinstance(ids, torch.Tensor):
            raise InvalidArgument(f"Ids of table {self.name!r} are a {type(ids).__name__}; expected a torch.Tensor.")
        if ids.dtype not in (torch.int64, torch.int32):
            raise InvalidArgument(f"Ids of table {self.name!r} are of type {ids.dtype}; expected torch.int64.")
        return ids.detach().cpu().numpy().astype(np.int64, copy=False)

    def _rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._numbers(ids)
        for prefetched in (self._prefetched, self._prefetched_before):
            if (asked := prefetched.pop(numbers.tobytes(), None)) is not None:
                break
        else:
            asked = self._asked(numbers, beside=False)
        found, versions = asked.wait()
        if self._of_run().are_outdated(versions):
            # They were prefetched before this worker's last push.
            asked = self._asked(numbers, beside=False)
            found, versions = asked.wait()
        rows = torch.from_numpy(found).to(ids.device).requires_grad_(torch.is_grad_enabled())

        def note(rows: torch.Tensor) -> None:
            assert rows.grad is not None
            self._gradients.append((asked.unique, rows.grad, versions))
            rows.grad = None

        if rows.requires_grad:
            rows.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        return torch.from_numpy(asked.inverse.reshape(ids.shape)).to(ids.device), rows

    def _asked(self, ids: Ids, *, beside: bool) -> _Asked:
        """Ask for the rows of ids, on a thread where it is to be `beside`."""
        unique, inverse = np.unique(ids, return_inverse=True)
        return _Asked(unique, inverse, self._waits(unique, beside=beside))

    def _waits(self, unique: Ids, *, beside: bool) -> Callable[[], Pulled]:
        tables, cache = self._of_run(), self._cache
        if cache is None:
            return self._pulled(tables, unique, beside=beside)
        found, rows, versions = cache.look(unique)
        missing = unique[~found]
        wait = self._pulled(tables, missing, beside=beside)

        def joined() -> Pulled:
            more, newer = wait()
            rows[~found] = more
            cache.put(missing, more, newer)
            return rows, {**newer, **{shard: min(at, newer.get(shard, at)) for shard, at in versions.items()}}

        return joined

    def _pulled(self, tables: Tables, ids: Ids, *, beside: bool) -> Callable[[], Pulled]:
        if beside:
            return tables.prefetch(self.name, ids).result
        return lambda: tables.pull({self.name: ids})[self.name]

    def _of_run(self) -> Tables:
        if self._tables is None:
            raise InvalidArgument(
                f"Table {self.name!r} is of no run yet: make RemoteOptimizer(model, ...) of a model that has it, and "
                "call its join() or zero_grad() before the table is used outside the model's forward pass."
            )
        return self._tables


class _Asked(NamedTuple):
    """Rows that were asked for: their ids, where each id of the script's is among these, and what waits for them."""

    unique: Ids
    inverse: npt.NDArray[np.intp]
    wait: Callable[[], Pulled]


def tables_of(module: torch.nn.Module) -> list[Embedding]:
    """Return a module's tables; raise InvalidArgument for two of one name."""
    found = [part for part in module.modules() if isinstance(part, Embedding)]
    names = [table.name for table in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(f"Two tables are named {twice!r}: give each of a model's tables a name of its own.")
    return found


def require_no_tables(module: torch.nn.Module, *, user: str) -> None:
    """Raise InvalidArgument for a model with tables."""
    if tables := tables_of(module):
        raise InvalidArgument(f"{user} trains no tables of rows ({tables[0].name!r}): use RemoteOptimizer.")


def with_tables(model: Model, tables: Sequence[Embedding], launch: Launch) -> Model:
    """Return the model with the tables behind its parameters, in as many shards as in the run, or a shard a server."""
    if not tables:
        return model
    # A server of its own has no run yet.
    run = None if LOCAL in launch.servers else model_of_run(launch)
    known = {tensor.name: tensor.shape[0] for tensor in run.tables.values()} if run is not None else {}
    entries = [
        table.tensor(known.get(table.name, len(launch.servers)), group=group)
        for group, table in enumerate(tables, model.num_groups)
    ]
    return replace(model, tensors=(*model.tensors, *entries))


def gather(tables: Iterable[Embedding], of_run: Tables, finite: FiniteGuard) -> None:
    """Add the gradients of all tables to the next push; of none where one is not finite, which `finite` counts."""
    gradients = [(table.name, each) for table in tables for each in table.take_gradients()]
    for name, given in gradients:
        place = first_non_finite(given.rows, FLOAT32)
        if place is not None:
            row, column = divmod(place, given.rows.shape[1])
            finite.skipped(f"table {name!r}", (int(given.ids[row]), column), float(given.rows[row, column]))
            return
    finite.passed()
    for name, given in gradients:
        of_run.gather(name, given)
