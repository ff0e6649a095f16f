"""What pushes are answered with: receipts alone, or with the shard after them in the one buffer that gRPC takes."""

from __future__ import annotations

from typing import Protocol

from pyps import _kernels
from pyps.core.gradient import item_bytes
from pyps.core.receipt import Receipt
from pyps.core.reply import Answer, Reply, brings_parameters
from pyps.core.shard import Shard
from pyps.run.run import Run
from pyps.service import convert
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.framing import PAYLOAD_FIELD


class PushAnswer(Protocol):
    """The answer to one pushed shard."""

    # Bytes of parameters that it may bring.
    payload_bytes: int

    @property
    def taker(self) -> Answer | None:
        """Who takes the shard's parameters from the push; None for nobody."""
        ...

    def message(self, receipt: Receipt) -> bytes:
        """The message to send, once the push has returned its receipt."""
        ...


class ReceiptAnswer:
    """Answers a shard of Push with its receipt."""

    payload_bytes = 0
    taker = None

    def __init__(self, request: wire.PushRequest, run: Run):
        self._run = run

    def message(self, receipt: Receipt) -> bytes:
        """The receipt."""
        return convert.receipt_of(receipt, self._run).SerializeToString()


class ExchangeAnswer:
    """Answers a shard of Exchange with its receipt and, where they are newer, its parameters.

    The frame is begun under the shard's lock, so what it says of the run may be one update old. It holds the receipt
    as it was then; only for payloads that change while they are read does a push return one that says more.
    """

    def __init__(self, request: wire.PushRequest, run: Run):
        self._run = run
        self._codec = convert.codec_from(request.reply_codec)
        self._epoch = request.epoch
        self._held_version = request.held_version if request.HasField("held_version") else None
        shard: Shard | None = run.shards.get(request.shard_id)
        # A push to a shard that is not here is refused before it asks for a place.
        self._length = shard.length if shard is not None else 0
        self.payload_bytes = self._length * item_bytes(self._codec)
        self._frame: bytes | None = None

    @property
    def taker(self) -> Answer:
        """Itself."""
        return self

    def place(self, receipt: Receipt, version: int) -> Reply | None:
        """Begins the frame, behind whose header the parameters go."""
        # A version of another epoch means nothing here: everything is newer.
        held_version = self._held_version if self._epoch == receipt.epoch else None
        if not brings_parameters(receipt, version=version, held_version=held_version):
            return None
        header = wire.ExchangeReply(version=version, epoch=receipt.epoch, codec=self._codec)  # type: ignore[arg-type]
        convert.receipt_of(receipt, self._run, header.receipt)
        frame, offset = _kernels.new_frame(header.SerializeToString(), PAYLOAD_FIELD, self._length, self._codec)
        self._frame = frame
        return Reply(frame, offset, self._codec)

    def message(self, receipt: Receipt) -> bytes:
        """The frame, or the receipt alone where nothing newer is to be had."""
        if self._frame is None:
            reply = wire.ExchangeReply()
            convert.receipt_of(receipt, self._run, reply.receipt)
            return reply.SerializeToString()
        return self._frame
