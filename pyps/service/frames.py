"""Shards as they are sent: framed under their lock, header and payload in the one buffer that gRPC takes."""

from __future__ import annotations

from dataclasses import dataclass

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.gradient import Codec
from pyps.core.receipt import Receipt
from pyps.run import Run
from pyps.service import convert
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.framing import PAYLOAD_FIELD


@dataclass(frozen=True)
class ParametersReading:
    """Frames a shard for Pull; None when the caller's version is as new."""

    shard_id: int
    held_version: int
    epoch: int
    codec: Codec

    def __call__(self, version: int, parameters: Floats) -> bytes | None:
        if version <= self.held_version:
            return None
        header = wire.Parameters(
            shard_id=self.shard_id,
            version=version,
            epoch=self.epoch,
            codec=int(self.codec),  # type: ignore[arg-type]
        )
        return _kernels.join_frame(header.SerializeToString(), PAYLOAD_FIELD, parameters, self.codec)


@dataclass(frozen=True)
class ExchangeReading:
    """Frames a shard for Exchange, behind the receipt of the push."""

    receipt: Receipt
    run: Run

    def __call__(self, version: int, parameters: Floats) -> bytes | None:
        header = wire.ExchangeReply(
            receipt=convert.receipt_of(self.receipt, self.run),
            version=version,
            epoch=self.run.epoch,
            codec=common.CODEC_FLOAT32,
        )
        return _kernels.join_frame(header.SerializeToString(), PAYLOAD_FIELD, parameters, Codec.FLOAT32)


Reading = ParametersReading | ExchangeReading
