"""Rounds with running servers, timed: a whole gradient goes out, all new parameters come back."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client import Launch, Session
from pyps_wire.codecs import codec_of, encode, item_size
from pyps_wire.common_pb2 import OUTCOME_REJECTED, GroupSettings, OptimizerSettings, Reason
from pyps_wire.errors import PypsError
from pyps_wire.partition import Model, Tensor

Array = npt.NDArray[Any]

# The first rounds make connections and buffers; the slowest link still gets this many timed ones.
WARM_UP_ROUNDS = 2
TIMED_ROUNDS_MIN = 3
# Servers are there, or the measurement ends.
WAIT_SECONDS = 10.0

# The rule hardly matters for time, the rate keeps the numbers finite for ever.
OPTIMIZER = OptimizerSettings(
    rule="adagrad", groups=[GroupSettings(hyperparameters={"learning_rate": 1e-6, "initial_accumulator_value": 0.1})]
)


@dataclass(frozen=True)
class Way:
    """How gradients and parameters travel: "auto" (shared memory where offered) or "grpc", and as what numbers."""

    transport: str
    codec: str


@dataclass(frozen=True)
class Rounds:
    """Timed rounds of one model on one way."""

    # "shm", "grpc", or "mixed" where only some servers share memory with this machine.
    transport: str
    codec: str
    num_parameters: int
    # Of each round, in the order made; grows while they are made.
    seconds: list[float] = field(default_factory=list)

    @property
    def rounds_per_second(self) -> float:
        """Rounds made in the time that all of them took."""
        return len(self.seconds) / sum(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """Payload bytes each way: as many come back as go out."""
        return self.rounds_per_second * self.num_parameters * item_size(codec_of(self.codec))

    def percentile(self, percent: float) -> float:
        """The seconds that so many of 100 rounds did not exceed."""
        rank = math.ceil(percent / 100 * len(self.seconds))
        return sorted(self.seconds)[max(0, rank - 1)]


class Bench:
    """One model on the servers, for a run of its own, which they forget after the context."""

    def __init__(self, servers: tuple[str, ...], *, token: str, run_id: str, num_parameters: int) -> None:
        self._servers = servers
        self._token = token
        self._run_id = run_id
        self._model = Model((Tensor("bench", (num_parameters,)),))
        self._num_sessions = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Begins the run and holds it between measurements, by a worker that never pushes."""
        with self._session(Way("grpc", "float32")):
            yield

    def measure(
        self,
        way: Way,
        results: list[Rounds],
        *,
        seconds: float,
        made: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """Makes rounds for so long, and a few at least, into `results`; adds none where "auto" comes down to gRPC.

        `made` is called between timed rounds, with the seconds of the last. A refused gradient ends it, as any error
        does, and Ctrl-C; the rounds made until then are in `results`, which may be none.
        """
        with self._session(way) as session:
            lent = session.lend()
            if way.transport == "auto" and session.transport == "grpc":
                return
            gradient, parameters = lent.gradients[0], lent.parameters
            payload = encode(np.full(self._model.num_parameters, 1e-3, np.float32), codec_of(way.codec))
            gradient[0][:] = np.frombuffer(payload, gradient[0].dtype)
            session.pull(parameters)

            for _ in range(WARM_UP_ROUNDS):
                _make_round(session, gradient, parameters)
            # There before the first round: whatever ends the rounds, and however often, takes none of them away.
            rounds = Rounds(session.transport, way.codec, self._model.num_parameters)
            results.append(rounds)
            end = time.perf_counter() + seconds
            while len(rounds.seconds) < TIMED_ROUNDS_MIN or time.perf_counter() < end:
                rounds.seconds.append(_make_round(session, gradient, parameters))
                made(rounds.seconds[-1])

    def _session(self, way: Way) -> Session:
        self._num_sessions += 1
        launch = Launch(
            servers=self._servers,
            run_id=self._run_id,
            worker_id=f"bench-{socket.gethostname()}-{os.getpid()}-{self._num_sessions}",
            token=self._token,
            start_wait_seconds=WAIT_SECONDS,
            loss_wait_seconds=WAIT_SECONDS,
            wait_seconds=6 * WAIT_SECONDS,
            codec=way.codec,
            pull_codec=way.codec,
            transport=way.transport,
        )
        size = self._model.num_parameters
        return Session(
            self._model, OPTIMIZER, launch=launch, initial=lambda: [np.zeros(size, np.float32)], device="cpu"
        )


def _make_round(session: Session, gradient: Sequence[Array], parameters: Sequence[Array]) -> float:
    """Makes one round, with the waits that the protocol in force asks for; returns its seconds."""
    began = time.perf_counter()
    session.proceed()
    session.clock += 1
    receipts = session.exchange(gradient, parameters)
    if session.pull_needed:
        session.pull(parameters)
    took = time.perf_counter() - began
    for receipt in receipts:
        if receipt.outcome == OUTCOME_REJECTED:
            raise PypsError(f"a server refused a gradient: {receipt.message or Reason.Name(receipt.reason)}")
    return took
