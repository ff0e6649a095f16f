"""Who may join a run: a caller's Hello or Initialize, checked and compared with the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from pyps.core import rules
from pyps.core.bounds import Bounds
from pyps.core.election import Claim
from pyps.core.protocols.base import Aggregation
from pyps.core.rule_settings import RuleSettings, settle
from pyps.core.table import check_table
from pyps_wire.codecs import INT8, Codec
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.errors import InvalidArgument, LimitExceeded, ModelMismatch, ProtocolMismatch, RunMismatch
from pyps_wire.partition import Model, Partition, first_difference

if TYPE_CHECKING:
    from pyps.config import ServerConfig
    from pyps.run.content import ReadyContent
    from pyps.run_header import RunHeader


class RunState(IntEnum):
    """The states of pyps.v1.RunState, by the same numbers."""

    EMPTY = 1
    INITIALIZING = 2
    READY = 3
    FINISHED = 4
    DRAINING = 5
    STANDBY = 6


NAME_LENGTH_MAX = 200
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 16, 64
# Clocks of machines that work together differ by less.
CLOCKS_APART_NANOSECONDS = 24 * 3600 * 10**9


@dataclass(frozen=True)
class Greeting:
    """The Hello of a worker or an observer."""

    run_id: str
    worker_id: str
    incarnation: int
    protocol_version: int
    software: str
    observer: bool
    server_index: int
    num_servers: int
    model: Model | None
    optimizer: RuleSettings | None
    fingerprint: str
    host: str
    process_id: int
    device: str
    # Of its pushes and pulls; None where it did not say.
    gradient_codec: Codec | None = None
    parameter_codec: Codec | None = None
    # The parts of the model that the caller holds, ascending; () for all of them.
    parts: tuple[int, ...] = ()
    # Of a process of a replica: the replica's name.
    replica: str = ""
    secret: bytes = field(default=b"", repr=False)
    # It leaves the first turn to initialise to another worker.
    yields: bool = False
    # Its place among the run's workers.
    index: int | None = None

    @property
    def name(self) -> str:
        """The worker's name in the run: the replica's for its processes."""
        return self.replica or self.worker_id


@dataclass(frozen=True)
class Opening:
    """The first message of an Initialize."""

    run_id: str
    worker_id: str
    incarnation: int
    term: int
    partition: Partition
    optimizer: RuleSettings | None
    server_index: int
    replica: str = ""
    secret: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        return self.replica or self.worker_id

    @property
    def claim(self) -> Claim:
        return Claim(self.run_id, self.server_index, self.term, self.name, self.incarnation)


@dataclass(frozen=True)
class Holding:
    """The run that a server holds; `str` gives the words for refusals."""

    run_id: str
    version_max: int
    last_update_seconds: float | None

    def __str__(self) -> str:
        if self.version_max == 0:
            return f"run {self.run_id!r} at version 0, not updated yet"
        age = "since it was restored" if self.last_update_seconds is None else _ago(self.last_update_seconds)
        return f"run {self.run_id!r} at version {self.version_max}, last updated {age}"


def check_caller(greeting: Greeting, *, software: str) -> None:
    """Refuse a caller that no server of this version could serve."""
    if greeting.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"this server ({software}) speaks protocol version {PROTOCOL_VERSION}, the caller "
            f"({greeting.software or 'unnamed software'}) version {greeting.protocol_version}: "
            "install the same release of pyps and pyps-client at both ends"
        )
    check_name(greeting.run_id, what="run_id")
    check_name(greeting.worker_id, what="worker_id")
    check_replica(greeting.replica)
    if greeting.observer:
        return
    if not greeting.worker_id:
        raise InvalidArgument("the worker gives no worker_id: every worker of a run needs a name of its own")
    if greeting.replica and not greeting.worker_id.startswith(f"{greeting.replica}/"):
        raise InvalidArgument(
            f"the worker calls itself {greeting.worker_id!r}, a process of replica {greeting.replica!r}: the names of "
            f"its processes begin with {greeting.replica + '/'!r}"
        )
    check_secret(greeting.secret)
    if greeting.incarnation == 0:
        raise InvalidArgument("the worker gives no incarnation: send its start time in nanoseconds")
    if greeting.model is None or not greeting.model.tensors:
        raise InvalidArgument("the worker names no model: send its tensors in Hello")
    if not greeting.server_index < greeting.num_servers:
        raise InvalidArgument(
            f"server_index is {greeting.server_index}, but must be below num_servers, {greeting.num_servers}"
        )


def check_incarnation(incarnation: int, *, now_nanoseconds: int) -> None:
    """Refuse an incarnation of the future: a later life with the present time could never take the name over."""
    if incarnation > now_nanoseconds + CLOCKS_APART_NANOSECONDS:
        days = (incarnation - now_nanoseconds) / CLOCKS_APART_NANOSECONDS
        raise InvalidArgument(
            f"the worker's incarnation, {incarnation}, lies {days:.1f} days ahead of this server's clock: send"
            " its start time in nanoseconds since 1970, and set both machines' clocks"
        )


def check_secret(secret: bytes) -> None:
    """Refuse a secret of a worker or a coordinator that is so short that it could be guessed, or too long."""
    if secret and not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise InvalidArgument(
            f"the caller's secret has {len(secret)} bytes; expected {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} that "
            "nobody can guess, or none, for one of the server's"
        )


def with_parts(greeting: Greeting, model: Model | None, *, protocol: Aggregation) -> Greeting:
    """Return the greeting with `parts` () where the worker holds all of the run's model, or its own before the run.

    Raises:
        InvalidArgument: A part does not exist, or the protocol needs workers with all parts.
    """
    model = model or greeting.model
    assert model is not None
    if any(part >= later for part, later in pairwise(greeting.parts)):
        raise InvalidArgument(
            f"worker {greeting.worker_id!r} declares the parts {', '.join(map(str, greeting.parts))}: name each once, "
            "in ascending order"
        )
    absent = [part for part in greeting.parts if not 0 <= part < model.num_parts]
    if absent:
        raise InvalidArgument(
            f"worker {greeting.worker_id!r} declares part {absent[0]}; the run's model has {model.num_parts}, from 0"
        )
    parts = greeting.parts if len(greeting.parts) < model.num_parts else ()
    protocol.check_worker(greeting.worker_id, parts, greeting.replica)
    return replace(greeting, parts=parts)


def check_opening(opening: Opening) -> None:
    """Refuse an initialiser that names no worker or no run."""
    if not opening.run_id or not opening.worker_id:
        raise InvalidArgument("the initialiser must name the run and itself: send run_id and worker_id")
    check_name(opening.run_id, what="run_id")
    check_name(opening.worker_id, what="worker_id")
    check_replica(opening.replica)


def check_replica(name: str) -> None:
    """Refuse a replica's name that is unreadable, blank, or looks like the name of a process."""
    check_name(name, what="replica")
    if name and not name.strip():
        raise InvalidArgument(
            f"the replica's name is {name!r}, blank: give each replica a name of its own (PYPS_WORKER_ID)"
        )
    if "/" in name:
        raise InvalidArgument(
            f"the replica's name is {name!r}, but what follows a '/' names a process of a replica: give it "
            "a name without one (PYPS_WORKER_ID)"
        )


