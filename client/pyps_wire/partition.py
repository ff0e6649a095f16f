"""The plan that cuts a model into shards and gives each to a server.

Both ends compute it from the same few numbers and compare fingerprints, so that it never travels. A group's
tensors, laid end to end, are one vector; the vector is cut into near-equal shards; each shard goes whole
to one server.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, groupby

from pyps_wire.blocks import PARTS_MAX, check_block, check_whole, place_in_words
from pyps_wire.common_pb2 import ModelSpec, TensorSpec
from pyps_wire.errors import InvalidArgument

# Parameters in a shard: just under 4 MiB of float32, which with its header fits gRPC's default message limit.
DEFAULT_SHARD_SIZE = 1_047_552
# Shards begin at multiples of this many parameters in their group's vector: one cache line of float32.
ALIGNMENT = 16
# A small model is cut finer than shard_size asks, so that a server has about so many shards: its cores, and the two
# directions of a connection, then work on several at once. Below the second number that costs more than it gains.
SHARDS_OF_SERVER = 4
PARALLEL_SHARD_SIZE_MIN = 262_144
# A group with fewer parameters than this per server is not spread over all servers.
SPREAD_SIZE_MIN = 1024
SHARDS_MAX = 131_072
SERVERS_MAX = 1024
DIMENSIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor and the parameter group that it belongs to; or one block of a tensor that is cut over parts."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    # Of a block: the sizes of the whole tensor, and where the block begins in it.
    whole_shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    # The part of the model that it belongs to, under model parallelism.
    part: int = 0

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

    @property
    def size(self) -> int:
        """Number of parameters: 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """Named tensors in order of their groups, and how large a shard of them may be."""

    tensors: tuple[Tensor, ...]
    shard_size: int = DEFAULT_SHARD_SIZE

    def __post_init__(self) -> None:
        if self.shard_size < ALIGNMENT or self.shard_size % ALIGNMENT:
            raise InvalidArgument(f"shard_size is {self.shard_size}; it must be a positive multiple of {ALIGNMENT}")
        keys: set[tuple[str, tuple[int, ...]]] = set()
        whole: dict[str, bool] = {}
        group = part = -1
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
            keys.add(key)
            group, part = tensor.group, tensor.part
        if self.num_parameters == 0:
            raise InvalidArgument("the model holds no parameters; give it at least one tensor that is not empty")

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """Length of each group's vector."""
        of_groups = groupby(self.tensors, key=lambda tensor: tensor.group)
        return tuple(sum(tensor.size for tensor in of_group) for _, of_group in of_groups)

    @property
    def num_groups(self) -> int:
        """Number of parameter groups; those of different parts are different groups."""
        return len(self.group_sizes)

    @cached_property
    def group_parts(self) -> tuple[int, ...]:
        """The part of the model that each group belongs to."""
        return tuple(next(of_group).part for _, of_group in groupby(self.tensors, key=lambda tensor: tensor.group))

    @cached_property
    def num_parts(self) -> int:
        """Number of parts that the model is cut into: 1 for one that is not."""
        return max(self.group_parts, default=0) + 1

    @property
    def num_parameters(self) -> int:
        """Number of parameters in all groups."""
        return sum(self.group_sizes)

    def to_proto(self) -> ModelSpec:
        """Returns the model as it travels."""
        names = [field.name for field in fields(Tensor)]
        tensors = [TensorSpec(**{name: getattr(tensor, name) for name in names}) for tensor in self.tensors]
        return ModelSpec(tensors=tensors, shard_size=self.shard_size)

    @classmethod
    def from_proto(cls, spec: ModelSpec) -> Model:
        """Reads a model that travelled; InvalidArgument says what is wrong with it."""
        # One size too many is refused as a million are, in fewer words.
        sizes = slice(DIMENSIONS_MAX + 1)
        tensors = tuple(
            Tensor(t.name, tuple(t.shape[sizes]), t.group, tuple(t.whole_shape[sizes]), tuple(t.offset[sizes]), t.part)
            for t in spec.tensors
        )
        return cls(tensors, spec.shard_size)


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A shard: which slice of its group's vector it is, and which server holds it."""

    shard_id: int
    group: int
    offset: int
    length: int
    server_index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a tensor, its elements in row-major order, that lies in a shard."""

    tensor_index: int
    tensor_offset: int
    shard_offset: int
    length: int


@dataclass(frozen=True)
class Partition:
    """A model's shards, numbered from 0 through the groups in order, and the servers that hold them.

    That of some parts of a model (`of_parts`) has the whole's shards under the whole's numbers, but only theirs.
    """

    model: Model
    num_servers: int
    shards: tuple[ShardRange, ...]

    @property
    def num_shards(self) -> int:
        """Number of shards on all servers."""
        return len(self.shards)

    def shard(self, shard_id: int) -> ShardRange:
        """Returns the shard of that number."""
        shard = self._by_id.get(shard_id)
        if shard is None:
            raise InvalidArgument(f"there is no shard {shard_id}; the model has {len(self.shards)}, from 0")
        return shard

    def part_of(self, shard_id: int) -> int:
        """Returns the part of the model that a shard belongs to: no shard holds numbers of two."""
        return self.model.group_parts[self.shard(shard_id).group]

    def of_parts(self, parts: Collection[int]) -> Partition:
        """Returns the shards of those parts, over their tensors alone, whose groups count up from 0 again."""
        missing = sorted(part for part in parts if not 0 <= part < self.model.num_parts)
        if missing or not parts:
            raise InvalidArgument(
                f"there is no part {missing[:1] or 'in ()'}; the model has {self.model.num_parts}, from 0"
            )
        own = [group for group, part in enumerate(self.model.group_parts) if part in parts]
        groups = {group: index for index, group in enumerate(own)}
        tensors = tuple(replace(t, group=groups[t.group]) for t in self.model.tensors if t.group in groups)
        shards = tuple(replace(s, group=groups[s.group]) for s in self.shards if s.group in groups)
        return Partition(Model(tensors, self.model.shard_size), self.num_servers, shards)

    def of_server(self, server_index: int) -> tuple[ShardRange, ...]:
        """Returns a server's shards in order: none where there are fewer shards than servers."""
        if not 0 <= server_index < self.num_servers:
            raise InvalidArgument(f"there is no server {server_index}; there are {self.num_servers}, from 0")
        return self._by_server[server_index]

    def pieces(self, shard_id: int) -> tuple[Piece, ...]:
        """Returns what lies in a shard, in order, without a gap."""
        self.shard(shard_id)
        return self._pieces[shard_id]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that the partition depends on; two ends that agree on it agree on every shard."""
        # What is not cut has the fingerprint that it had before models could be.
        tensors = [
            [t.name, t.shape, t.group, *([t.whole_shape, t.offset, t.part] if self.model.num_parts > 1 else [])]
            for t in self.model.tensors
        ]
        text = json.dumps(["pyps partition 2", self.num_servers, self.model.shard_size, tensors])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def _by_id(self) -> dict[int, ShardRange]:
        return {shard.shard_id: shard for shard in self.shards}

    @cached_property
    def _by_server(self) -> tuple[tuple[ShardRange, ...], ...]:
        servers: list[list[ShardRange]] = [[] for _ in range(self.num_servers)]
        for shard in self.shards:
            servers[shard.server_index].append(shard)
        return tuple(tuple(shards) for shards in servers)

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
    """Cuts a model into shards and gives each to a server, so that servers hold about equally much.

    The shards of one part of a model lie on as few servers as that allows. Raises InvalidArgument for a model whose
    blocks are not the whole of its tensors.
    """
    if not 1 <= num_servers <= SERVERS_MAX:
        raise InvalidArgument(f"num_servers is {num_servers}; it must be between 1 and {SERVERS_MAX}")
    check_whole(model.tensors)
    absent = set(range(model.num_parts)).difference(model.group_parts)
    if absent:
        raise InvalidArgument(
            f"the model has {model.num_parts} parts, but nothing of part {min(absent)}: number them from 0"
        )
    shard_size = _shard_size(model, num_servers)
    is_cut = model.num_parts > 1
    over = _servers_of_parts(model, num_servers) if is_cut else [num_servers] * model.num_groups
    counts = [_shards_in(size, shard_size, servers) for size, servers in zip(model.group_sizes, over, strict=True)]
    if sum(counts) > SHARDS_MAX:
        raise InvalidArgument(
            f"{model.num_parameters} parameters in shards of {model.shard_size} are {sum(counts)} shards, "
            f"above the limit of {SHARDS_MAX}; raise shard_size"
        )
    cuts = [
        (group, offset, length)
        for group, (size, count) in enumerate(zip(model.group_sizes, counts, strict=True))
        for offset, length in _cut(size, count)
    ]
    lengths = [length for _, _, length in cuts]
    if is_cut:
        servers = _assign_parts(lengths, [model.group_parts[group] for group, _, _ in cuts], num_servers)
    else:
        servers = _assign(lengths, num_servers)
    shards = tuple(
        ShardRange(shard_id, group, offset, length, server)
        for shard_id, ((group, offset, length), server) in enumerate(zip(cuts, servers, strict=True))
    )
    return Partition(model, num_servers, shards)


def first_difference(
    mine: Model, theirs: Model, *, mine_name: str = "this model", theirs_name: str = "the other model"
) -> str | None:
    """Tells in words where two models first differ; None when they are equal."""
    for index, (a, b) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        if a == b:
            continue
        if a.name != b.name:
            return f"tensor {index} is {_text(a)} in {mine_name}, but {_text(b)} in {theirs_name}"
        if a.shape != b.shape:
            return f"tensor {a.name!r} has shape {a.shape} in {mine_name}, but {b.shape} in {theirs_name}"
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
    if mine.shard_size != theirs.shard_size:
        return f"shard_size is {mine.shard_size} in {mine_name}, but {theirs.shard_size} in {theirs_name}"
    return None


def _place(tensor: Tensor) -> str:
    if not tensor.whole_shape:
        return f"whole in part {tensor.part}"
    return f"the block {place_in_words(tensor.offset, tensor.shape)} of {tensor.whole_shape} in part {tensor.part}"


def _text(tensor: Tensor) -> str:
    return f"{tensor.name!r} of shape {tensor.shape}"


def _shard_size(model: Model, num_servers: int) -> int:
    """Returns how large shards may be: as the model says, or smaller where there would be few of them."""
    share = math.ceil(model.num_parameters / (SHARDS_OF_SERVER * num_servers))
    return min(model.shard_size, max(PARALLEL_SHARD_SIZE_MIN, share))


def _shards_in(size: int, shard_size: int, num_servers: int) -> int:
    """Returns how many shards a group of that many parameters makes."""
    count = math.ceil(size / shard_size)
    if size >= SPREAD_SIZE_MIN * num_servers:
        count = math.ceil(count / num_servers) * num_servers
    return min(count, math.ceil(size / ALIGNMENT))


def _cut(size: int, count: int) -> list[tuple[int, int]]:
    """Cuts a vector into near-equal ranges at aligned offsets; returns their offsets and lengths."""
    units = -(-size // ALIGNMENT)
    offsets = [index * units // count * ALIGNMENT for index in range(count)]
    return [(start, end - start) for start, end in zip(offsets, [*offsets[1:], size], strict=False)]


def _assign(lengths: list[int], num_servers: int) -> list[int]:
    """Chooses each shard's server: the longest first, to the server that holds least, ties to the lowest."""
    servers = [0] * len(lengths)
    loads = [(0, server) for server in range(num_servers)]
    for shard_id in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, server = loads[0]
        servers[shard_id] = server
        heapq.heapreplace(loads, (load + lengths[shard_id], server))
    return servers


