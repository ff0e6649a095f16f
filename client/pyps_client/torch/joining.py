"""How a torch model joins a run: whole, in the cut that the run's model has, or as the parts of a replica."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyps_client import departure
from pyps_client.arrangement import arrange
from pyps_client.launch import Launch
from pyps_client.looking import model_of_run
from pyps_client.peers import ALONE, agreed, led
from pyps_client.session import Session
from pyps_client.torch.cut_layout import Cut, CutRates, gradients_of, layout_of, settings_of
from pyps_client.torch.downpour import Downpour
from pyps_client.torch.layout import Layout, named_groups, plain_name, plan
from pyps_client.torch.pace import Pace
from pyps_client.torch.parameter_buffer import initial_values
from pyps_client.torch.rates import GroupRates, LocalRates
from pyps_client.torch.replica import Replica
from pyps_client.torch.replica_downpour import ReplicaDownpour
from pyps_client.torch.shared_buffers import SharedBuffers
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import BadRequest, ModelMismatch
from pyps_wire.partition import Model


@dataclass(frozen=True)
class Joined:
    """A run that a worker has joined, and how the worker's model lies on its servers."""

    session: Session
    layout: Layout
    # This minibatch's gradients, one entry a tensor of the layout.
    gradients: Callable[[], list[torch.Tensor | None]]
    # None where the model is not cut.
    cut: Cut | None = None


@dataclass(frozen=True)
class Joining:
    """One worker's, or one process's, way into a run."""

    module: torch.nn.Module
    param_groups: Sequence[Mapping[str, Any]]
    settings: OptimizerSettings
    launch: Launch
    replica: Replica | None
    shard_size: int
    with_buffers: bool
    # What all processes of a replica must have in common, by name.
    common: Mapping[str, object]

    def join(self) -> Joined:
        """Joins the run; all processes of a replica call it, and raise the same error or none."""
        if self.replica is not None:
            return self._as_a_replica(self.replica)
        try:
            return self._whole()
        except ModelMismatch:
            run = self._run()
            if run is None or run.num_parts == 1 or self.with_buffers:
                raise
        return self._cut(run, None)

    def _whole(self) -> Joined:
        layout = plan(self.module, self.param_groups, shard_size=self.shard_size, with_buffers=self.with_buffers)
        trained = layout.parameters[: layout.first_buffer]
        session = self._connected(layout, layout.model, _with_buffers(self.settings, layout))
        return Joined(session, layout, lambda: [parameter.grad for parameter in trained])

    def _as_a_replica(self, replica: Replica) -> Joined:
        """Founds the run, or takes over its cut; once more where another founded it meanwhile in another cut."""
        replica.bind(self.launch.worker_id)
        agreed(replica, lambda: _check_common(replica.gather(self.common)))
        before = led(replica, self._run)
        try:
            return self._cut(before, replica)
        except ModelMismatch as mismatch:
            run = led(replica, self._run)
            if run is None or run == before:
                raise mismatch from None
        return self._cut(run, replica)

    def _cut(self, run: Model | None, replica: Replica | None) -> Joined:
        # Imported here: DTensors take a second to load, which workers of whole models need not spend.
        from pyps_client.torch.claims import claims_of

        groups = agreed(replica or ALONE, lambda: named_groups(self.module, self.param_groups))
        claimed = claims_of(groups, replica)
        claims, index = ([claimed.claims], 0) if replica is None else (replica.gather(claimed.claims), replica.index)
        arrangement = arrange(claims, index, run=run, shard_size=self.shard_size)
        layout = layout_of(arrangement, claimed)
        parts = arrangement.parts if arrangement.model.num_parts > 1 else ()
        settings = settings_of(arrangement, self.settings)
        session = self._connected(layout, arrangement.model, settings, parts=parts, peers=replica)
        cut = Cut(arrangement, claimed)
        return Joined(session, layout, lambda: gradients_of(arrangement, claimed), cut)

    def _run(self) -> Model | None:
        """The run's model, None before there is one."""
        found = model_of_run(self.launch)
        return None if found is None else found[0]

    def _connected(
        self,
        layout: Layout,
        model: Model,
        settings: OptimizerSettings,
        *,
        parts: Sequence[int] = (),
        peers: Replica | None = None,
    ) -> Session:
        session = Session(
            model,
            settings,
            launch=self.launch,
            initial=lambda: initial_values(layout),
            device=layout.devices,
            parts=parts,
            peers=peers,
        )
        try:
            session.connect()
        except BaseException as error:
            session.close(*departure.cause_of(error))
            raise
        return session


