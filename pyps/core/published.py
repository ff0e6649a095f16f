"""The published copy of a shard's parameters, which workers that pull in few bits hold."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_copy
from pyps.core.gradient import PublishedReply
from pyps_wire.codecs import FLOAT32, Codec


class Difference(NamedTuple):
    """What leads from one published version to the next."""

    since_version: int
    payload: memoryview


class Published:
    """A copy s of the parameters theta that follows them by encoded differences: d = Q(theta - s); s += D(d).

    Workers add the same differences to the same s, so that one encoding serves all. What an encoding loses is part of
    the next difference: s is off by one encoding's loss, which does not grow under codecs that lose a small share of a
    difference (Liu et al. 2020, DORE: the residual of the model). Called under the shard's lock.
    """

    def __init__(self, codec: Codec, parameters: Floats, *, version: int) -> None:
        self._codec = codec
        self._copy = aligned_copy(parameters)
        # The version of the parameters that were published last.
        self._version = version
        # The newest last; together smaller than the copy, which is sent where they do not reach back far enough.
        self._differences: deque[Difference] = deque()
        self._differences_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._copy.nbytes + self._differences_bytes

    def bring(
        self, reply: PublishedReply, parameters: Floats, *, version: int, held_version: int, is_last: bool
    ) -> int | None:
        """Fill in the reply with what is newer than the caller's version; return the published version, or None.

        Newer parameters are published for a caller that holds the newest published ones, has waited for newer ones, or
        calls after the last update. So the fastest worker sets the pace, and each push brings another one difference.
        """
        needed = held_version >= self._version or reply.min_version > self._version or is_last
        if needed and version > self._version:
            self._publish(parameters, version)
        if held_version >= self._version:
            return None
        since = [each for each in self._differences if each.since_version >= held_version]
        if since and since[0].since_version == held_version:
            reply.since_version, reply.payloads = held_version, [each.payload for each in since]
        else:
            reply.in_full(self._copy)
        return self._version

    def _publish(self, parameters: Floats, version: int) -> None:
        payload = self._codec.encode_difference(parameters, self._copy)
        if _kernels.first_non_finite(self._copy.data, FLOAT32, self._copy.size) >= 0:
            # No difference leads back from NaN: all begin again from the parameters.
            np.copyto(self._copy, parameters)
            self._differences.clear()
            self._differences_bytes, self._version = 0, version
            return
        self._differences.append(Difference(self._version, payload))
        self._differences_bytes += payload.nbytes
        while self._differences_bytes >= self._copy.nbytes:
            self._differences_bytes -= self._differences.popleft().payload.nbytes
        self._version = version
