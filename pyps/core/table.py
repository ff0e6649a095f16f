"""A table: a shard whose rows, named by int64 ids, come to be by their first updates.

A row that was never updated is its first value, a function of the table's seed, the id and the column. So a pull
changes nothing, and a table is a function of its pushes: a restart, a standby, a replay and another number of servers
agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import Any, ClassVar, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pyps import _kernels
from pyps.core import rules, spec
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import FLOAT32_MAX, Gradient, Reply
from pyps.core.protocols.base import Part
from pyps.core.roster import Roster
from pyps.core.rules import UpdateRule
from pyps.core.shard import LoggedShard, Shard
from pyps.core.store import Pushed, Rows, ShardState
from pyps.core.update import Update, factors_of, has_numbers
from pyps_wire.codecs import Codec
from pyps_wire.errors import ConfigurationError, InvalidArgument, NoRoom

Ids = npt.NDArray[np.int64]
# Gradients of an update: ids, rows, their codec and the factor that multiplies them.
WeightedRows = tuple[memoryview, bytes | memoryview, Codec, float]

DIM_MAX = 1024
ROWS_MAX = 2**31

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of a table that are not its rule's."""

    seed: int = 0
    # First values are uniform between -scale and scale.
    scale: float = 0.01
    # Whether rows are kept in bfloat16, rounded at random, and slots in float32.
    bfloat16: bool = False
    # The largest Euclidean norm of a row after an update; 0 for no bound.
    max_norm: float = 0.0
    # The updates that an id takes to become a row; the gradients before are dropped.
    min_count: int = 1
    # A row without an update in so many versions is dropped; 0 for never.
    ttl: int = 0
    # The most rows of the whole table: beyond it the row that was updated longest ago is dropped; 0 for no bound.
    capacity: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("seed", 0, 2**63),
            ("min_count", 1, 2**16),
            ("ttl", 0, 2**62),
            ("capacity", 0, ROWS_MAX),
        ):
            if not least <= getattr(self, name) < most:
                raise InvalidArgument(f"a table's {name} is {getattr(self, name)}; expected {least} to {most - 1}")
        for name in ("scale", "max_norm"):
            if not 0.0 <= getattr(self, name) <= FLOAT32_MAX:
                raise InvalidArgument(f"a table's {name} is {getattr(self, name)}; expected a number of at least 0")


@dataclass(frozen=True)
class TableSettings:
    """A table's rule with its settings, and those of its rows."""

    rule: UpdateRule
    hyperparameters: Mapping[str, float]
    rows: RowSettings

    @classmethod
    def parse(cls, text: str) -> TableSettings:
        """Return the settings of "rowwise_adagrad:learning_rate=0.05,min_count=2"; raise InvalidArgument for others."""
        name, _, rest = text.partition(":")
        if name not in rules.ROW_RULES:
            raise InvalidArgument(f"a table's rule is {name!r}; expected one of {', '.join(sorted(rules.ROW_RULES))}")
        rule, own = rules.ROW_RULES[name], {field.name for field in fields(RowSettings)}
        items = [item for item in rest.split(",") if item]
        of_rows = [item for item in items if item.partition("=")[0] in own]
        numbers: dict[str, float] = {}
        for key, _, value in (item.partition("=") for item in items if item not in of_rows):
            try:
                numbers[key] = float(value)
            except ValueError:
                raise InvalidArgument(f"a table's {key} is {value!r}; expected a number") from None
        return cls(rule, rules.validate(rule, numbers), spec.build(RowSettings, ",".join(of_rows), what="a table"))


def check_table(name: str, dim: int, text: str) -> TableSettings:
    """Return the settings of a table; raise InvalidArgument for those that the server does not have."""
    if dim > DIM_MAX:
        raise InvalidArgument(f"table {name!r} has rows of {dim} numbers; expected {DIM_MAX} at most")
    try:
        return TableSettings.parse(text)
    except ConfigurationError as error:
        raise InvalidArgument(f"table {name!r}: {error}") from None


class TableBudget:
    """Limits the bytes of all tables of a server. May be used from any thread, under any lock."""

    def __init__(self, bytes_max: int = 2**62):
        self.bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock: of each table's shard.
        self._held: dict[int, int] = {}

    def require(self, shard_id: int, num_bytes: int, *, table: str) -> None:
        """Let a shard grow to so many bytes; raise NoRoom where all would have too many."""
        with self._lock:
            before = self._held.get(shard_id, 0)
            total = sum(self._held.values()) - before + num_bytes
            if num_bytes > before and total > self.bytes_max:
                raise NoRoom(
                    f"table {table!r} would grow to {num_bytes} bytes on this server, all tables to {total}; they may "
                    f"take {self.bytes_max}: raise --max-table-bytes, or give the table a capacity= or ttl="
                )
            self._held[shard_id] = num_bytes


class BoundTable:
    """A table's rule with its rows and settings."""

    sign = 1.0

    def __init__(self, rule: UpdateRule, table: _kernels.Table, hyperparameters: Mapping[str, float]) -> None:
        self.adaptive = rule.adaptive
        self._update = table.update
        self._settings, self._derive = dict(hyperparameters), rule.derive
        self._names = table.numbers

    def apply(self, rows: Sequence[WeightedRows], *, rate: float, version: int) -> None:
        """Update the rows of all ids; `version` is the number of updates before this one."""
        numbers = {**self._settings, "rate": rate}
        if self._derive:
            self._derive(numbers, version)
        self._update(rows, tuple(numbers[name] for name in self._names), version + 1)


