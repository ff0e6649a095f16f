"""How a payload's numbers are written: float32, float16 or bfloat16, little-endian, without padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyps_wire.common_pb2 import CODEC_BFLOAT16, CODEC_FLOAT16, CODEC_FLOAT32
from pyps_wire.errors import BadRequest, WrongSize

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from pyps_wire.common_pb2 import Codec

CODECS: dict[str, Codec] = {
    "float32": CODEC_FLOAT32,
    "float16": CODEC_FLOAT16,
    "bfloat16": CODEC_BFLOAT16,
}

# numpy knows no bfloat16: its bits travel as unsigned integers.
_DTYPES: dict[int, np.dtype[Any]] = {
    CODEC_FLOAT32: np.dtype("<f4"),
    CODEC_FLOAT16: np.dtype("<f2"),
    CODEC_BFLOAT16: np.dtype("<u2"),
}


def codec_of(name: str) -> Codec:
    """Returns the codec of that name."""
    if name not in CODECS:
        raise BadRequest(f"there is no codec {name!r}; choose one of {', '.join(CODECS)}")
    return CODECS[name]


def name_of(codec: int) -> str:
    """Returns the name of a codec."""
    for name, number in CODECS.items():
        if number == codec:
            return name
    raise BadRequest(f"there is no codec number {codec}; send one of {_known()}")


def dtype_of(codec: int) -> np.dtype[Any]:
    """Returns the numpy type of a codec's words: float32, float16, or uint16 for bfloat16's bits."""
    if codec not in _DTYPES:
        raise BadRequest(f"there is no codec number {codec}; send one of {_known()}")
    return _DTYPES[codec]


def item_size(codec: int) -> int:
    """Returns the bytes that one number takes."""
    return dtype_of(codec).itemsize


def encode(values: NDArray[np.float32], codec: int) -> memoryview:
    """Returns the bytes of `values`, rounded to nearest, ties to even; NaN stays NaN.

    Under float32 they are the array's own memory, not a copy.
    """
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise BadRequest(f"encode takes a contiguous float32 array, not {values.dtype} {values.strides}")
    dtype = dtype_of(codec)
    if codec == CODEC_BFLOAT16:
        words: NDArray[Any] = _bfloat16_bits(values)
    else:
        with np.errstate(over="ignore"):  # Beyond float16's range is infinity, which the finite guard meets.
            words = values.astype(dtype, copy=False)
    return words.reshape(-1).view(np.uint8).data


def decode(payload: Buffer, codec: int) -> NDArray[np.float32]:
    """Returns the numbers of `payload` as float32.

    Under float32 they are a read-only view of its memory, at any alignment.
    """
    dtype = dtype_of(codec)
    view = memoryview(payload)
    if view.nbytes % dtype.itemsize:
        raise WrongSize(f"a payload of {view.nbytes} bytes is no whole number of {name_of(codec)} values")
    words: NDArray[Any] = np.frombuffer(view, dtype)
    if codec == CODEC_BFLOAT16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    values: NDArray[np.float32] = words.astype(np.float32, copy=False)
    if codec == CODEC_FLOAT32:
        values.flags.writeable = False
    return values


def decode_into(payload: Buffer, codec: int, place: NDArray[np.float32]) -> None:
    """Writes the numbers of `payload` into `place`, a contiguous array of as many, in one pass without another copy."""
    words: NDArray[Any] = np.frombuffer(memoryview(payload), dtype_of(codec))
    if words.shape != place.shape:
        raise WrongSize(f"a payload of {words.size} numbers does not fit into a place for {place.shape}")
    if codec == CODEC_BFLOAT16:
        np.left_shift(words, 16, out=place.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(place, words)


def _bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Half of the last place kept, less one when that place is even, carries exactly when rounding up is due.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    not_a_number = np.isnan(values)
    if not_a_number.any():
        # Cutting a NaN's low bits may leave an infinity: set the quiet bit.
        rounded = np.where(not_a_number, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def _known() -> str:
    return ", ".join(f"{number} ({name})" for name, number in CODECS.items())
