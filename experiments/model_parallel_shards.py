"""Which shards each part of a network contacts (Dean et al. 2012, section 3), with the partition of pyps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.model_parallel_machines import Block, Floats, join
from pyps_wire.partition import Model, Partition, Tensor, partition


@dataclass(frozen=True, slots=True)
class Contact:
    """A part pushed its gradient of a shard."""

    part: int
    shard_id: int
    server_index: int


@dataclass(frozen=True)
class Pushes:
    """What the servers have once every part has pushed its own blocks."""

    partition: Partition
    contacts: list[Contact]
    # Gradients by shard.
    shards: dict[int, Floats]

    def contacted(self, part: int) -> list[int]:
        """The shards that a part contacted, in order."""
        return sorted(contact.shard_id for contact in self.contacts if contact.part == part)

    def owned(self, part: int) -> list[int]:
        """The shards in which numbers of a part's blocks lie, found by looking into every shard."""
        tensors = self.partition.model.tensors
        return [
            shard.shard_id
            for shard in self.partition.shards
            if any(tensors[piece.tensor_index].part == part for piece in self.partition.pieces(shard.shard_id))
        ]

    def servers_of(self, part: int) -> set[int]:
        """The servers that a part contacted."""
        return {contact.server_index for contact in self.contacts if contact.part == part}

    def gradients(self) -> dict[str, Floats]:
        """The whole tensors, out of the shards."""
        values = [np.zeros(tensor.size, self.shards[0].dtype) for tensor in self.partition.model.tensors]
        for shard_id, shard in self.shards.items():
            for piece in self.partition.pieces(shard_id):
                numbers = shard[piece.shard_offset : piece.shard_offset + piece.length]
                values[piece.tensor_index][piece.tensor_offset : piece.tensor_offset + piece.length] = numbers
        tensors = self.partition.model.tensors
        return join(
            [
                [
                    Block(tensor.name, tensor.offset, tensor.whole_shape, numbers.reshape(tensor.shape))
                    for tensor, numbers in zip(tensors, values, strict=True)
                ]
            ]
        )


def model_of(gradients: Sequence[Sequence[Block]]) -> Model:
    """The blocks of all parts as the servers hold them."""
    return Model(
        tuple(
            Tensor(block.name, block.values.shape, part, block.whole_shape, block.offset, part)
            for part, blocks in enumerate(gradients)
            for block in blocks
        )
    )


def push(gradients: Sequence[Sequence[Block]], num_servers: int) -> Pushes:
    """Each part cuts its own vector as the whole model is cut, and sends each piece to its server."""
    whole = partition(model_of(gradients), num_servers=num_servers)
    contacts, shards = list[Contact](), dict[int, Floats]()
    for part, blocks in enumerate(gradients):
        vector = np.concatenate([block.values.reshape(-1) for block in blocks])
        own = whole.of_parts([part])
        assert own.model.num_groups == 1
        for shard in own.shards:
            contacts.append(Contact(part, shard.shard_id, whole.server_of(shard.shard_id)))
            shards[shard.shard_id] = vector[shard.offset : shard.offset + shard.length]
    return Pushes(whole, contacts, shards)


def contacts_are_own(pushes: Pushes) -> bool:
    """P3: each part contacts the shards of its blocks and no other, and no shard is contacted by two."""
    parts = range(pushes.partition.model.num_parts)
    every = list(itertools.chain.from_iterable(pushes.contacted(part) for part in parts))
    return all(pushes.contacted(part) == pushes.owned(part) for part in parts) and sorted(every) == [
        shard.shard_id for shard in pushes.partition.shards
    ]
