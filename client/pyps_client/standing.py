"""Where the run stands, as its servers last said."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pyps_client.refusals import Refusals
from pyps_client.terms import Terms
from pyps_wire.common_pb2 import REASON_FINISHED, RUN_STATE_FINISHED, Receipt
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HelloReply


class Standing:
    """What servers tell besides parameters. Any thread may read; several may note."""

    def __init__(self) -> None:
        self.terms = Terms()
        self.refusals = Refusals()
        self.finished = False
        self.num_workers = 0
        self.global_step = 0
        self._lock = threading.Lock()

    def greeted(self, server_index: int, reply: HelloReply) -> None:
        """Notes what a handshake tells."""
        self.note_version(max((shard.version for shard in reply.shards), default=0))
        if reply.state == RUN_STATE_FINISHED:
            self.finished = True
        if server_index == 0:
            self.terms.greeted(reply)

    def answered(self, server_index: int, receipts: Sequence[Receipt]) -> None:
        """Notes what one server's receipts of a push tell."""
        for receipt in receipts:
            self.num_workers = receipt.num_workers or self.num_workers
            if receipt.reason == REASON_FINISHED:
                self.finished = True
            if server_index == 0:
                self.terms.answered(receipt)
        self.refusals.note(receipts)
        self.note_version(max((receipt.version_after for receipt in receipts), default=0))

    def reminded(self, server_index: int, reply: HeartbeatReply) -> None:
        """Notes what a heartbeat's answer tells."""
        self.note_version(reply.version)
        if server_index == 0:
            self.terms.reminded(reply)
        if reply.state == RUN_STATE_FINISHED or reply.command == HeartbeatReply.COMMAND_STOP:
            self.finished = True

    def note_version(self, version: int) -> None:
        """Notes a shard's version, which is the number of the run's updates, as far as it goes."""
        with self._lock:
            self.global_step = max(self.global_step, version)