def apply_rows(
    rule: BoundTable,
    parts: Sequence[Part],
    *,
    rate: float,
    version: int,
    update_scale: float = 1.0,
    reply: Reply | None = None,
    merge: str = "",
) -> int:
    """Apply the parts to a table as one update; see `apply_update`."""
    parts = [part for part in parts if has_numbers(part)]
    if parts:
        factors, step_scale = factors_of(rule, parts, update_scale)
        gradients = [part.contribution.gradient for part in parts]
        rows = [(g.ids.data, g.numbers, g.codec, factor) for g, factor in zip(gradients, factors, strict=True)]
        rule.apply(rows, rate=rate * step_scale, version=version)
    return 0


class TableShard(Shard):
    """The rows of a table whose ids belong to this shard. Its `length` is that of a row."""

    has_rows = True
    _apply_update: ClassVar[Callable[..., int]] = staticmethod(apply_rows)

    def __init__(
        self,
        shard_id: int,
        name: str,
        dim: int,
        settings: TableSettings,
        *,
        bucket: int = 0,
        num_buckets: int = 1,
        rows: Rows | None = None,
        tables: TableBudget | None = None,
        **options: Any,
    ) -> None:
        """`bucket`: this shard's number among those of the table, which has its share of the capacity."""
        self.name = name
        of_rows = settings.rows
        rule = settings.rule
        self._table = _kernels.Table(
            dim,
            rule.name,
            [settings.hyperparameters.get(rule.first_values.get(slot, ""), 0.0) for slot in rule.slot_names],
            bfloat16=of_rows.bfloat16,
            # Tables of one seed begin with other numbers.
            seed=of_rows.seed ^ crc32(name.encode()),
            scale=of_rows.scale,
            norm_max=of_rows.max_norm,
            min_count=of_rows.min_count,
            ttl=of_rows.ttl,
            capacity=-(-of_rows.capacity // num_buckets),
        )
        if rows is not None:
            version = options.get("version", 0)
            ids, versions, parameters, slots, *candidates = (array.data for array in rows)
            self._table.load(ids, versions, parameters, slots, version)
            ids, versions, counted = candidates
            self._table.load(ids, versions, counted, b"", version, candidates=True)
        self._counting = Lock()
        # Guarded by _counting: rows that were asked for, and those of them that had an update.
        self._lookups = self._hits = 0
        self._tables = TableBudget() if tables is None else tables
        super().__init__(
            shard_id, aligned_zeros(0), rule=settings.rule, hyperparameters=settings.hyperparameters, **options
        )
        self.length = dim
        self.bucket, self.num_buckets = bucket, num_buckets
        self._tables.require(shard_id, self.table_bytes, table=name)

    def configure(
        self, *, roster: Roster, behaviour: Behaviour | None = None, learning_rate: float | None = None
    ) -> list[Update]:
        """Replace the behaviour; a rate that is set for the run is not a table's."""
        return super().configure(roster=roster, behaviour=behaviour)

    def lookup(self, ids: Ids, reply: Reply) -> int:
        """Write rows, of ids in any order, to the reply; return a version that all of them have at least."""
        version = self.version
        hits = self._table.lookup(ids.data, reply)
        with self._counting:
            self._lookups += ids.size
            self._hits += hits
        return version

    def read(self, reader: Callable[[int, Floats], T]) -> T:
        """Return the result of `reader(version, digest)`: one number, of the bits of all rows and slots."""
        with self._lock:
            digest = 0
            for array in self._table.dump(0):
                digest = crc32(array.data, digest)
            return reader(self.version, np.array([digest], np.uint32).view(np.float32))

    @property
    def table_bytes(self) -> int:
        return self._table.stats()["bytes"]

    def table_counts(self) -> dict[str, Any]:
        """Return the fields of the Inspector's TableInfo."""
        counts = {name: count for name, count in self._table.stats().items() if name != "version"}
        return {"name": self.name, **counts, "lookups": self._lookups, "hits": self._hits}

    # What follows is called under the lock.

    def _decide(self, gradient: Gradient, *arguments: Any) -> Pushed:
        if gradient.num_rows:
            waiting = [each.gradient.ids for each in self._pending if each.gradient.num_rows]
            ids = [gradient.ids, *waiting]
            try:
                self._require_room(ids)
            except NoRoom:
                # Where an id is several times, that was too much.
                self._require_room([np.unique(np.concatenate(ids))])
        return super()._decide(gradient, *arguments)

    def _require_room(self, ids: Sequence[Ids]) -> None:
        num_bytes = self._table.bytes_with([each.data for each in ids], self.version + 1)
        self._tables.require(self.shard_id, num_bytes, table=self.name)

    def _bind(self) -> None:
        numbers = {**self.hyperparameters, "learning_rate": self._rate(self.learning_rate)}
        self._rule: Any = BoundTable(self.rule, self._table, numbers)

    def _bring(self, *_: Any, **__: Any) -> None:
        """Bring nothing: a push does not say which rows its worker wants."""

    def _state(self, take: Callable[..., Any], rows_after: int = 0) -> ShardState:
        rows, candidates = self._table.dump(rows_after), self._table.dump(0, candidates=True)
        counted: Any = candidates[2]
        num_rows = self._table.stats()["rows"]
        return replace(super()._state(take), rows=Rows(*rows, *candidates[:2], counted), num_rows=num_rows)


class LoggedTable(TableShard, LoggedShard):  # type: ignore[misc]
    """A table's shard whose recorder writes before a call returns."""


def make_table(
    shard_id: int, name: str, shape: tuple[int, ...], text: str, *, offset: int, **options: Any
) -> TableShard:
    """Make a shard of a table of that shape, (shards, numbers in a row), which begins there in the table's vector."""
    num_buckets, dim = shape
    kind = TableShard if options.get("recorder") is None else LoggedTable
    settings = TableSettings.parse(text)
    return kind(shard_id, name, dim, settings, bucket=offset // dim, num_buckets=num_buckets, **options)
