"""Where one server's parameters arrive, and what is held of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.conversion import NUMPY, Converter
from pyps_client.vectors import part_of
from pyps_wire.codecs import Codec, codec_numbered
from pyps_wire.errors import PypsError, WrongSize
from pyps_wire.partition import ShardRange


class Held:
    """The versions that a caller holds of one server's shards, and those that it is to wait for; all of one epoch.

    One thread may note versions to wait for while another pulls.
    """

    def __init__(self, shards: Sequence[ShardRange]) -> None:
        self.epoch = 0
        self.versions = {shard.shard_id: -1 for shard in shards}
        self.shards = {shard.shard_id: shard for shard in shards}
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._wanted: dict[int, int] = {}

    def read(self) -> tuple[int, dict[int, int]]:
        """The epoch and a copy of the versions, of one moment."""
        with self._lock:
            return self.epoch, self.versions.copy()

    def enter(self, epoch: int) -> None:
        """Forgets versions of an earlier epoch: the server counts anew from its checkpoint."""
        with self._lock:
            if epoch != self.epoch:
                self.epoch = epoch
                self.versions = dict.fromkeys(self.versions, -1)
                self._wanted = {}

    def want(self, shard_id: int, version: int, *, epoch: int) -> None:
        """Notes a version to wait for before the next gradient is computed."""
        if version <= 0:
            return
        with self._lock:
            if epoch == self.epoch:
                self._wanted[shard_id] = max(version, self._wanted.get(shard_id, 0))

    @property
    def wanted(self) -> dict[int, int]:
        """Shard id to the version to wait for, where it has not come yet."""
        if not self._wanted:
            return {}
        with self._lock:
            wanted = self._wanted.items()
            return {shard_id: version for shard_id, version in wanted if self.versions[shard_id] < version}

    def answered(self, waited_for: Mapping[int, int]) -> None:
        """Ends waits that the server has answered: they came, or never will, since the run is over."""
        with self._lock:
            for shard_id, version in waited_for.items():
                if self._wanted.get(shard_id, version + 1) <= version:
                    del self._wanted[shard_id]


class Intake:
    """The way of one server's parameters into a caller's vectors, one a group."""

    def __init__(
        self, vectors: Sequence[npt.NDArray[Any]], held: Held, *, codec: Codec, name: str, converter: Converter = NUMPY
    ) -> None:
        """`codec`: how the parameters travel. The vectors take them so, or as float32. `name`: the server's."""
        self.vectors = vectors
        self.held = held
        self.codec = codec
        self._name = name
        self._converter = converter

    def write(self, shard_id: int, codec_number: int, payload: memoryview) -> None:
        """Copies or converts a shard's parameters, in one pass, from where the transport left them into their place."""
        shard = self._shard(shard_id)
        place = part_of(self.vectors, shard)
        codec = codec_numbered(codec_number)
        if payload.nbytes != codec.bytes_of(shard.length):
            raise WrongSize(
                f"{self._name} sent {payload.nbytes} bytes of parameters of shard {shard_id}; expected "
                f"{codec.bytes_of(shard.length)}."
            )
        if place.dtype == codec.dtype:
            np.copyto(place, np.frombuffer(payload, codec.dtype))
        elif place.dtype == np.float32:
            self._converter.decode(payload, codec, place)
        else:
            raise PypsError(
                f"{self._name} sent parameters as {codec.name}, which were not asked for: vectors are {place.dtype}."
            )

    def accept(self, shard_id: int, version: int) -> None:
        """Notes the version of a shard that was written."""
        self._shard(shard_id)
        self.held.versions[shard_id] = version

    def _shard(self, shard_id: int) -> ShardRange:
        shard = self.held.shards.get(shard_id)
        if shard is None:
            raise PypsError(f"{self._name} sent shard {shard_id}, which it does not hold.")
        return shard