def check_name(name: str, *, what: str) -> None:
    """Refuse a name that is unreadable or too long: logs, tables and metrics show it unchanged."""
    if len(name) > NAME_LENGTH_MAX or not name.isprintable():
        shown = name if len(name) <= NAME_LENGTH_MAX else f"{name[:32]}..."
        raise InvalidArgument(
            f"{what} is {shown!r}, {len(name)} characters long: give a name of at most {NAME_LENGTH_MAX} "
            "printable characters"
        )


def check_model_size(model: Model, *, parameters_max: int) -> None:
    """Refuse a model beyond the server's limit."""
    if model.num_parameters > parameters_max:
        raise LimitExceeded(
            f"the model has {model.num_parameters} parameters, this server takes {parameters_max} at the "
            "most: raise --max-model-parameters"
        )


def check_run_configured(requested: str, *, configured: str) -> None:
    """Refuse a caller that means another run than the one that the server was started for."""
    if requested and configured and requested != configured:
        raise RunMismatch(
            f"this server was started for run {configured!r} (--run-id), the caller means {requested!r}: "
            f"join with PYPS_RUN_ID={configured}, or use another server"
        )


def check_run(requested: str, holding: Holding, *, observer: bool) -> None:
    """Refuse a caller that means another run, or none in particular while the run holds updates."""
    if requested == holding.run_id or (not requested and (observer or holding.version_max == 0)):
        return
    meant = f"the caller means run {requested!r}" if requested else "the caller names no run"
    raise RunMismatch(
        f"this server holds {holding}, but {meant}: join it by name (PYPS_RUN_ID={holding.run_id} or "
        f"run_id={holding.run_id!r}), or forget it with `pyps reset {shlex.quote(holding.run_id)}`"
    )


