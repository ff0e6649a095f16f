"""Where a push's answer takes the parameters: written by the update that the push makes, in the same pass."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pyps.core.gradient import Codec
from pyps.core.receipt import Receipt


class Reply(NamedTuple):
    """Memory for a shard's parameters: `length` numbers of the codec from `offset` on, in bytes.

    A bytes object must be one that nobody else has seen.
    """

    buffer: bytes | bytearray | memoryview
    offset: int
    codec: Codec


class Answer(Protocol):
    """Whoever pushed and wants the parameters along with the receipt. Called under the shard's lock."""

    def place(self, receipt: Receipt, version: int) -> Reply | None:
        """Returns where the parameters go, once it is decided which version the pusher is to get; None for nowhere.

        Called once at most, with the receipt and before anything has changed: it must be quick, and an exception
        leaves the push undone. The parameters are there when `Shard.push` has returned. The receipt that it returns
        may say more in its message.
        """
        ...


def brings_parameters(receipt: Receipt, *, version: int, held_version: int | None) -> bool:
    """Whether an answer is to bring that version to a worker which holds another; None for one that holds none.

    It is not where the worker has to wait for its round: the pull that follows brings what the round made.
    """
    return receipt.min_version <= version and (held_version is None or version > held_version)
