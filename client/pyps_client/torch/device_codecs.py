"""Codecs of few bits as operations of torch: gradients on a GPU are encoded there, and few bytes come to the host.

The bits are those of `pyps_wire.codecs` on every device. So each operation rounds once and by itself: numbers are
neither divided by a constant, for which torch multiplies by its reciprocal on a GPU, nor summed in an order that torch
would choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pyps_client.vectors import OffHost, Vector
from pyps_wire.codecs import FLOAT32, INT4, INT8, ONEBIT, Codec

# Types of devices that encode what they hold. Tests name the CPU.
DEVICE_TYPES = {"cuda"}


class DeviceVector(OffHost):
    """A group's gradients on a device. An encoding is complete, on any stream, once its payload is on the host."""

    dtype = FLOAT32.dtype

    def __init__(self, values: torch.Tensor) -> None:
        """`values`: float32, contiguous."""
        self._values = values

    @property
    def size(self) -> int:
        return self._values.numel()

    def __getitem__(self, place: slice) -> DeviceVector:
        return DeviceVector(self._values[place])

    def on_host(self) -> Vector:
        values: Vector = self._values.cpu().numpy()
        return values

    def encode_feedback(self, residual: Vector | OffHost, codec: Codec) -> tuple[memoryview, DeviceVector]:
        owed = residual._values if isinstance(residual, DeviceVector) else torch.from_numpy(residual)
        wanted = owed.to(self._values.device) * codec.feedback
        wanted += self._values
        payload, decoded = ENCODINGS[codec](wanted)
        lost = wanted.sub_(decoded)
        return payload.cpu().numpy().data, DeviceVector(lost)


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return the values one block a row, the last filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -len(values) % size)).view(-(-len(values) // size), size)


def _scaled(values: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each block's exponent, its scale and whether it is finite, and the numbers divided by the scale."""
    blocks = _blocks(values, 32)
    largest = blocks.abs().amax(1, keepdim=True)
    largest /= torch.full_like(largest, limit)
    finite = largest.isfinite()
    exponents = torch.where(finite, largest.view(torch.int32) + 0x7FFFFF >> 23, 255)
    inverse = (254 - torch.where(finite, exponents, 127) << 23).view(torch.float32)
    return exponents, (exponents << 23).view(torch.float32), finite, blocks.mul_(inverse)


def _int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponents, scales, finite, scaled = _scaled(values, INT8.limit)
    numbers = torch.where(finite, scaled.round_(), 1.0).to(torch.int8)
    payload = torch.cat([exponents.to(torch.uint8), numbers.view(torch.uint8)], 1)
    return payload.view(-1)[: INT8.max_bytes(len(values))], (numbers * scales).view(-1)[: len(values)]


def _int4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exponents, scales, finite, scaled = _scaled(values, INT4.limit)
    magnitudes, borders = (torch.from_numpy(each).to(values.device) for each in (INT4.MAGNITUDES, INT4.BORDERS))
    codes = torch.bucketize(scaled.abs(), borders, right=True, out_int32=True)
    codes = torch.where(finite, codes | scaled.signbit().int() << 3, 1)
    payload = torch.cat([exponents, codes[:, :16] | codes[:, 16:] << 4], 1).to(torch.uint8)
    numbers = torch.cat([magnitudes, 0 - magnitudes])[codes]
    return payload.view(-1), numbers.mul_(scales).view(-1)[: len(values)]


def _onebit(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(values, ONEBIT.block)
    negative = blocks < 0
    begins = torch.arange(0, len(values), ONEBIT.block, device=values.device)
    num_negative = negative.sum(1)
    nums = torch.stack([(len(values) - begins).clamp_(max=ONEBIT.block) - num_negative, num_negative], 1)
    sides = torch.stack([blocks.masked_fill(negative, 0.0), blocks.masked_fill(~negative, 0.0)], 1)
    means = (_lane_sums(sides.view(len(blocks), 2, 32, 32)) / nums.clamp_(min=1).double()).float()
    # Rounded to bfloat16 as integers: devices differ in the bits of NaN.
    bits = torch.where(means.isnan(), 0x7FC00000, means.view(torch.int32))
    levels = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    places = torch.arange(32, dtype=torch.int32, device=values.device)
    words = (negative.view(len(blocks), 32, 32).int() << places[:, None]).sum(1, dtype=torch.int32)
    payload = torch.cat([levels.to(torch.int16).view(torch.uint8), words.view(torch.uint8)], 1)
    numbers = (levels << 16).view(torch.float32)
    return payload.view(-1), torch.where(negative, numbers[:, 1:], numbers[:, :1]).view(-1)[: len(values)]


def _lane_sums(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last two dimensions, rows and lanes: lane by lane, then of lanes in order in float64."""
    lanes = torch.zeros_like(blocks[..., 0, :])
    for row in blocks.unbind(-2):
        lanes += row
    sums = torch.zeros_like(lanes[..., 0], dtype=torch.float64)
    for lane in lanes.unbind(-1):
        sums += lane
    return sums


# Each returns the payload of float32 values, and the numbers that it decodes to.
ENCODINGS: Mapping[int, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    INT8: _int8,
    INT4: _int4,
    ONEBIT: _onebit,
}
