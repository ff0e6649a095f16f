"""What a caller holds of all servers, and what it is to wait for before its next gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain

from pyps_client.intake import Held
from pyps_client.refusals import OUTDATED
from pyps_client.versions import Versions
from pyps_wire.common_pb2 import Receipt
from pyps_wire.partition import Partition


class Holdings:
    """Versions held and versions wanted, over all servers. One thread may note receipts while another pulls.

    A worker waits for the rounds that took its gradient, unless the same push came too late for another shard:
    that one's round waits for this worker, as may those whom the other rounds wait for, and two workers could
    wait for each other for ever. So the late shard is made good first: the next pull waits for nothing, and the
    next push leaves out the shards whose rounds have this worker's gradient already.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.of_server = [Held(partition.of_server(index)) for index in range(partition.num_servers)]
        self._server_of = {shard.shard_id: shard.server_index for shard in partition.shards}
        # The shards for which the newest push came too late.
        self._late: frozenset[int] = frozenset()

    @property
    def versions(self) -> Versions:
        """A copy of the versions held, with their servers' epochs."""
        read = [held.read() for held in self.of_server]
        pairs = chain.from_iterable([versions.items() for _, versions in read])
        return Versions(pairs, epochs=[epoch for epoch, _ in read])

    @property
    def largest_version(self) -> int:
        """The largest version held; 0 of nothing."""
        return max((max(held.versions.values(), default=0) for held in self.of_server), default=0)

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Notes what the receipts of one push ask to be waited for."""
        self._late = frozenset(receipt.shard_id for receipt in receipts if receipt.reason in OUTDATED)
        for receipt in receipts:
            # What came too late asks for a pull of what is there already.
            newer = receipt.version_before if receipt.reason in OUTDATED else 0
            held = self.of_server[self._server_of[receipt.shard_id]]
            held.want(receipt.shard_id, max(receipt.min_version, newer), epoch=receipt.epoch)

    def awaited(self, server_index: int) -> Mapping[int, int]:
        """Shard id to the version that a pull from that server is to wait for."""
        return {} if self._late else self.of_server[server_index].wanted

    def settled(self, server_index: int) -> Set[int]:
        """Shards of that server whose rounds have this worker's gradient, where it makes good another."""
        return self.of_server[server_index].wanted.keys() - self._late if self._late else frozenset()
