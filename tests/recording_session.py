"""A session without a network, for unit tests of what drives one: it records what it is told."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyps_client.conversion import Converter
from pyps_client.lent import Lent
from pyps_client.torch.layout import Layout
from pyps_wire.codecs import codec_of, decode, dtype_of, encode
from pyps_wire.common_pb2 import (
    CODEC_BFLOAT16,
    CODEC_FLOAT16,
    CODEC_FLOAT32,
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    PAYLOAD_KIND_DELTA,
    REASON_NOT_FINITE,
    Receipt,
)

# numpy's name of a vector's type -> the codec.
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
    not set. As a server that `checks_first`, it refuses what is not finite."""

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
    gives_out_data: bool = False
    codec: str = "float32"
    pull_codec: str = "float32"
    checks_first: bool = False
    # Whether lent vectors are said to be this process's own.
    private: bool = True
    # What was called, in order: "proceed", "push", "pull", "exchange", "snapshot".
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.held = -1
        # For each list of vectors, the version that was last pulled into it.
        self._brought: dict[int, int] = {}

    def lend(self, gradient_buffers: int = 1, *, converter: Converter | None = None) -> Lent:
        sizes = [len(vector) for vector in self.parameters]
        return lent(sizes, gradient_buffers, codec=self.codec, pull_codec=self.pull_codec, private=self.private)

    def push(self, vectors: Sequence[np.ndarray], **described: Any) -> list[Receipt]:
        self.events.append("push")
        return self._push(vectors, **described)

    def exchange(
        self, vectors: Sequence[np.ndarray], parameters: Sequence[np.ndarray], **described: Any
    ) -> list[Receipt]:
        self.events.append("exchange")
        receipts = self._push(vectors, **described)
        if not self.pull_needed:
            self._pull(parameters)
        return receipts

    def _push(
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
        if self.checks_first and not all(np.isfinite(vector).all() for vector in decoded):
            return [Receipt(outcome=OUTCOME_REJECTED, reason=REASON_NOT_FINITE)]
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
        self.events.append("pull")
        self._pull(vectors)
        return {0}

    def _pull(self, vectors: Sequence[np.ndarray]) -> None:
        """Brings what is newer than these vectors hold, and that only."""
        self.pulls += 1
        if self._brought.get(id(vectors), -1) < self.version:
            for theirs, mine in zip(vectors, self.parameters, strict=True):
                theirs.view(np.uint8)[:] = encode(mine, codec_of(self.pull_codec))
        self.held = self._brought[id(vectors)] = self.version

    def snapshot(self, vectors: Sequence[np.ndarray]) -> dict[int, int]:
        self.events.append("snapshot")
        for theirs, mine in zip(vectors, self.parameters, strict=True):
            theirs[:] = mine
        return {0: self.version}

    @property
    def held_versions(self) -> dict[int, int]:
        return {0: self.held}


def lent(
    sizes: Sequence[int],
    gradient_buffers: int = 1,
    *,
    codec: str = "float32",
    pull_codec: str = "float32",
    private: bool = True,
) -> Lent:
    """Vectors of groups of these sizes, as a session lends them."""

    def vectors(name: str) -> list[np.ndarray]:
        return [np.zeros(size, dtype_of(codec_of(name))) for size in sizes]

    return Lent(vectors(pull_codec), [vectors(codec) for _ in range(gradient_buffers)], private=private)


def lent_for(layout: Layout, **options: Any) -> Lent:
    """Vectors for a model laid out."""
    return lent(layout.model.group_sizes, **options)
