"""A push to one shard as every transport describes it: the gradient, and memory for the parameters of the reply."""

from __future__ import annotations

from typing import NamedTuple

from pyps.core.gradient import Gradient
from pyps_wire.codecs import Codec
from pyps_wire.errors import ServerUnavailable


class Reply(NamedTuple):
    """Memory for a shard's parameters: `length` numbers of the codec from `offset` on, in bytes.

    A bytes object must have no other reader yet.
    """

    buffer: bytes | bytearray | memoryview
    offset: int
    codec: Codec


class SharedMemory:
    """Memory that a worker shares, for a gradient or a reply. Once detached, the worker may overwrite it."""

    attached = True

    def require_attached(self) -> None:
        """Raise ServerUnavailable once the worker's connection has ended: its call is over."""
        if not self.attached:
            raise ServerUnavailable("the worker's memory is attached no longer")


class PushPlan(NamedTuple):
    """One shard's part of a push."""

    shard_id: int
    gradient: Gradient
    # Where parameters go that are newer than the worker's; None for a push that brings none back.
    reply: Reply | None = None
    # The version that the worker holds; -1 for none, and for one of another epoch.
    held_version: int = -1
    # The worker's shared memory, if gradient or reply lie there.
    memory: SharedMemory | None = None
    # The worker's secret.
    secret: bytes = b""
