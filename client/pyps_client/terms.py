"""What the protocol in force asks of a worker, which may change while the run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from pyps_client.log import logger
from pyps_wire.common_pb2 import Receipt
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HelloReply


class Terms:
    """The terms as server 0 last told them. Each field is replaced whole: any thread may read and write."""

    def __init__(self) -> None:
        # In words, as given to --protocol and --staleness.
        self.protocol = ""
        self.staleness = ""
        # Whether to call Proceed before the next step.
        self.ask_to_proceed = False
        # Examples in a minibatch, and minibatches in a push; 0 leaves it to the worker.
        self.batch_size = 0
        self.accumulate = 0
        # Whether gradients of older versions are refused.
        self.current_version_only = False
        # The servers clip to this norm and want to know each push's; 0 where they do not.
        self.clip_norm = 0.0
        # When a handshake, and when an answer to a step, last told them (time.monotonic).
        self._greeted_at = self._answered_at = -math.inf
        # When something else than a receipt last changed what receipts tell.
        self._changed_at = -math.inf

    def greeted(self, reply: HelloReply) -> None:
        """Takes over what the handshake tells."""
        self._greeted_at = self._answered_at = self._changed_at = time.monotonic()
        self.protocol, self.staleness = reply.protocol, reply.staleness
        self.ask_to_proceed = reply.ask_to_proceed
        self.batch_size, self.accumulate = reply.batch_size, reply.accumulate
        self.current_version_only = reply.current_version_only
        self.clip_norm = reply.clip_norm

    @property
    def numbers(self) -> list[float]:
        """All but the words, as numbers."""
        flags = (self.ask_to_proceed, self.current_version_only)
        return [*map(float, flags), self.batch_size, self.accumulate, self.clip_norm]

    @property
    def words(self) -> tuple[str, str]:
        """The terms that are no numbers."""
        return self.protocol, self.staleness

    def take_over(self, words: tuple[str, str], numbers: Sequence[float]) -> None:
        """Takes over terms as another process told them."""
        self.protocol, self.staleness = words
        asks, current_only, batch_size, accumulate, self.clip_norm = numbers
        self.ask_to_proceed, self.current_version_only = bool(asks), bool(current_only)
        self.batch_size, self.accumulate = int(batch_size), int(accumulate)

    def answered(self, receipt: Receipt, *, sent_at: float) -> None:
        """Takes over what a push's receipt tells, but for what others have changed since the push was sent.

        The receipt may be the older one: it is looked at when all servers have answered.
        """
        if sent_at < self._changed_at:
            return
        self._answered_at = time.monotonic()
        self.ask_to_proceed = receipt.ask_to_proceed
        self.batch_size = receipt.batch_size

    def granted(self, *, ask_to_proceed: bool) -> None:
        """Takes over what the leave to begin a step tells."""
        self._answered_at = time.monotonic()
        self._change(ask_to_proceed, self.batch_size)

    def reminded(self, reply: HeartbeatReply, *, asked_at: float) -> None:
        """Takes over what a heartbeat's answer tells, but for what others have told since it was asked for.

        The answer may be the older one: it comes over a connection of its own.
        """
        if not reply.protocol or asked_at < self._greeted_at:
            # Without a protocol it is of a server that does not know the worker, or holds no run.
            return
        self.protocol, self.staleness = reply.protocol, reply.staleness
        self.accumulate = reply.accumulate
        self.current_version_only = reply.current_version_only
        if asked_at >= self._answered_at:
            self._change(reply.ask_to_proceed, reply.batch_size)

    def _change(self, ask_to_proceed: bool, batch_size: int) -> None:
        if (ask_to_proceed, batch_size) != (self.ask_to_proceed, self.batch_size):
            self._changed_at = time.monotonic()
            self.ask_to_proceed, self.batch_size = ask_to_proceed, batch_size


def warn_of_differences(replies: Sequence[HelloReply], servers: Sequence[int] | None = None) -> None:
    """Says where a server goes by another protocol or policy than server 0: nobody else compares them.

    `servers`: the indices of those that replied, server 0 first; by default all, in order.
    """
    for index, reply in zip(range(len(replies)) if servers is None else servers, replies, strict=True):
        for name in ("protocol", "staleness"):
            theirs, first = getattr(reply, name), getattr(replies[0], name)
            if theirs != first:
                logger.warning(
                    "server %d goes by %s %s, server 0 by %s: give all servers the same --%s.",
                    *(index, name, theirs, first, name),
                )
