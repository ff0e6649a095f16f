"""The server's native kernels (csrc/bindings.cpp). Every call releases the GIL around its loop.

A gradient is any C-contiguous buffer: raw bytes at any offset, or an array of the codec's own type
(float32 for FLOAT32, float16 for FLOAT16, uint16 for BFLOAT16). Arrays are one-dimensional, C-contiguous
float32; those written to must be writable and share no memory with the others. Nothing is converted or
copied: TypeError and ValueError name what does not fit, before anything is written.
"""

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

Floats = npt.NDArray[np.float32]

FLOAT32: int
FLOAT16: int
BFLOAT16: int

def isa() -> str:
    """Names the instruction set in use.

    It is the widest available or what PYPS_ISA names, chosen at the first call of any kernel. ValueError
    when PYPS_ISA names none that is available: call this at start, so that the error comes at start.
    """

def available() -> list[str]:
    """Names the instruction sets of this build and processor, narrowest first."""

def select(name: str) -> None:
    """Switches the instruction set for every caller. For tests."""

def sgd(parameters: Floats, gradient: Buffer, codec: int, *, rate: float) -> None:
    """p = p - rate * g, in place."""

def adagrad(parameters: Floats, accumulator: Floats, gradient: Buffer, codec: int, *, rate: float, eps: float) -> None:
    """a = a + g * g; p = p - rate * g / (sqrt(a) + eps), in place; a zero denominator makes no step."""

def first_non_finite(gradient: Buffer, codec: int) -> int:
    """Returns the index of the first NaN or infinity, -1 when there is none."""

def decode(gradient: Buffer, codec: int, out: Floats) -> None:
    """Writes the encoded values as float32 into `out`."""

def encode(values: Floats, codec: int) -> bytes:
    """Returns the values encoded, rounded to nearest, ties to even; NaN stays NaN."""

def summary(values: Floats) -> tuple[float, float, float]:
    """Returns (sum of squares in float64, min, max).

    Min and max pass over NaN, the sum does not; of no values they are (0.0, inf, -inf).
    """

def bandwidth(parameters: Floats, accumulator: Floats, gradient: Buffer) -> None:
    """Moves the memory that `adagrad` moves, with one addition each. For benchmarks."""

def split_frame(message: Buffer, field_number: int) -> tuple[bytes, int, int]:
    """Returns (the message without its payload field, the payload's offset, its size in bytes).

    A message without a payload has offset len(message) and size 0. ValueError names the reason and the
    byte when the message is no valid protobuf encoding.
    """

def join_frame(header: bytes, field_number: int, values: Floats, codec: int = ...) -> bytes:
    """Returns header, the payload field's tag and length, and the encoded values as one message."""
