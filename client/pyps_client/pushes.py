"""A worker's pushes, over all servers: numbered, checked, cut for each server."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from pyps_client.conversion import Converter
from pyps_client.holdings import Holdings
from pyps_client.intake import Intake
from pyps_client.learning_rates import GroupRate, LearningRates
from pyps_client.peers import ALONE, Peers
from pyps_client.pushing import OutgoingPush, Part, check_bases, check_push, norm_of, pushed_parts
from pyps_client.servers import Servers
from pyps_client.vectors import check_vectors, dtype_of
from pyps_client.versions import Versions
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import PAYLOAD_KIND_GRADIENT, Receipt, Sender
from pyps_wire.errors import BadRequest
from pyps_wire.parameter_server_pb2 import PushRequest


class Description(TypedDict, total=False):
    """What is said of pushed vectors, in arguments: see Session.push."""

    present: Sequence[bool] | None
    example_count: int
    minibatch_count: int
    base_versions: Mapping[int, int] | None
    newest_base_versions: Mapping[int, int] | None
    kinds: Sequence[int] | None
    learning_rates: Mapping[int, GroupRate] | None
    gradient_norm: float | None


class Contribution(NamedTuple):
    """What a worker pushes."""

    vectors: Sequence[npt.NDArray[Any]]
    # The worker's own count of steps.
    clock: int
    # As in Description.
    present: Sequence[bool] | None = None
    example_count: int = 0
    minibatch_count: int = 1
    base_versions: Mapping[int, int] | None = None
    newest_base_versions: Mapping[int, int] | None = None
    kinds: Sequence[int] | None = None
    learning_rates: Mapping[int, GroupRate] | None = None
    gradient_norm: float | None = None


class Pushes:
    """Makes pushes and sends them to all servers at once. For one thread at a time."""

    def __init__(
        self, holdings: Holdings, *, sender: Sender, codec: Codec, servers: Servers, peers: Peers = ALONE
    ) -> None:
        if codec.stateful:
            raise BadRequest(f"codec {codec.name} carries state from push to push, which no session keeps yet")
        self._partition = partition = holdings.partition
        self._sender = sender
        self._codec = codec
        self._servers = servers
        self._peers = peers
        self._holdings = holdings
        self._rates = LearningRates(partition.num_servers, num_groups=partition.model.num_groups)
        self._gradients_only = [PAYLOAD_KIND_GRADIENT] * partition.model.num_groups
        self._whole = [pushed_parts(partition, index, present=None) for index in range(partition.num_servers)]
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._sequence = 0

    def send(
        self,
        contribution: Contribution,
        *,
        clip_norm: float,
        converter: Converter,
        intakes: Sequence[Intake] | None = None,
        lent_index: int | None = None,
    ) -> list[list[Receipt]]:
        """Sends a push to all servers and returns the receipts, server by server.

        With intakes, one a server, it is an exchange. `lent_index`: which of the lent gradients it is, where the
        intakes' vectors are lent too. Float32 is converted. The push's norm, of all processes of the replica, is told
        where `clip_norm` is not 0; it is found here where it is not described.
        """
        vectors, kinds = contribution.vectors, contribution.kinds or self._gradients_only
        model = self._partition.model
        if lent_index is None:
            dtype = dtype_of(self._codec, converted=bool(vectors) and vectors[0].dtype == np.float32)
            check_vectors(vectors, model, dtype, what="pushed gradient")
        check_push(model, present=contribution.present, kinds=kinds)
        self._rates.change(contribution.learning_rates)
        held = self._holdings.versions
        base = held if contribution.base_versions is None else contribution.base_versions
        newest = base if contribution.newest_base_versions is None else contribution.newest_base_versions
        check_bases(self._partition, base, newest)
        epochs = base.epochs if isinstance(base, Versions) else held.epochs
        connections = self._servers.connections
        parts = [self._parts(connection.index, contribution.present) for connection in connections]
        header = self._header(contribution)
        if clip_norm > 0 and contribution.gradient_norm is None:
            header["gradient_norm"] = self.norm(contribution, converter=converter)
        pushes = [
            OutgoingPush(
                *(PushRequest(**header, epoch=epochs[connection.index]), parts[place], vectors),
                base_versions=base,
                newest_base_versions=newest,
                kinds=kinds,
                learning_rates=self._rates.owed(connection.index, epoch=epochs[connection.index]),
                connection=connection,
                intake=None if intakes is None else intakes[place],
                lent_index=lent_index,
                converter=converter,
            )
            for place, connection in enumerate(connections)
        ]
        answers = self._servers.on_all(pushes)
        for connection, receipts in zip(connections, answers, strict=True):
            self._rates.answered(connection.index, epoch=epochs[connection.index], receipts=receipts)
        return answers

    def norm(self, contribution: Contribution, *, converter: Converter) -> float:
        """The norm of a push of all processes of the replica, all of which call it."""
        parts = [self._parts(connection.index, contribution.present) for connection in self._servers.connections]
        kinds = contribution.kinds or self._gradients_only
        own = norm_of(chain(*parts), contribution.vectors, codec=self._codec, kinds=kinds, converter=converter)
        if self._peers.count == 1:
            return own
        return math.sqrt(self._peers.total([own * own])[0])

    def _parts(self, server_index: int, present: Sequence[bool] | None) -> tuple[Part, ...]:
        settled = self._holdings.settled(server_index)
        if not settled and (present is None or all(present)):
            return self._whole[server_index]
        return pushed_parts(self._partition, server_index, settled, present=present)

    def _header(self, contribution: Contribution) -> dict[str, Any]:
        """The fields that all messages of a push share."""
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
        return {
            "sender": self._sender,
            "sequence": sequence,
            "codec": self._codec,
            "example_count": contribution.example_count,
            "minibatch_count": contribution.minibatch_count,
            "clock": contribution.clock,
            "gradient_norm": contribution.gradient_norm or 0.0,
        }
