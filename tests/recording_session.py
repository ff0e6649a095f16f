"""A session without a network, for unit tests of what drives one: it records what it is told."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyps_wire.codecs import decode
from pyps_wire.common_pb2 import (
    CODEC_BFLOAT16,
    CODEC_FLOAT16,
    CODEC_FLOAT32,
    OUTCOME_APPLIED,
    PAYLOAD_KIND_DELTA,
    Receipt,
)

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
    learning_rates: dict[int, float]
    kinds: list[int] | None


@dataclass
class RecordingSession:
    """Plain SGD on one shard (id 0) that holds everything; deltas are added. `gate` holds pushes back while it is
    not set."""

    parameters: list[np.ndarray]
    rate: float = 0.0
    clock: int = 0
    finished: bool = False
    pull_needed: bool = False
    version: int = 0
    pushes: list[Pushed] = field(default_factory=list)
    pulls: int = 0
    failure: Exception | None = None
    protocol: str = "async"
    ask_to_proceed: bool = False
    accumulate: int = 0
    current_version_only: bool = False
    # What was called, in order: "proceed", "push", "pull".
    events: list[str] = field(default_factory=list)

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
        learning_rates: Mapping[int, float] | None = None,
        kinds: Sequence[int] | None = None,
    ) -> list[Receipt]:
        assert self.gate.wait(20), "the test never opened the gate"
        if self.failure is not None:
            raise self.failure
        decoded = [np.array(decode(v.view(np.uint8), _CODECS[v.dtype.name])) for v in vectors]
        base, newest = base_versions or {}, newest_base_versions or {}
        self.events.append("push")
        self.pushes.append(
            Pushed(
                decoded,
                list(present or []),
                example_count,
                minibatch_count,
                base[0],
                newest[0],
                dict(learning_rates or {}),
                None if kinds is None else list(kinds),
            )
        )
        for group, (mine, gradient) in enumerate(zip(self.parameters, decoded, strict=True)):
            is_delta = kinds is not None and kinds[group] == PAYLOAD_KIND_DELTA
            mine -= np.float32(-1.0 if is_delta else self.rate) * gradient
        self.version += 1
        return [Receipt(outcome=OUTCOME_APPLIED, version_after=self.version)]

    def proceed(self) -> None:
        if self.ask_to_proceed:
            self.events.append("proceed")

    def pull(self, vectors: Sequence[np.ndarray], **_: Any) -> set[int]:
        self.pulls += 1
        self.events.append("pull")
        for theirs, mine in zip(vectors, self.parameters, strict=True):
            theirs[:] = mine
        self.held = self.version
        return {0}

    def snapshot(self, vectors: Sequence[np.ndarray]) -> dict[int, int]:
        for theirs, mine in zip(vectors, self.parameters, strict=True):
            theirs[:] = mine
        return {0: self.version}

    @property
    def held_versions(self) -> dict[int, int]:
        return {0: self.held}
