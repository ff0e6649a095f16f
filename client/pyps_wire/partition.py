"""How a model is sliced into shards, and which server holds which.

A group's tensors, laid end to end, are one vector, which is sliced into shards. The worker that creates a run makes two
tables, which are stored with the run: the slices, which never change, and the placement of the shards on servers.

Under model parallelism (Dean et al. 2012, section 3) a process holds a part of the model. A split tensor is listed
block by block, each with the whole's sizes and its own place in it.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, groupby

from pyps_wire.common_pb2 import ModelSpec, TensorSpec
from pyps_wire.errors import InvalidArgument
from pyps_wire.parameter_server_pb2 import HelloReply

# Parameters in a shard: just under 4 MiB of float32, which with its header fits gRPC's default message limit.
DEFAULT_SHARD_SIZE = 1_047_552
# Shards begin at multiples of this many parameters in their group's vector: one cache line of float32.
ALIGNMENT = 16
# A small model is sliced finer than shard_size, into about so many shards a server: its cores and both directions of a
# connection are then busy at once. Shards smaller than the second number cost more than that gains.
SHARDS_OF_SERVER = 4
PARALLEL_SHARD_SIZE_MIN = 262_144
# A group with fewer parameters than this per server is not spread over all servers.
SPREAD_SIZE_MIN = 1024
SHARDS_MAX = 131_072
SERVERS_MAX = 1024
DIMENSIONS_MAX = 64
PARTS_MAX = 1024
# The most blocks of one tensor.
BLOCKS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor, or one block of a tensor that is split over parts of the model."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    # For a block: the shape of the whole tensor, and where the block begins in it.
    whole_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    # Its part of the model, under model parallelism.
    part: int = 0
    # Of a table of rows: its settings, "rowwise_adagrad:learning_rate=0.05". Its shape is (shards, numbers in a row),
    # and rows belong to shards by their ids.
    table: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgument(f"a tensor of shape {self.shape} has no name; give every tensor one")
        if len(self.shape) > DIMENSIONS_MAX or any(extent < 0 for extent in self.shape):
            raise InvalidArgument(
                f"tensor {self.name!r} has shape {self.shape}; "
                f"at most {DIMENSIONS_MAX} sizes are allowed, none of them negative"
            )
        if not 0 <= self.part < PARTS_MAX:
            raise InvalidArgument(f"tensor {self.name!r} is of part {self.part}; parts are 0 to {PARTS_MAX - 1}")
        if self.whole_shape or self.offset:
            check_block(self.name, self.shape, self.whole_shape, self.offset)
        if self.table and (len(self.shape) != 2 or not all(self.shape) or self.whole_shape):
            raise InvalidArgument(f"table {self.name!r} has shape {self.shape}; expected (shards, numbers in a row)")

    @property
    def size(self) -> int:
        """The number of parameters: 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """Named tensors in the order of their groups."""

    tensors: tuple[Tensor, ...]
    # The most parameters of a shard, when a run is created for this model; later only the run's slices matter.
    shard_size: int = field(default=DEFAULT_SHARD_SIZE, compare=False)
    # For people: two models with the same tensors and different names are probably a mistake.
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.shard_size < ALIGNMENT or self.shard_size % ALIGNMENT:
            raise InvalidArgument(f"shard_size is {self.shard_size}; it must be a positive multiple of {ALIGNMENT}")
        keys: set[tuple[str, tuple[int, ...]]] = set()
        whole: dict[str, bool] = {}
        group = part = -1
        table = False
        for tensor in self.tensors:
            key, is_whole = (tensor.name, tensor.offset), not tensor.whole_shape
            if key in keys or whole.setdefault(tensor.name, is_whole) != is_whole:
                raise InvalidArgument(f"two tensors are named {tensor.name!r}; names must be unique in a model")
            if tensor.group not in (group, group + 1) or tensor.group < 0:
                raise InvalidArgument(
                    f"tensor {tensor.name!r} of group {tensor.group} follows group {group}; "
                    "tensors are ordered by group, and groups count up from 0 without a gap"
                )
            if tensor.group == group and tensor.part != part:
                raise InvalidArgument(
                    f"tensor {tensor.name!r} is of part {tensor.part}, its group {group} of part {part}; a group's "
                    "tensors are all of one part"
                )
            if table and (tensor.group == group or not tensor.table):
                raise InvalidArgument(
                    f"tensor {tensor.name!r} of group {tensor.group} follows a table; tables come last, each in a "
                    "group of its own"
                )
            keys.add(key)
            group, part, table = tensor.group, tensor.part, bool(tensor.table)
        if self.num_parameters == 0:
            raise InvalidArgument("the model holds no parameters; give it at least one tensor that is not empty")

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """The length of each group's vector."""
        of_groups = groupby(self.tensors, key=lambda tensor: tensor.group)
        return tuple(sum(tensor.size for tensor in of_group) for _, of_group in of_groups)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in its group's vector."""
        offsets: list[int] = []
        ends = [0] * self.num_groups
        for tensor in self.tensors:
            offsets.append(ends[tensor.group])
            ends[tensor.group] += tensor.size
        return tuple(offsets)

    @property
    def num_groups(self) -> int:
        return len(self.group_sizes)

    @cached_property
    def tables(self) -> dict[int, Tensor]:
        """The tables by their group; the groups before them are vectors."""
        return {tensor.group: tensor for tensor in self.tensors if tensor.table}

    @property
    def num_vectors(self) -> int:
        """The number of groups that are no tables."""
        return self.num_groups - len(self.tables)

    @cached_property
    def group_parts(self) -> tuple[int, ...]:
        """Each group's part of the model."""
        return tuple(next(of_group).part for _, of_group in groupby(self.tensors, key=lambda tensor: tensor.group))

    @cached_property
    def num_parts(self) -> int:
        return max(self.group_parts, default=0) + 1

    @property
    def num_parameters(self) -> int:
        return sum(self.group_sizes)

    def require_whole(self) -> None:
        """Raise InvalidArgument for a model of which a block or a part is missing."""
        check_whole(self.tensors)
        absent = set(range(self.num_parts)).difference(self.group_parts)
        if absent:
            raise InvalidArgument(
                f"the model has {self.num_parts} parts, but nothing of part {min(absent)}: number them from 0"
            )

    def to_proto(self) -> ModelSpec:
        names = [field.name for field in fields(Tensor)]
        tensors = [TensorSpec(**{name: getattr(tensor, name) for name in names}) for tensor in self.tensors]
        return ModelSpec(tensors=tensors, name=self.name)

    @cached_property
    def spec(self) -> bytes:
        """The model's message as bytes, which are equal for equal models."""
        return self.to_proto().SerializeToString(deterministic=True)

    @classmethod
    def from_proto(cls, spec: ModelSpec) -> Model:
        """Read a received model. Raises InvalidArgument."""
        # One size too many is enough for a refusal, in a short message.
        sizes = slice(DIMENSIONS_MAX + 1)
        return cls(
            tuple(
                Tensor(
                    *(t.name, tuple(t.shape[sizes]), t.group, tuple(t.whole_shape[sizes]), tuple(t.offset[sizes])),
                    part=t.part,
                    table=t.table,
                )
                for t in spec.tensors
            ),
            name=spec.name,
        )


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A shard as a range of its group's vector."""

    shard_id: int
    group: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a tensor, its elements in row-major order, that lies in a shard."""

    tensor_index: int
    tensor_offset: int
    shard_offset: int
    length: int


@dataclass(frozen=True)
class Partition:
    """A model, its shards, numbered from 0 through the groups in order, and the servers that hold them.

    The partition of some parts of a model (`of_parts`) has only their shards, under the whole model's numbers.
    """

    model: Model
    shards: tuple[ShardRange, ...]
    # The placement: each shard's server, by shard id.
    servers: tuple[int, ...]
    num_servers: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_servers <= SERVERS_MAX:
            raise InvalidArgument(f"num_servers is {self.num_servers}; it must be between 1 and {SERVERS_MAX}")
        absent = next((server for server in self.servers if not 0 <= server < self.num_servers), None)
        if absent is not None:
            raise InvalidArgument(f"a shard is placed on server {absent}; there are {self.num_servers}, from 0")

    @classmethod
    def of_tables(cls, model: Model, lengths: Sequence[int], *, servers: Sequence[int], num_servers: int) -> Partition:
        """Make the partition of a whole model from its two stored tables: the shards' lengths, and their servers.

        Raises InvalidArgument where the model is not whole, the lengths do not slice it, or a shard has no server.
        """
        model.require_whole()
        if len(lengths) > SHARDS_MAX:
            raise InvalidArgument(f"the model is sliced into {len(lengths)} shards; expected {SHARDS_MAX} at most")
        shards: list[ShardRange] = []
        left = iter(lengths)
        for group, size in enumerate(model.group_sizes):
            offset, row = 0, model.tables[group].shape[1] if group in model.tables else 0
            while offset < size:
                length = next(left, 0)
                fits = length == row if row else not length % ALIGNMENT or length == size - offset
                if not (0 < length <= size - offset and fits):
                    raise InvalidArgument(
                        f"shard {len(shards)} has {length} parameters, and {size - offset} are left of group {group}: "
                        f"slice each group without a rest, at multiples of {ALIGNMENT}, a table by its rows"
                    )
                shards.append(ShardRange(len(shards), group, offset, length))
                offset += length
        if not len(shards) == len(lengths) == len(servers):
            raise InvalidArgument(
                f"{len(lengths)} shards and the servers of {len(servers)} are named, the model has {len(shards)} shards"
            )
        return cls(model, tuple(shards), tuple(servers), num_servers)

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @property
    def lengths(self) -> list[int]:
        """The shards' numbers of parameters, in order: the table of slices."""
        return [shard.length for shard in self.shards]

    def shard(self, shard_id: int) -> ShardRange:
        shard = self._by_id.get(shard_id)
        if shard is None:
            raise InvalidArgument(f"there is no shard {shard_id}; the model has {len(self.shards)}, from 0")
        return shard

    def server_of(self, shard_id: int) -> int:
        return self.servers[self.shard(shard_id).shard_id]

    def part_of(self, shard_id: int) -> int:
        """Return a shard's part of the model."""
        return self.model.group_parts[self.shard(shard_id).group]

    def of_parts(self, parts: Collection[int]) -> Partition:
        """Return the shards and tensors of those parts, whose groups are numbered from 0 again."""
        missing = sorted(part for part in parts if not 0 <= part < self.model.num_parts)
        if missing or not parts:
            raise InvalidArgument(
                f"there is no part {missing[:1] or 'in ()'}; the model has {self.model.num_parts}, from 0"
            )
        own = [group for group, part in enumerate(self.model.group_parts) if part in parts]
        groups = {group: index for index, group in enumerate(own)}
        tensors = tuple(replace(t, group=groups[t.group]) for t in self.model.tensors if t.group in groups)
        shards = tuple(replace(s, group=groups[s.group]) for s in self.shards if s.group in groups)
        return Partition(Model(tensors, self.model.shard_size), shards, self.servers, self.num_servers)

    def without_tables(self) -> Partition:
        """Return the shards and tensors that are no table's, under the same numbers."""
        if not self.model.tables:
            return self
        tensors = tuple(tensor for tensor in self.model.tensors if not tensor.table)
        shards = tuple(shard for shard in self.shards if shard.group not in self.model.tables)
        return Partition(Model(tensors, self.model.shard_size, self.model.name), shards, self.servers, self.num_servers)

    def of_server(self, server_index: int) -> tuple[ShardRange, ...]:
        """Return a server's shards in order: none if there are fewer shards than servers."""
        if not 0 <= server_index < self.num_servers:
            raise InvalidArgument(f"there is no server {server_index}; there are {self.num_servers}, from 0")
        return self._by_server[server_index]

    def pieces(self, shard_id: int) -> tuple[Piece, ...]:
        """Return the pieces of tensors in a shard, in order, without a gap."""
        self.shard(shard_id)
        return self._pieces[shard_id]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the model and its slices, not of the placement."""
        tensors = [
            [t.name, t.shape, t.group, t.whole_shape, t.offset, t.part, *([t.table] if t.table else [])]
            for t in self.model.tensors
        ]
        text = json.dumps(["pyps slices 1", tensors, self.lengths])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def described(self) -> bytes:
        """The fields of HelloReply that describe the partition, as bytes."""
        model, lengths = self.model.to_proto(), self.lengths
        reply = HelloReply(model=model, fingerprint=self.fingerprint, shard_lengths=lengths, placement=self.servers)
        return reply.SerializeToString()

    @cached_property
    def _by_id(self) -> dict[int, ShardRange]:
        return {shard.shard_id: shard for shard in self.shards}

    @cached_property
    def _by_server(self) -> tuple[tuple[ShardRange, ...], ...]:
        servers: list[list[ShardRange]] = [[] for _ in range(self.num_servers)]
        for shard in self.shards:
            servers[self.servers[shard.shard_id]].append(shard)
        return tuple(map(tuple, servers))

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        # Tensors and shards lie in the same order: one walk meets each pair that overlaps.
        pieces: list[list[Piece]] = [[] for _ in self.shards]
        index = shard_offset = 0
        for tensor_index, tensor in enumerate(self.model.tensors):
            tensor_offset = 0
            while tensor_offset < tensor.size:
                shard = self.shards[index]
                length = min(tensor.size - tensor_offset, shard.length - shard_offset)
                pieces[index].append(Piece(tensor_index, tensor_offset, shard_offset, length))
                tensor_offset += length
                shard_offset += length
                if shard_offset == shard.length:
                    index, shard_offset = index + 1, 0
        return {shard.shard_id: tuple(of_shard) for shard, of_shard in zip(self.shards, pieces, strict=True)}


def partition(model: Model, *, num_servers: int) -> Partition:
    """Slice a model and place its shards, for a new run on so many servers.

    Servers hold about equally much, and the shards of one part of a model are on as few servers as that allows.

    Raises:
        InvalidArgument: The model is not whole, or would have more than SHARDS_MAX shards.
    """
    if not 1 <= num_servers <= SERVERS_MAX:
        raise InvalidArgument(f"num_servers is {num_servers}; it must be between 1 and {SERVERS_MAX}")
    model.require_whole()
    shards = _slices(model, num_servers)
    return Partition(model, shards, place(model, shards, num_servers=num_servers), num_servers)


def place(model: Model, shards: Sequence[ShardRange], *, num_servers: int) -> tuple[int, ...]:
    """Return each shard's server; the shards may have been sliced for another number of servers."""
    lengths = [shard.length for shard in shards if shard.group not in model.tables]
    if model.num_parts > 1:
        servers = _place_parts(lengths, [model.group_parts[shard.group] for shard in shards], num_servers)
    else:
        servers = _place_whole(lengths, num_servers)
    # What a table's shards will hold is not known: they go around. Tables come last.
    return (*servers, *(index % num_servers for index in range(len(shards) - len(servers))))