def _servers_of_parts(model: Model, num_servers: int) -> list[int]:
    """Returns for each group over how many servers its part reaches, where parts are laid one behind the other."""
    sizes = [0] * model.num_parts
    for part, size in zip(model.group_parts, model.group_sizes, strict=True):
        sizes[part] += size
    # In servers' shares; what reaches into one by an eighth of its share at the most does not count.
    ends = [end * num_servers / model.num_parameters for end in accumulate(sizes)]
    begins = [0.0, *ends[:-1]]
    reach = [math.ceil(end - 1 / 8) - math.floor(begin + 1 / 8) for begin, end in zip(begins, ends, strict=True)]
    return [max(1, reach[part]) for part in model.group_parts]


def _assign_parts(lengths: list[int], parts: list[int], num_servers: int) -> list[int]:
    """Chooses each shard's server where a model is cut into parts: all shards part by part, so much to each server."""
    servers = [0] * len(lengths)
    total, before = sum(lengths), 0
    for shard_id in sorted(range(len(lengths)), key=lambda i: (parts[i], i)):
        length = lengths[shard_id]
        # By its middle: a part that is a server's share stays together where shards are of uneven length. One longer
        # than a share by its beginning, so that server 0, which workers ask for their steps, has the first of all.
        place = 2 * before + length if length * num_servers <= total else 2 * before
        servers[shard_id] = min(num_servers - 1, num_servers * place // (2 * total))
        before += length
    return servers