def check_model(theirs: Greeting, *, mine: Partition, server_index: int) -> None:
    """Refuse a list of servers, a model or slices that are not the run's."""
    if (theirs.num_servers, theirs.server_index) != (mine.num_servers, server_index):
        raise ModelMismatch(
            f"the run's list of servers has {mine.num_servers}, this one at place {server_index}, but the "
            f"caller's list has {theirs.num_servers}, this one at place {theirs.server_index}: give all workers "
            "one list"
        )
    difference = None
    if theirs.model is not None and theirs.model is not mine.model:
        difference = first_difference(mine.model, theirs.model, mine_name="the run", theirs_name="the worker")
    if difference is not None:
        raise ModelMismatch(
            f"the worker's model is not the run's: {difference}: give all workers one model, or start another run: "
            "`pyps reset` with the run's name, or other servers with another run id"
        )
    if theirs.fingerprint and theirs.fingerprint != mine.fingerprint:
        raise ModelMismatch(
            f"the worker's slices of the model are not the run's (fingerprint {theirs.fingerprint}, here "
            f"{mine.fingerprint}): start the worker again, so that it reads them from the run"
        )


def check_initialization(
    caller: Greeting | Opening,
    model: Model,
    num_servers: int,
    *,
    config: ServerConfig,
    configured: RuleSettings | None,
    protocol: Aggregation,
) -> RuleSettings:
    """Return the settings of the run that the caller would initialise; refuse what the server could not hold."""
    check_run_configured(caller.run_id, configured=config.run_id)
    check_model_size(model, parameters_max=config.max_model_parameters)
    unreadable = next((tensor.name for tensor in model.tensors if not tensor.name.isprintable()), None)
    if unreadable is not None:
        raise InvalidArgument(
            f"a tensor is named {unreadable!r}; expected printable characters: people read it in tables"
        )
    check_name(model.name, what="the model's name")
    model.require_whole()
    for table in model.tables.values():
        check_table(table.name, table.shape[1], table.table)
    protocol.check_servers(num_servers)
    source = "the server's --optimizer"
    settings = settle(configured, caller.optimizer, num_groups=model.num_vectors, source=source)
    Bounds.parse(config.bounds).require_settings(settings)
    if isinstance(caller, Greeting):
        check_codec(caller.gradient_codec, caller.worker_id, settings.rule, settings.groups)
    return settings


def check_joining(greeting: Greeting, content: ReadyContent, *, holding: Holding, waited: bool) -> None:
    """Refuse a caller that does not fit the run. A caller that `waited` for the run need not name it."""
    requested = content.run_id if waited and not greeting.run_id else greeting.run_id
    check_run(requested, holding, observer=greeting.observer)
    if greeting.num_servers:
        check_model(greeting, mine=content.partition, server_index=content.server_index)
    if greeting.optimizer is not None:
        num_groups = content.partition.model.num_vectors
        settle(content.settings, greeting.optimizer, num_groups=num_groups, source=f"that of run {content.run_id!r}")
    if not greeting.observer:
        settings = content.settings
        check_codec(greeting.gradient_codec, greeting.worker_id, settings.rule, settings.groups)


def check_codec(codec: Codec | None, worker_id: str, rule: str, groups: Iterable[Mapping[str, float]]) -> None:
    """Refuse a codec that sends some of the numbers only, if the rule has momentum in any of the groups."""
    momentum_name = rules.find(rule).momentum_name
    momentum = max((group.get(momentum_name, 0.0) for group in groups), default=0.0)
    if codec is not None and codec.sparse and momentum > 0:
        raise InvalidArgument(
            f"worker {worker_id!r} pushes in codec {codec.name}, which sends some of the numbers only, but the"
            f" run's optimizer {rule} has {momentum_name} {momentum:g}, which goes on moving the others: use"
            f" one without momentum, such as sgd, or a codec that sends all numbers: PYPS_GRADIENT_CODEC={INT8.name}"
        )


def check_restoring(header: RunHeader, *, run_id: str, configured: RuleSettings | None) -> None:
    """Refuse a checkpoint that contradicts the server's flags: its run, or its optimizer."""
    if run_id and header.run_id != run_id:
        raise RunMismatch(
            f"the checkpoint is of run {header.run_id!r}, but this server was started for "
            f"{run_id!r}: drop --run-id, or name another --checkpoint-dir"
        )
    settle(
        configured,
        header.optimizer,
        num_groups=header.model.num_vectors,
        source="--optimizer",
        requester="the checkpoint",
    )


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.1f} h ago"


# The name of a run that only measures: nothing is kept of it. No user gives such a name by accident.
MEASUREMENT = re.compile(r"pyps-bench-[0-9a-f]{8}")
