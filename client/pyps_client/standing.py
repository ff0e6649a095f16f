"""Where the run stands, as its servers last said."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from pyps_client.peers import ALONE, Peers
from pyps_client.refusals import Refusals
from pyps_client.terms import Terms
from pyps_wire.common_pb2 import REASON_FINISHED, RUN_STATE_FINISHED, Receipt, ShardVersion
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HelloReply


class View:
    """What is known of the run."""

    def __init__(self) -> None:
        self.terms = Terms()
        self.finished = False
        # The largest version of a shard.
        self.global_step = 0


class Standing:
    """What servers tell besides parameters. Any thread may read; several may note.

    The processes of a replica must go by one view, or one would wait for a step that another does not take: there what
    servers tell counts from the next `meet` on, which takes the leader's word, and everybody's on the run's end.
    """

    def __init__(self, peers: Peers = ALONE) -> None:
        self.refusals = Refusals()
        self.num_workers = 0
        # The step size of each shard's next update, before staleness; and the epoch and version at which that was told.
        self.next_rates: dict[int, float] = {}
        self._rates_of: dict[int, tuple[int, int]] = {}
        # Whether some process of the replica needed a pull when they last met.
        self.pull_agreed = False
        self._peers = peers
        # The leader's words for its terms, as all processes last heard them.
        self._words = ("", "")
        self._in_force = View()
        self._heard = View() if peers.count > 1 else self._in_force
        self._lock = threading.Lock()

    @property
    def terms(self) -> Terms:
        """The terms to go by."""
        return self._in_force.terms

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self._in_force.finished

    @property
    def global_step(self) -> int:
        """The number of the run's updates, as far as it is known."""
        return self._in_force.global_step

    def greeted(self, server_index: int, reply: HelloReply) -> None:
        """Notes what a handshake tells."""
        self.note_version(max((shard.version for shard in reply.shards), default=0))
        self._note_rates((reply.epoch, shard.version, shard) for shard in reply.shards)
        if reply.state == RUN_STATE_FINISHED:
            self._heard.finished = True
        if server_index == 0:
            self._heard.terms.greeted(reply)

    def answered(self, server_index: int, receipts: Sequence[Receipt], *, sent_at: float) -> None:
        """Notes what one server's receipts tell of a push that was sent at `sent_at` (time.monotonic)."""
        for receipt in receipts:
            self.num_workers = receipt.num_workers or self.num_workers
            if receipt.reason == REASON_FINISHED:
                self._heard.finished = True
            if server_index == 0:
                self._heard.terms.answered(receipt, sent_at=sent_at)
        self._note_rates((receipt.epoch, receipt.version_after, receipt) for receipt in receipts)
        self.refusals.note(receipts)
        self.note_version(max((receipt.version_after for receipt in receipts), default=0))

    def reminded(self, server_index: int, reply: HeartbeatReply, *, asked_at: float) -> None:
        """Notes what the answer to a heartbeat tells that was sent at `asked_at` (time.monotonic)."""
        self.note_version(reply.version)
        if server_index == 0:
            self._heard.terms.reminded(reply, asked_at=asked_at)
        if reply.state == RUN_STATE_FINISHED or reply.command == HeartbeatReply.COMMAND_STOP:
            self._heard.finished = True

    def granted(self, *, ask_to_proceed: bool) -> None:
        """Notes what the leave to begin a step tells, on all processes of a replica."""
        for view in (self._heard, self._in_force):
            view.terms.granted(ask_to_proceed=ask_to_proceed)

    def note_version(self, version: int) -> None:
        """Notes a shard's version, which is the number of the run's updates, as far as it goes."""
        with self._lock:
            self._heard.global_step = max(self._heard.global_step, version)

    def _note_rates(self, told: Iterable[tuple[int, int, ShardVersion | Receipt]]) -> None:
        """Notes the rates of shards, each as told at an epoch and version; what is older than noted before is late."""
        for epoch, version, of in told:
            at = epoch, version
            if of.HasField("next_rate") and at >= self._rates_of.get(of.shard_id, at):
                self._rates_of[of.shard_id] = at
                self.next_rates[of.shard_id] = of.next_rate

    def meet(self, *, pull_needed: bool) -> None:
        """Brings all processes of the replica to one view; all call it at the same place. Nothing for one alone."""
        if self._peers.count == 1:
            return
        heard, leads, words = self._heard, float(self._peers.index == 0), self._heard.terms.words
        of_leader = [leads * number for number in (heard.global_step, words != self._words, *heard.terms.numbers)]
        finished, pull, step, reworded, *numbers = self._peers.total([heard.finished, pull_needed, *of_leader])
        if reworded:
            # Sums carry numbers alone, and words rarely change.
            self._words = self._peers.tell(words)
        self._in_force.terms.take_over(self._words, numbers)
        self._in_force.global_step = int(step)
        self._in_force.finished = finished > 0
        self.pull_agreed = pull > 0
