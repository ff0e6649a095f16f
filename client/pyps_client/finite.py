"""Finds NaN and infinity in gradients before anything is sent, and ends a worker that makes nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.log import logger
from pyps_wire.codecs import Codec
from pyps_wire.errors import NotFinite

SKIPS_MAX = 10


def first_non_finite(values: npt.NDArray[Any], codec: Codec) -> int | None:
    """Flat index of the first NaN or infinity, None where all are finite. Words that are no floats are the codec's."""
    flat = values.reshape(-1)
    if flat.dtype.kind != "f":
        flat = codec.decode(flat.view(np.uint8).data, flat.size)
    # A finite sum proves finite terms, in one pass without memory. The sum of finite terms may overflow: then
    # look closer.
    with np.errstate(all="ignore"):
        if np.isfinite(np.sum(flat, dtype=np.float32 if flat.dtype == np.float16 else None)):
            return None
    suspects = np.flatnonzero(~np.isfinite(flat))
    return int(suspects[0]) if suspects.size else None


class FiniteGuard:
    """Counts gradients skipped in a row: overflow now and then is normal under mixed precision, nothing else is not."""

    def __init__(self) -> None:
        # In a row, and in all.
        self.skips = 0
        self.skips_total = 0

    def passed(self) -> None:
        """Notes a finite gradient."""
        self.skips = 0

    def skipped(self, name: str, index: tuple[int, ...], value: float) -> None:
        """Notes a gradient that is not sent, with a warning; raises NotFinite when too many came in a row."""
        self.skips += 1
        self.skips_total += 1
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        if self.skips >= SKIPS_MAX:
            raise NotFinite(
                f"The gradient of {where} is {value}; {self.skips} gradients in a row were not finite and none was "
                "sent. Lower the learning rate, clip gradients or look at the data."
            )
        logger.warning(
            "the gradient of %s is %s: this push is skipped (%d in a row, %d would end the worker)",
            *(where, value, self.skips, SKIPS_MAX),
        )
