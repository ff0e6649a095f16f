"""The run's state, as its servers last reported it: one frozen record, replaced as a whole."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pyps_client.log import logger
from pyps_client.replica.group import ALONE, Group
from pyps_wire.common_pb2 import (
    OUTCOME_REJECTED,
    REASON_DROPPED,
    REASON_EPOCH,
    REASON_FINISHED,
    REASON_REPEATED,
    REASON_STALE,
    RUN_STATE_FINISHED,
    Reason,
    Receipt,
)
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HelloReply

# The refusals of a gradient whose parameters were too old: a pull helps.
OUTDATED = (REASON_STALE, REASON_DROPPED)


_ADVICE = {
    REASON_STALE: " Pull before each gradient is computed, or choose a protocol that takes older ones.",
    REASON_REPEATED: " Pull before the next gradient is computed: the pull waits for the round's end.",
    REASON_DROPPED: " This is normal under backup workers.",
}


class Terms(NamedTuple):
    """The protocol in force, as server 0 last reported it; it may change while the run goes on."""

    # As given to --protocol and --staleness.
    protocol: str = ""
    staleness: str = ""
    # The worker calls Proceed before the next step, and may have to wait.
    ask_to_proceed: bool = False
    # Gradients of older versions are refused, so none must be computed ahead.
    current_version_only: bool = False
    # Examples in a minibatch, and minibatches in a push; 0 leaves it to the worker.
    batch_size: int = 0
    accumulate: int = 0
    # Updates that one gradient from each worker makes, at least; 0 for one a gradient.
    updates_per_round: int = 0
    # The norm to which servers clip, for which they need the norm of each push; 0 where they do not clip.
    clip_norm: float = 0.0


class RunState(NamedTuple):
    terms: Terms = Terms()
    finished: bool = False
    # The largest version of a shard.
    global_step: int = 0
    # Live workers.
    num_workers: int = 0
    # The step size of each shard's next update, before staleness. The mapping is replaced, never changed.
    next_rates: Mapping[int, float] = MappingProxyType({})
    # Some process of the replica needed a pull at the last `meet`.
    pull_agreed: bool = False
    # Examples behind the run's updates: the most of any shard.
    examples: int = 0


class View:
    """The state that servers report. Any thread may read `state` without a lock, and call the methods.

    The processes of a replica need one state, or one would wait for a step that another does not take: reports
    apply from the next `meet` on, which takes the leader's, and any process's report of the run's end.
    """

    def __init__(self, peers: Group = ALONE) -> None:
        # Refused shards by the reason's name: {"STALE": 3}.
        self.refused: Counter[str] = Counter()
        self._peers = peers
        # The state in force; for a worker of one process the newest.
        self.state = RunState()
        # The leader's protocol and staleness at the last `meet`.
        self._words = ("", "")
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._latest = self.state
        # When a Hello, and when an answer to a step, last reported the terms (time.monotonic).
        self._greeted_at = self._answered_at = -math.inf
        # When a message other than a receipt last changed a setting that receipts carry.
        self._changed_at = -math.inf
        # The epoch and version of each shard's rate.
        self._rates_of: dict[int, tuple[int, int]] = {}

    def note_hello(self, server_index: int, reply: HelloReply) -> None:
        """Take over a server's reply to Hello."""
        with self._lock:
            latest = self._latest
            terms = latest.terms
            if server_index == 0:
                self._greeted_at = self._answered_at = self._changed_at = time.monotonic()
                terms = terms._replace(**{name: getattr(reply, name) for name in Terms._fields})
            rates: dict[int, float] = {}
            for shard in reply.shards:
                at = reply.epoch, shard.version
                if shard.HasField("next_rate") and at >= self._rates_of.get(shard.shard_id, at):
                    self._rates_of[shard.shard_id] = at
                    rates[shard.shard_id] = shard.next_rate
            version = max((shard.version for shard in reply.shards), default=0)
            self._publish(
                latest._replace(
                    terms=terms,
                    finished=latest.finished or reply.state == RUN_STATE_FINISHED,
                    global_step=max(latest.global_step, version),
                    examples=max([latest.examples, *(shard.examples for shard in reply.shards)]),
                    next_rates={**latest.next_rates, **rates},
                )
            )

    def note_receipts(self, server_index: int, receipts: Sequence[Receipt], *, sent_at: float, version: int = 0) -> int:
        """Take over one server's receipts of a push that was sent at `sent_at` (time.monotonic).

        Returns their newest epoch. `version`: the largest of the received parameters. Terms that other messages have
        changed since stay: receipts are read once all servers have answered.
        """
        with self._lock:
            latest = self._latest
            terms, finished, step, num_workers, rates, _, examples = latest
            step = max(step, version)
            changed: dict[int, float] = {}
            newest, refused = 0, False
            for receipt in receipts:
                num_workers = receipt.num_workers or num_workers
                epoch, version = receipt.epoch, receipt.version_after
                if version > step:
                    step = version
                if epoch > newest:
                    newest = epoch
                if receipt.examples > examples:
                    examples = receipt.examples
                if receipt.reason or receipt.outcome == OUTCOME_REJECTED:
                    refused = True
                    finished = finished or receipt.reason == REASON_FINISHED
                if receipt.HasField("next_rate"):
                    # An older one is late.
                    shard_id, at, rate = receipt.shard_id, (epoch, version), receipt.next_rate
                    if at >= self._rates_of.get(shard_id, at):
                        self._rates_of[shard_id] = at
                        if rate != rates.get(shard_id):
                            changed[shard_id] = rate
            if server_index == 0 and receipts and sent_at >= self._changed_at:
                self._answered_at = time.monotonic()
                asks, batch_size = receipt.ask_to_proceed, receipt.batch_size
                if (asks, batch_size) != (terms.ask_to_proceed, terms.batch_size):
                    terms = terms._replace(ask_to_proceed=asks, batch_size=batch_size)
            if changed:
                rates = {**rates, **changed}
            self._publish(RunState(terms, finished, step, num_workers, rates, latest.pull_agreed, examples))
        if refused:
            self._count_refused(receipts)
        return newest

    def note_heartbeat(self, server_index: int, reply: HeartbeatReply, *, asked_at: float) -> None:
        """Take over the answer to a heartbeat that was sent at `asked_at` (time.monotonic).

        Terms that other messages have reported since stay: this one, on a connection of its own, may be older.
        """
        with self._lock:
            latest = self._latest
            terms = latest.terms
            # Without a protocol it is of a server that does not know the worker, or holds no run.
            if server_index == 0 and reply.protocol and asked_at >= self._greeted_at:
                terms = terms._replace(
                    protocol=reply.protocol,
                    staleness=reply.staleness,
                    accumulate=reply.accumulate,
                    updates_per_round=reply.updates_per_round,
                    current_version_only=reply.current_version_only,
                )
                if asked_at >= self._answered_at:
                    terms = self._changed(terms, reply.ask_to_proceed, reply.batch_size)
                if terms == latest.terms:
                    terms = latest.terms
            is_over = reply.state == RUN_STATE_FINISHED or reply.command == HeartbeatReply.COMMAND_STOP
            step = max(latest.global_step, reply.version)
            self._publish(latest._replace(terms=terms, finished=latest.finished or is_over, global_step=step))

    def note_proceed(self, *, ask_to_proceed: bool) -> None:
        """Take over the answer to `proceed`, on all processes of a replica."""
        with self._lock:
            self._answered_at = time.monotonic()
            terms = self._latest.terms
            self._publish(self._latest._replace(terms=self._changed(terms, ask_to_proceed, terms.batch_size)))
            if self._peers.count > 1:
                self.state = self.state._replace(terms=self.state.terms._replace(ask_to_proceed=ask_to_proceed))

    def note_pull(self, version: int) -> None:
        """Note the largest version of a pull, which fulfils the replica's need of one."""
        with self._lock:
            self._publish(self._latest._replace(global_step=max(self._latest.global_step, version)))
            if self.state.pull_agreed:
                self.state = self.state._replace(pull_agreed=False)

    def meet(self, *, pull_needed: bool) -> None:
        """Bring all processes of the replica to one state; all call this in the same order."""
        if self._peers.count == 1:
            return
        latest, leads = self._latest, float(self._peers.index == 0)
        protocol, staleness, *settings = latest.terms
        words = (protocol, staleness)
        counts = latest.global_step, latest.examples, words != self._words
        of_leader = [leads * float(number) for number in (*counts, *settings)]
        numbers = self._peers.all_reduce([float(latest.finished), float(pull_needed), *of_leader])
        finished, pull, step, examples, reworded, asks, current_only, *whole, clip_norm = numbers
        batch_size, accumulate, updates = map(int, whole)
        if reworded:
            # Sums carry numbers alone, and words rarely change.
            self._words = self._peers.broadcast(words)
        terms = Terms(*self._words, bool(asks), bool(current_only), batch_size, accumulate, updates, clip_norm)
        with self._lock:
            self.state = self.state._replace(
                terms=self.state.terms if terms == self.state.terms else terms,
                finished=finished > 0,
                global_step=int(step),
                examples=int(examples),
                pull_agreed=pull > 0,
            )

    def _publish(self, latest: RunState) -> None:
        self._latest = latest
        if self._peers.count == 1:
            self.state = latest
        else:
            self.state = self.state._replace(num_workers=latest.num_workers, next_rates=latest.next_rates)

    def _count_refused(self, receipts: Iterable[Receipt]) -> None:
        """Count refused shards, and log the first one of each reason."""
        for receipt in receipts:
            if receipt.outcome != OUTCOME_REJECTED or receipt.reason in (REASON_EPOCH, REASON_FINISHED):
                continue
            name = Reason.Name(receipt.reason).removeprefix("REASON_")
            self.refused[name] += 1
            if self.refused[name] == 1:
                logger.warning(
                    "a gradient of shard %d was not taken: %s.%s Further ones are only counted.",
                    *(receipt.shard_id, receipt.message.rstrip("."), _ADVICE.get(receipt.reason, "")),
                )

    def _changed(self, terms: Terms, ask_to_proceed: bool, batch_size: int) -> Terms:
        """Return terms with settings that receipts carry too, from another message."""
        if (ask_to_proceed, batch_size) == (terms.ask_to_proceed, terms.batch_size):
            return terms
        self._changed_at = time.monotonic()
        return terms._replace(ask_to_proceed=ask_to_proceed, batch_size=batch_size)


def warn_of_differences(replies: Sequence[HelloReply], servers: Sequence[int] | None = None) -> None:
    """Warn of servers with another protocol or staleness policy than server 0; `servers`: the replies' indices."""
    for index, reply in zip(range(len(replies)) if servers is None else servers, replies, strict=True):
        for name in ("protocol", "staleness"):
            theirs, first = getattr(reply, name), getattr(replies[0], name)
            if theirs != first:
                logger.warning(
                    "server %d goes by %s %s, server 0 by %s: give all servers the same --%s.",
                    *(index, name, theirs, first, name),
                )