def first_difference(
    mine: Model, theirs: Model, *, mine_name: str = "this model", theirs_name: str = "the other model"
) -> str | None:
    """Return in words where two models first differ; None if they are equal."""
    for index, (a, b) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        if a == b:
            continue
        if a.name != b.name:
            return f"tensor {index} is {_text(a)} in {mine_name}, but {_text(b)} in {theirs_name}"
        if a.shape != b.shape:
            return f"tensor {a.name!r} has shape {a.shape} in {mine_name}, but {b.shape} in {theirs_name}"
        if a.table != b.table:
            return f"table {a.name!r} is {a.table or 'none'} in {mine_name}, but {b.table or 'none'} in {theirs_name}"
        if (a.whole_shape, a.offset, a.part) != (b.whole_shape, b.offset, b.part):
            return f"tensor {a.name!r} is {_place(a)} in {mine_name}, but {_place(b)} in {theirs_name}"
        return f"tensor {a.name!r} is of group {a.group} in {mine_name}, but of group {b.group} in {theirs_name}"
    num_mine, num_theirs = len(mine.tensors), len(theirs.tensors)
    if num_mine != num_theirs:
        longer, name = (mine, mine_name) if num_mine > num_theirs else (theirs, theirs_name)
        extra = _text(longer.tensors[min(num_mine, num_theirs)])
        return (
            f"{mine_name} has {num_mine} tensors, but {theirs_name} has {num_theirs}; "
            f"the first that only {name} has is {extra}"
        )
    return None


