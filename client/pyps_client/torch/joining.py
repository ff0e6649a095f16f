"""How a torch model joins a run: whole, in the cut that the run's model has, or as the parts of a replica."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from pyps_client.join import model_of_run
from pyps_client.replica.arrangement import arrange
from pyps_client.replica.group import ALONE, agreed, led
from pyps_client.torch.buffers import shared_buffers
from pyps_client.torch.layout import Layout, named_groups, plain_name, plan
from pyps_client.torch.options import Settled
from pyps_client.torch.parameters import initial_values
from pyps_client.torch.rates import Rates
from pyps_client.torch.steps import Steps
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import BadRequest, ModelMismatch
from pyps_wire.partition import Model

if TYPE_CHECKING:
    from pyps_client.replica.dtensor import Cut
    from pyps_client.replica.processes import Replica

_gradient = attrgetter("grad")


@dataclass(frozen=True)
class Joined:
    """A run that a worker has joined, and how the worker's model lies on its servers."""

    session: Worker
    layout: Layout
    # This minibatch's gradients, one entry a tensor of the layout.
    gradients: Callable[[], list[torch.Tensor | None]]
    # None where the model is not cut.
    cut: Cut | None = None

    @property
    def groups_of_vectors(self) -> Sequence[int] | None:
        """The optimizer's group of each vector that is pushed; None where it is the vector's own number."""
        return None if self.cut is None else self.cut.arrangement.own_param_groups


@dataclass(frozen=True)
class Joining:
    """One worker's, or one process's, way into a run."""

    module: torch.nn.Module
    param_groups: Sequence[Mapping[str, Any]]
    settled: Settled
    replica: Replica | None

    def join(self) -> Joined:
        """Joins the run; all processes of a replica call it, and raise the same error or none."""
        if self.replica is not None:
            return self._as_a_replica(self.replica)
        try:
            return self._whole()
        except ModelMismatch:
            run = self._run()
            if run is None or run.num_parts == 1 or self.settled.options.buffers != "local":
                raise
        return self._cut(run, None)

    def rates(self, joined: Joined) -> Rates:
        """What the worker's pushes say of learning rates."""
        options = self.settled.options
        return Rates(
            *(self.settled.translation, self.param_groups, self.settled.settings),
            owns_schedule=self.settled.is_first if options.owns_schedule is None else options.owns_schedule,
            local_rate=options.local_learning_rate,
            groups_of_vectors=joined.groups_of_vectors,
        )

    def steps(self, joined: Joined, rates: Rates) -> Steps:
        """What takes the worker's steps, or those of one process of a replica."""
        options, session = self.settled.options, joined.session
        none = [0.0] * len(joined.groups_of_vectors or self.param_groups)
        common: dict[str, Any] = {
            "pace": self.settled.pace,
            "local_rates": lambda: rates.sizes(session.next_rates()) or none,
            "rate_changes": rates.changes,
        }
        if joined.cut is not None and self.replica is not None and self.replica.count > 1:
            from pyps_client.replica.steps import ReplicaSteps

            return ReplicaSteps(
                *(session, joined.layout),
                **common,
                replica=self.replica,
                cut=joined.cut,
                takes_local_steps=rates.takes_local_steps,
            )
        buffers = shared_buffers(
            *(self.module, joined.layout),
            mode=options.buffers,
            is_first=self.settled.is_first,
            overlaps=self.settled.pace.overlap == "step",
        )
        return Steps(session, joined.layout, **common, buffers=buffers, read_my_writes=options.read_my_writes)

    def _whole(self) -> Joined:
        options = self.settled.options
        layout = plan(
            *(self.module, self.param_groups),
            shard_size=options.shard_size,
            with_buffers=options.buffers != "local",
        )
        # With a group for buffers, where they are shared. What is pushed of them is added as it comes.
        settings = OptimizerSettings()
        settings.CopyFrom(self.settled.settings)
        while len(settings.groups) < layout.model.num_groups:
            settings.groups.add()
        trained = layout.parameters[: layout.first_buffer]
        session = self._connected(layout, layout.model, settings)
        return Joined(session, layout, lambda: list(map(_gradient, trained)))

    def _as_a_replica(self, replica: Replica) -> Joined:
        """Initialises the run, or takes over its cut; once more where another did so meanwhile in another cut."""
        replica.bind(self.settled.launch.worker_id)
        agreed(replica, lambda: _check_common(replica.all_gather(self.settled.common)))
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
        from pyps_client.replica.dtensor import Cut, claims_of, gradients_of, layout_of, settings_of

        groups = agreed(replica or ALONE, lambda: named_groups(self.module, self.param_groups))
        claimed = claims_of(groups, replica)
        claims, index = (
            ([claimed.claims], 0) if replica is None else (replica.all_gather(claimed.claims), replica.index)
        )
        arrangement = arrange(claims, index, run=run, shard_size=self.settled.options.shard_size)
        layout = layout_of(arrangement, claimed)
        parts = arrangement.parts if arrangement.model.num_parts > 1 else ()
        settings = settings_of(arrangement, self.settled.settings)
        session = self._connected(layout, arrangement.model, settings, parts=parts, peers=replica)
        return Joined(session, layout, lambda: gradients_of(arrangement, claimed), Cut(arrangement, claimed))

    def _run(self) -> Model | None:
        """The run's model, None before there is one."""
        found = model_of_run(self.settled.launch)
        return None if found is None else found[0]

    def _connected(self, layout: Layout, model: Model, settings: OptimizerSettings, **part: Any) -> Worker:
        session = Worker(
            *(model, settings),
            launch=self.settled.launch,
            initial=lambda: initial_values(layout),
            device=layout.devices,
            **part,
        )
        session.connect()
        return session


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


def _check_common(told: Sequence[Mapping[str, object]]) -> None:
    """Refuses processes of a replica that were told different things."""
    for process, of_process in enumerate(told):
        for name, value in told[0].items():
            if of_process.get(name) != value:
                raise BadRequest(
                    f"{name} is {value} in process 0 of the replica, but {of_process.get(name)} in process {process}: "
                    f"give all processes of a replica the same."
                )