def worker_of(
    joined: Joined,
    replica: Replica | None,
    pace: Pace,
    local_rates: LocalRates,
    rates: GroupRates,
    *,
    buffers: SharedBuffers | None,
    read_my_writes: bool,
) -> Downpour:
    """What takes a worker's steps, or those of one process of a replica; its session is connected."""
    if joined.cut is None:
        return Downpour(
            *(joined.session, joined.layout),
            pace=pace,
            local_rates=lambda: local_rates(joined.session.next_rates()),
            rate_changes=rates.take_changes,
            buffers=buffers,
            read_my_writes=read_my_writes,
        )
    cut = CutRates(joined.cut.arrangement)
    own: dict[str, Any] = {
        "pace": pace,
        "local_rates": lambda: local_rates(joined.session.next_rates(), cut.spread),
        "rate_changes": cut.changes(rates.take_changes),
    }
    if replica is None or replica.count == 1:
        return Downpour(joined.session, joined.layout, **own, read_my_writes=read_my_writes)
    return ReplicaDownpour(
        *(joined.session, joined.layout),
        **own,
        replica=replica,
        cut=joined.cut,
        takes_local_steps=local_rates.may_be_other_than_zero,
    )


def common_of(
    settings: OptimizerSettings, launch: Launch, pace: Pace, *, shard_size: int, local_rate: float | None
) -> dict[str, object]:
    """What all processes of a replica must have in common, by name."""
    groups = [dict(sorted(group.hyperparameters.items())) for group in settings.groups]
    return {
        "The optimizer's rule": settings.rule,
        **{f"The optimizer's group {index}": group for index, group in enumerate(groups)},
        "push_every": pace.push_every,
        "pull_every": pace.pull_every,
        "overlap": pace.overlap,
        "compat": pace.compat,
        "local_learning_rate": local_rate,
        "gradient_dtype": launch.codec,
        "parameter_dtype": launch.pull_codec,
        "shard_size": shard_size,
        "The list of servers": ",".join(launch.servers),
        "PYPS_WORKER_ID": launch.worker_id,
        "PYPS_WORKER_INDEX": launch.worker_index,
    }


def unwrapped(model: torch.nn.Module, replica: Replica | None) -> torch.nn.Module:
    """The model itself, of one that torch wraps for training by several processes, who must then be one worker.

    Refuses what averages gradients among workers that would each push the average, and what cuts parameters unseen.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadRequest(
            f"The model is a {type(model).__name__}; expected a torch.nn.Module: RemoteOptimizer(model, optimizer)."
        )
    is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    inner: Any = model.module if is_wrapped else model
    for part in (*model.modules(), *_averagers_of(inner)):
        if type(part).__name__ == "FullyShardedDataParallel":
            raise BadRequest(
                "The model is a FullyShardedDataParallel, whose parameters are nameless pieces: cut it with "
                "fully_shard or parallelize_module, and give RemoteOptimizer replica=Replica()."
            )
        if not isinstance(part, torch.nn.parallel.DistributedDataParallel) or part.process_group.size() == 1:
            continue
        ranks = torch.distributed.get_process_group_ranks(part.process_group)
        if replica is None or not set(ranks) <= set(replica.ranks):
            raise BadRequest(
                f"The model is a DistributedDataParallel, whose {len(ranks)} processes average their gradients: each "
                "would push the average, and a step count that often. Leave DistributedDataParallel out, so that each "
                "process is a worker, or give RemoteOptimizer replica=Replica() with all of them: one worker together."
            )
        if len(ranks) == replica.count:
            alike = {id(parameter) for parameter in part.parameters()}
            named = inner.named_parameters()
            replica.hold_alike(plain_name(name) for name, parameter in named if id(parameter) in alike)
    whole: torch.nn.Module = inner
    return whole


def _averagers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Each DistributedDataParallel over parameters of a module: trainers hand on what, or part of what, they wrap."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return []
    # The module does not know of it, and torch keeps no list.
    kind = torch.nn.parallel.DistributedDataParallel
    own = set(map(id, module.parameters()))
    around_any = (found for found in gc.get_objects() if issubclass(type(found), kind))
    return [found for found in around_any if not own.isdisjoint(map(id, found.parameters()))]


def check_replica(replica: Replica | None, *, buffers: str, read_my_writes: bool) -> None:
    """Refuses what the processes of a replica cannot do together."""
    if replica is None:
        return
    for name, value, possible in (("buffers", buffers, "local"), ("read_my_writes", read_my_writes, False)):
        if value != possible:
            raise BadRequest(f"{name} is {value!r}; in a replica of several processes it must be {possible!r}.")


def _check_common(told: Sequence[Mapping[str, object]]) -> None:
    """Refuses processes of a replica that were told different things."""
    for process, of_process in enumerate(told):
        for name, value in told[0].items():
            if of_process.get(name) != value:
                raise BadRequest(
                    f"{name} is {value} in process 0 of the replica, but {of_process.get(name)} in process {process}: "
                    f"give all processes of a replica the same."
                )


def _with_buffers(settings: OptimizerSettings, layout: Layout) -> OptimizerSettings:
    """The settings with a group for buffers, where they are shared. What is pushed of them is added as it comes."""
    whole = OptimizerSettings()
    whole.CopyFrom(settings)
    while len(whole.groups) < layout.model.num_groups:
        whole.groups.add()
    return whole