def check_whole(tensors: Iterable[Tensor]) -> None:
    """Raise InvalidArgument where the blocks of a tensor overlap or leave some of it out."""
    blocks: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.whole_shape:
            blocks.setdefault(tensor.name, []).append(tensor)
    for name, of_tensor in blocks.items():
        if len(of_tensor) > BLOCKS_MAX:
            raise InvalidArgument(
                f"tensor {name!r} is split into {len(of_tensor)} blocks; at most {BLOCKS_MAX} are allowed"
            )
        a = of_tensor[0]
        other = next((b for b in of_tensor if b.whole_shape != a.whole_shape), None)
        if other is not None:
            raise InvalidArgument(
                f"tensor {name!r} has shape {a.whole_shape} in part {a.part}, but {other.whole_shape} in part "
                f"{other.part}"
            )
        pair = _first_overlap(of_tensor)
        if pair is not None:
            a, b = sorted(pair, key=lambda block: block.part)
            raise InvalidArgument(
                f"part {a.part} and part {b.part} both claim numbers of tensor {name!r}: "
                f"{place_in_words(a.offset, a.shape)} and {place_in_words(b.offset, b.shape)}"
            )
        if words := _lack(of_tensor, a.whole_shape):
            raise InvalidArgument(f"parts of tensor {name!r} of shape {a.whole_shape} are missing: {words} numbers")


