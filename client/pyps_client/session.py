"""A worker's connection to all servers of a run: handshake, pushes, pulls, heartbeats, leave-taking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pyps_client.launch import Launch
from pyps_client.versions import Versions
from pyps_wire.common_pb2 import OptimizerSettings, Receipt
from pyps_wire.partition import Model, Partition

Vector = npt.NDArray[np.float32]


class Session:
    """One worker's membership in a run, over all of its servers.

    One thread may push while another pulls. Buffers that were handed in must rest until the call returns: a push may be
    sent again after a lost connection. Nothing here looks for NaN; `pyps_client.finite.FiniteGuard` does, before.
    """

    model: Model
    partition: Partition
    # The worker's own count of steps, sent with pushes and heartbeats. Whoever drives the session counts it up.
    clock: int

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerSettings,
        *,
        launch: Launch,
        initial: Callable[[], Sequence[Vector]],
        codec: str | None = None,
        device: str = "",
    ) -> None:
        """`initial` gives one float32 vector a group; it is called only where this worker is elected to initialise.

        `codec` is "float32", "float16" or "bfloat16": how pushed vectors are written. None takes the launch's.
        """

    def connect(self) -> None:
        """Joins the run, waiting for servers and for the initialiser; initialises where elected."""

    def push(
        self,
        vectors: Sequence[npt.NDArray[Any]],
        *,
        present: Sequence[bool] | None = None,
        example_count: int = 0,
        minibatch_count: int = 1,
        base_versions: Mapping[int, int] | None = None,
        newest_base_versions: Mapping[int, int] | None = None,
    ) -> list[Receipt]:
        """Pushes a gradient to all servers at once and returns the receipts, by shard id.

        `vectors`: one per group: float32, float16, or uint16 (the bits of bfloat16), as the codec says. `present`: one flag a
        tensor, in the model's order; absent tensors are not sent at all, and neither is a shard with nothing present.
        `base_versions`: a `held_versions` taken when the parameters were pulled that the gradient was computed on (the oldest,
        where several are summed; `newest_base_versions` then the newest); None for those held now. A shard may be REJECTED: see the
        receipt's reason; after REASON_EPOCH `pull_needed` is true. Raises RunFinished when the run had ended before.
        """

    def pull(
        self,
        vectors: Sequence[Vector],
        *,
        min_versions: Mapping[int, int] | None = None,
        wait_seconds: float | None = None,
    ) -> set[int]:
        """Writes what is newer than `held_versions` into `vectors` (one per group), and returns the changed shard ids.

        `min_versions`: shard id to the version to wait for, `wait_seconds` at the longest; then WaitTimedOut.
        """

    @property
    def held_versions(self) -> Versions:
        """A copy of shard id -> version of what was last pulled (-1: nothing), with the servers' epochs in it."""

    @property
    def epoch(self) -> int:
        """Grows with every restore of any server."""

    @property
    def pull_needed(self) -> bool:
        """True when a server was restored since the last pull: gradients of the held parameters would be refused."""

    @property
    def global_step(self) -> int:
        """Updates of the whole run: the largest shard version seen so far."""

    @property
    def num_workers(self) -> int:
        """Live workers, as the servers last said."""

    @property
    def finished(self) -> bool:
        """True when the run is over: pulls still work, a push raises RunFinished."""

    @property
    def save_requested(self) -> bool:
        """True once after a server asked the worker to save what only it has."""

    @property
    def run_id(self) -> str:
        """The run's name, known after `connect`."""

    @property
    def protocol(self) -> str:
        """The aggregation protocol in force ("async"), known after `connect`."""

    @property
    def staleness(self) -> str:
        """The staleness policy in force ("divide"), known after `connect`."""

    def report(self, **scalars: float) -> None:
        """Sets figures of this worker (loss=0.3) that the next heartbeat carries to the servers."""

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leaves the run ("finished" or "failed" and why) and frees connections. A second call does nothing."""

    def __enter__(self) -> Session:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.close("failed", f"{type(error).__name__}: {error}")
