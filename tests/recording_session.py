"""A session without a network, for unit tests of what drives one: it records what it is told."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyps_wire.codecs import decode
from pyps_wire.common_pb2 import CODEC_BFLOAT16, CODEC_FLOAT16, CODEC_FLOAT32, OUTCOME_APPLIED, Receipt

_CODECS = {"float32": CODEC_FLOAT32, "float16": CODEC_FLOAT16, "uint16": CODEC_BFLOAT16}


@dataclass
class Pushed:
    """One push as it arrived: vectors decoded to float32."""

    vectors: list[np.ndarray]
    present: list[bool]
    example_count: int
    minibatch_count: int
    base_version: int
    newest_base_version: int


@dataclass
class RecordingSession:
    """Plain SGD on one shard (id 0) that holds everything. `gate` holds pushes back while it is not set."""

    parameters: list[np.ndarray]
    rate: float = 0.0
    clock: int = 0
    finished: bool = False
    pull_needed: bool = False
    version: int = 0
    pushes: list[Pushed] = field(default_factory=list)
    pulls: int = 0
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.held = -1

    def push(
        self,
        vectors: Sequence[np.ndarray],
        *,
        present: Sequence[bool] | None = None,
        example_count: int = 0,
        minibatch_count: int = 1,
        base_versions: Mapping[int, int] | None = None,
        newest_base_versions: Mapping[int, int] | None = None,
    ) -> list[Receipt]:
        assert self.gate.wait(20), "the test never opened the gate"
        if self.failure is not None:
            raise self.failure
        decoded = [np.array(decode(v.view(np.uint8), _CODECS[v.dtype.name])) for v in vectors]
        base, newest = base_versions or {}, newest_base_versions or {}
        self.pushes.append(Pushed(decoded, list(present or []), example_count, minibatch_count, base[0], newest[0]))
        for mine, gradient in zip(self.parameters, decoded, strict=True):
            mine -= np.float32(self.rate) * gradient
        self.version += 1
        return [Receipt(outcome=OUTCOME_APPLIED, version_after=self.version)]

    def pull(self, vectors: Sequence[np.ndarray], **_: Any) -> set[int]:
        self.pulls += 1
        for theirs, mine in zip(vectors, self.parameters, strict=True):
            theirs[:] = mine
        self.held = self.version
        return {0}

    @property
    def held_versions(self) -> dict[int, int]:
        return {0: self.held}
