"""Codecs in C++ (csrc/worker_library.cpp) for encodings whose numbers share bytes. Without them numpy serves."""

from __future__ import annotations

import logging
import os
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, c_bool, c_double, c_float, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pyps_wire.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


class _Table(Structure):
    """WorkerCodings of csrc/worker_codings.h. A call releases the GIL."""

    _fields_: ClassVar = [
        ("encode", CFUNCTYPE(None, c_void_p, c_void_p, c_int, c_size_t)),
        ("decode", CFUNCTYPE(None, c_void_p, c_void_p, c_int, c_size_t)),
        ("add", CFUNCTYPE(None, c_void_p, c_void_p, c_int, c_size_t)),
        ("encode_feedback", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int, c_size_t)),
        ("encode_difference", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int, c_size_t)),
        (
            "encode_sparse",
            CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_int, c_double, c_size_t),
        ),
        ("decode_sparse", CFUNCTYPE(c_bool, c_void_p, c_void_p, c_size_t, c_int, c_size_t)),
    ]


def _open() -> CDLL | None:
    spec = find_spec("pyps_wire._codecs")
    library = CDLL(spec.origin) if spec is not None and spec.origin is not None else None
    if library is None or not hasattr(library, "pyps_codecs"):
        logging.getLogger("pyps_client").debug(
            "pyps_wire/_codecs.so was not built, or for another version: numpy encodes, which takes longer"
        )
        return None
    library.pyps_codings.restype = POINTER(_Table)
    library.pyps_codecs.restype = POINTER(c_int)
    library.pyps_codecs.argtypes = (c_bool,)
    return library


_library = _open()
# Numbers of codecs whose numbers share bytes, and of codecs that send some numbers only: the library takes no other.
BLOCK_CODECS, SPARSE_CODECS = (
    frozenset(takewhile(bool, _library.pyps_codecs(sparse)) if _library else ()) for sparse in (False, True)
)


def load(isa: str = "") -> Any:
    """Return the functions for an instruction set, the widest by default; None where they are not available."""
    if _library is None:
        return None
    tables = {name: _library.pyps_codings(number) for number, name in enumerate(INSTRUCTION_SETS)}
    available = [table for name, table in tables.items() if table and isa in ("", name)]
    return available[-1].contents if available else None


# What codecs call; None: numpy.
functions = load(os.environ.get("PYPS_ISA", ""))


def address(values: NDArray[np.float32], count: int) -> int:
    """Return where so many contiguous float32 values lie. Raises InvalidArgument for others."""
    if values.size != count:
        raise InvalidArgument(f"a codec takes arrays of one length, not of {count} and {values.size} numbers")
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise InvalidArgument(f"a codec takes a contiguous float32 array, not {values.dtype} {values.strides}")
    return values.ctypes.data


def address_of_bytes(payload: Buffer) -> int:
    return np.frombuffer(memoryview(payload), np.uint8).ctypes.data