def block_index(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a block in the whole tensor."""
    return tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))


def place_in_words(offset: Sequence[int], shape: Sequence[int]) -> str:
    """Return the index of a block as text: "[0:256, 128:256]"."""
    return f"[{', '.join(f'{begin}:{begin + extent}' for begin, extent in zip(offset, shape, strict=True))}]"


def check_block(name: str, shape: Sequence[int], whole_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Raise InvalidArgument for a block that is empty, or not within the whole tensor."""
    if not len(shape) == len(whole_shape) == len(offset):
        raise InvalidArgument(
            f"the block of tensor {name!r} has {len(shape)} sizes and {len(offset)} offsets, the whole of shape "
            f"{tuple(whole_shape)} has {len(whole_shape)}: give as many of each"
        )
    ends = [begin + extent for begin, extent in zip(offset, shape, strict=True)]
    if any(begin < 0 or end > size for begin, end, size in zip(offset, ends, whole_shape, strict=True)):
        raise InvalidArgument(
            f"the block {place_in_words(offset, shape)} of tensor {name!r} reaches beyond the whole, whose shape is "
            f"{tuple(whole_shape)}"
        )
    if 0 in shape:
        raise InvalidArgument(
            f"the block {place_in_words(offset, shape)} of tensor {name!r} of shape {tuple(whole_shape)} is empty: "
            "split no tensor into more parts than it has rows or columns"
        )


def _overlap(a: Tensor, b: Tensor) -> bool:
    return all(
        begin < other + other_extent and other < begin + extent
        for begin, extent, other, other_extent in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )


def _first_overlap(blocks: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return two blocks of one tensor that overlap, if there are any.

    Blocks are sorted along the dimension in which they differ most, so that most are compared with neighbours only.
    """
    if len(blocks) < 2 or not blocks[0].offset:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    axis = max(range(len(blocks[0].offset)), key=lambda a: len({block.offset[a] for block in blocks}))
    open_blocks: list[Tensor] = []
    for block in sorted(blocks, key=lambda block: block.offset[axis]):
        begin = block.offset[axis]
        open_blocks = [other for other in open_blocks if other.offset[axis] + other.shape[axis] > begin]
        other = next((other for other in open_blocks if _overlap(other, block)), None)
        if other is not None:
            return other, block
        open_blocks.append(block)
    return None


def _lack(blocks: Sequence[Tensor], whole_shape: Sequence[int]) -> str:
    """Return which numbers of a tensor there are, if blocks that do not overlap leave some out; else ""."""
    covered, size = sum(math.prod(block.shape) for block in blocks), math.prod(whole_shape)
    if covered == size:
        return ""
    present = ", ".join(place_in_words(block.offset, block.shape) for block in blocks[:4]) or "empty blocks"
    return f"there are only {present}{' and more' if len(blocks) > 4 else ''}, {covered} of its {size}"


def _place(tensor: Tensor) -> str:
    if not tensor.whole_shape:
        return f"whole in part {tensor.part}"
    return f"the block {place_in_words(tensor.offset, tensor.shape)} of {tensor.whole_shape} in part {tensor.part}"


def _text(tensor: Tensor) -> str:
    return f"{tensor.name!r} of shape {tensor.shape}"


def _slices(model: Model, num_servers: int) -> tuple[ShardRange, ...]:
    """Slice each group's vector into near-equal shards."""
    share = math.ceil(model.num_parameters / (SHARDS_OF_SERVER * num_servers))
    shard_size = min(model.shard_size, max(PARALLEL_SHARD_SIZE_MIN, share))
    over = _servers_of_parts(model, num_servers) if model.num_parts > 1 else [num_servers] * model.num_groups
    counts = [_shards_in(size, shard_size, servers) for size, servers in zip(model.group_sizes, over, strict=True)]
    if sum(counts) > SHARDS_MAX:
        raise InvalidArgument(
            f"{model.num_parameters} parameters in shards of {model.shard_size} are {sum(counts)} shards, "
            f"above the limit of {SHARDS_MAX}; raise shard_size"
        )
    ranges = [
        (group, offset, length)
        for group, (size, count) in enumerate(zip(model.group_sizes, counts, strict=True))
        for offset, length in (
            [(start, model.tables[group].shape[1]) for start in range(0, size, model.tables[group].shape[1])]
            if group in model.tables
            else _split(size, count)
        )
    ]
    return tuple(ShardRange(shard_id, *each) for shard_id, each in enumerate(ranges))


def _shards_in(size: int, shard_size: int, num_servers: int) -> int:
    """Return how many shards a group of that many parameters makes."""
    count = math.ceil(size / shard_size)
    if size >= SPREAD_SIZE_MIN * num_servers:
        count = math.ceil(count / num_servers) * num_servers
    return min(count, math.ceil(size / ALIGNMENT))


def _split(size: int, count: int) -> list[tuple[int, int]]:
    """Split a vector into near-equal ranges at aligned offsets; return their offsets and lengths."""
    units = -(-size // ALIGNMENT)
    offsets = [index * units // count * ALIGNMENT for index in range(count)]
    return [(start, end - start) for start, end in zip(offsets, [*offsets[1:], size], strict=False)]


def _place_whole(lengths: Sequence[int], num_servers: int) -> list[int]:
    """Choose each shard's server: the longest first, to the server that holds least, ties to the lowest."""
    servers = [0] * len(lengths)
    loads = [(0, server) for server in range(num_servers)]
    for shard_id in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, server = loads[0]
        servers[shard_id] = server
        heapq.heapreplace(loads, (load + lengths[shard_id], server))
    return servers


def _place_parts(lengths: Sequence[int], parts: Sequence[int], num_servers: int) -> list[int]:
    """Choose each shard's server where a model is split into parts: part by part, an equal share to each server."""
    servers = [0] * len(lengths)
    total, before = sum(lengths), 0
    for shard_id in sorted(range(len(lengths)), key=lambda i: (parts[i], i)):
        length = lengths[shard_id]
        # By its middle: a part that is a server's share stays together where shards are of uneven length. One longer
        # than a share by its beginning, so that server 0, which workers ask for their steps, has the first of all.
        middle = 2 * before + length if length * num_servers <= total else 2 * before
        servers[shard_id] = min(num_servers - 1, num_servers * middle // (2 * total))
        before += length
    return servers


def _servers_of_parts(model: Model, num_servers: int) -> list[int]:
    """Return for each group over how many servers its part reaches, where parts are laid one behind the other."""
    sizes = [0] * model.num_parts
    for part, size in zip(model.group_parts, model.group_sizes, strict=True):
        sizes[part] += size
    # In servers' shares; a share of which the part takes an eighth at most is left out.
    ends = [end * num_servers / model.num_parameters for end in accumulate(sizes)]
    begins = [0.0, *ends[:-1]]
    reach = [math.ceil(end - 1 / 8) - math.floor(begin + 1 / 8) for begin, end in zip(begins, ends, strict=True)]
    return [max(1, reach[part]) for part in model.group_parts]
