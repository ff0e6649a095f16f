"""How a torch model joins a run: as a whole, split as the run's model is, or as the parts of a replica."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from pyps_client.join import model_of_run
from pyps_client.launch import Launch
from pyps_client.replica.group import ALONE, Group, agreed, led
from pyps_client.torch.buffers import SharedBuffers
from pyps_client.torch.embedding import require_no_tables, tables_of, with_tables
from pyps_client.torch.layout import Layout, named_groups, plain_name, plan, several
from pyps_client.torch.overlap import steps_of
from pyps_client.torch.parameters import initial_values
from pyps_client.torch.rates import Rates
from pyps_client.torch.rules import translate, translation_of
from pyps_client.torch.schedule import Settings
from pyps_client.torch.steps import Steps
from pyps_client.vectors import FiniteGuard
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import PAYLOAD_KIND_BUFFER, OptimizerSettings
from pyps_wire.errors import InvalidArgument, ModelMismatch
from pyps_wire.partition import Model

if TYPE_CHECKING:
    from pyps_client.replica.dtensor import ModelCut


class Joining:
    """Joins one worker, or one process of a replica, to a run."""

    # Known once joined. `gradients` returns this minibatch's, one entry per tensor of the layout.
    session: Worker
    layout: Layout
    gradients: Callable[[], Iterable[torch.Tensor | None]]
    # The split model; None where the worker trains it whole.
    cut: ModelCut | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        launch: Launch,
        settings: Settings,
        replica: Group,
    ) -> None:
        """Check what can be checked without servers; raises a ConfigurationError."""
        translation, local_rate = translation_of(optimizer), settings.local_learning_rate
        steps_known = local_rate is not None or not translation.stateful
        if replica is not ALONE and settings.buffers != "local":
            raise InvalidArgument(
                f"buffers is {settings.buffers!r}; in a replica of several processes it must be 'local'."
            )
        if settings.overlap == "backward" and (replica is not ALONE or settings.buffers != "local"):
            what = "a replica's processes take" if replica is not ALONE else f"buffers={settings.buffers!r} takes"
            raise InvalidArgument(f"overlap is 'backward', but {what} a push as a whole: use overlap='step' or 'off'.")
        if replica is ALONE and launch.parts > 1:
            raise InvalidArgument(
                f"This process is one of the {launch.parts} parts of {launch.worker_id} (PYPS_PARTS, which --parts "
                "sets): give RemoteOptimizer or sandblaster() replica=Replica(), or start workers of one process."
            )
        self.module, self.launch, self.replica = module, launch, replica
        if replica is not ALONE:
            require_no_tables(module, user="A replica of several processes")
        self.tables, self.finite_rows = tables_of(module), FiniteGuard()
        self._param_groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
        self._settings = replace(settings, local_rate_known=steps_known)
        # The servers' rule and settings.
        self._optimizer = translate(optimizer)
        self.rates = Rates(
            *(translation, self._param_groups, self._optimizer),
            owns_schedule=self._is_first if settings.owns_schedule is None else settings.owns_schedule,
            local_rate=local_rate,
        )
        if replica is ALONE:
            self._whole_layout()
        else:
            named_groups(module, self._param_groups)

    def join(self) -> None:
        """Join the run; all processes of a replica call it, and raise the same error or none."""
        if self.replica is not ALONE:
            self._take_one_name()
            self._join_as_replica()
            return
        try:
            self._join_whole()
        except ModelMismatch:
            run = model_of_run(self.launch)
            if run is None or run.num_parts == 1 or self._settings.buffers != "local":
                raise
            self._join_split(run)

    def steps(self) -> Steps:
        session, cut, layout, rates, settings = self.session, self.cut, self.layout, self.rates, self._settings
        if cut is not None:
            rates.groups_of_vectors = cut.arrangement.own_param_groups
        common: dict[str, Any] = {
            "local_rates": lambda: rates.sizes(session.next_rates()),
            "rate_changes": rates.changes,
        }
        if cut is not None and self.replica.count > 1:
            from pyps_client.torch.replica_steps import ReplicaSteps

            common |= {"replica": self.replica, "cut": cut, "takes_local_steps": rates.takes_local_steps}
            return ReplicaSteps(session, layout, settings, **common)
        if cut is not None and settings.overlap == "backward":
            raise InvalidArgument(
                "overlap is 'backward', but this run's model is cut in parts: use overlap='step' or 'off'."
            )
        if layout.kinds is not None:
            overlaps = settings.overlap == "step"
            common["buffers"] = SharedBuffers(
                *(self.module, layout, settings.buffers), is_first=self._is_first, overlaps=overlaps
            )
        return steps_of(session, layout, settings, **common)

    @property
    def _is_first(self) -> bool:
        """True for the first of several workers, and for one without an index."""
        return self.launch.worker_index in (None, 0)

    def _whole_layout(self) -> Layout:
        return plan(
            *(self.module, self._param_groups),
            shard_size=self.launch.shard_size,
            with_buffers=self._settings.buffers != "local",
        )

    def _join_whole(self) -> None:
        self.layout, self.cut = self._whole_layout(), None
        layout = self.layout
        settings = OptimizerSettings()
        settings.CopyFrom(self._optimizer)
        # Shared buffers are one group more.
        if layout.kinds is not None:
            settings.groups.add(kind=PAYLOAD_KIND_BUFFER)
        self.gradients = partial(map, attrgetter("grad"), layout.parameters[: layout.first_buffer])
        self._connect(layout.model, settings)

    def _take_one_name(self) -> None:
        """Take over the leader's name and place where nobody chose one, as under torchrun."""
        own = self.launch
        name, index, count = led(self.replica, lambda: (own.worker_id, own.worker_index, own.worker_count))
        if not own.named:
            self.launch = own.with_(worker_id=name, worker_index=index, worker_count=count)

    def _join_as_replica(self) -> None:
        """Initialize the run, or take over its parts; again where another worker initialized it meanwhile."""
        self.replica.name = self.launch.worker_id
        agreed(self.replica, self._check_common)
        before = led(self.replica, lambda: model_of_run(self.launch))
        try:
            self._join_split(before)
        except ModelMismatch as mismatch:
            run = led(self.replica, lambda: model_of_run(self.launch))
            if run is None or run == before:
                raise mismatch from None
            self._join_split(run)

    def _join_split(self, run: Model | None) -> None:
        """Join by parts: those of the run's model, or of a split of this one where there is no run."""
        # Imported here: DTensors take a second to load, which workers of whole models need not spend.
        from pyps_client.replica.arrangement import arrange
        from pyps_client.replica.dtensor import ModelCut, claims_of

        replica = self.replica
        groups = agreed(replica, lambda: named_groups(self.module, self._param_groups))
        claimed = claims_of(groups, replica)
        claims = replica.all_gather(claimed.claims)
        arrangement = arrange(claims, replica.index, run=run, shard_size=self.launch.shard_size)
        self.cut = cut = ModelCut(arrangement, claimed)
        self.layout, self.gradients = cut.layout(), cut.gradients
        parts = arrangement.parts if arrangement.model.num_parts > 1 else ()
        self._connect(arrangement.model, cut.settings(self._optimizer), parts=parts, peers=replica)

    def _connect(self, model: Model, settings: OptimizerSettings, **part: Any) -> None:
        model = with_tables(model, self.tables, self.launch)
        initial, device = partial(initial_values, self.layout), self.layout.devices
        self.session = Worker(model, settings, launch=self.launch, initial=initial, device=device, **part)
        self.session.connect()
        if (tables := self.session.tables) is not None:
            for table in self.tables:
                table.bind(tables)

    def _check_common(self) -> None:
        """Raise InvalidArgument where the replica's processes have different settings."""
        groups = [dict(sorted(group.hyperparameters.items())) for group in self._optimizer.groups]
        paces = ("push_every", "pull_every", "overlap", "compat", "local_learning_rate")
        common = {
            "The optimizer's rule": self._optimizer.rule,
            **{f"The optimizer's group {index}": group for index, group in enumerate(groups)},
            **{name: getattr(self._settings, name) for name in paces},
            **{name: getattr(self.launch, name) for name in ("gradient_codec", "parameter_codec", "shard_size")},
            "The list of servers": ",".join(self.launch.servers),
            "PYPS_WORKER_ID": self.launch.worker_id,
            "PYPS_WORKER_INDEX": self.launch.worker_index,
        }
        first, *others = self.replica.all_gather(common)
        for process, of_process in enumerate(others, 1):
            for name, value in first.items():
                if of_process.get(name) != value:
                    raise InvalidArgument(
                        f"{name} is {value} in process 0 of the replica, but {of_process.get(name)} in process "
                        f"{process}: give all processes of a replica the same."
                    )


class OwnModel:
    """Finds parameters that were replaced in a model: no step would train the new ones."""

    def __init__(self, module: torch.nn.Module, param_groups: Iterable[Mapping[str, Any]], replica: Group) -> None:
        self._module = module
        self._replica = replica
        # Held, so that each id stays its own.
        self._known = dict(module.named_parameters())
        self._trained = {id(parameter) for group in param_groups for parameter in group["params"]}
        self._places = _places_in(module)

    def check(self, is_first: bool) -> None:
        """Refuse a model whose trained parameters were replaced; before the first step, DistributedDataParallel too."""
        if is_first:
            unwrapped(self._module, self._replica)
        # To walk through all modules takes longer than a step of a small model.
        for table, name, held in self._places:
            if table.get(name) is not held:
                break
        else:
            return
        # After a forward pass without a backward pass, fully_shard's modules hold whole parameters: the next forward
        # pass would read these and not the pulled ones.
        kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for part in self._module.modules():
            if isinstance(part, kind):
                part.reshard()
        now = {id(parameter) for parameter in self._module.parameters()}
        known = {id(parameter): plain_name(name) for name, parameter in self._known.items()}
        lost = [name for key, name in known.items() if key in self._trained - now]
        # A layer may be removed, if nothing takes its place.
        if lost and now - known.keys():
            raise InvalidArgument(
                f"Parameters ({several(lost)}) are no longer the model's: others were put in their place after "
                "RemoteOptimizer was made, by load_state_dict(..., assign=True) or a new layer, and no step would "
                "train them. Change the model, and load it so, before the torch optimizer is made."
            )
        self._places = _places_in(self._module)


def _places_in(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return table, name and value of each module's parameters and submodules; torch.jit has no such tables."""
    tables = (table for part in module.modules() for table in (part._parameters, part._modules))
    return [(table, name, held) for table in tables if isinstance(table, dict) for name, held in table.items()]


def unwrapped(model: torch.nn.Module, replica: Group) -> torch.nn.Module:
    """Return the model without a DistributedDataParallel around it, whose processes must be one replica.

    Refuses wrappers that average gradients among workers, or that hide how a parameter is split.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"The model is a {type(model).__name__}; expected a torch.nn.Module: RemoteOptimizer(model, optimizer)."
        )
    is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    inner: Any = model.module if is_wrapped else model
    for part in (*model.modules(), *_averagers_of(inner)):
        if type(part).__name__ == "FullyShardedDataParallel":
            raise InvalidArgument(
                "The model is a FullyShardedDataParallel, whose parameters are nameless pieces: cut it with "
                "fully_shard or parallelize_module, and give RemoteOptimizer replica=Replica()."
            )
        if not isinstance(part, torch.nn.parallel.DistributedDataParallel) or part.process_group.size() == 1:
            continue
        ranks = torch.distributed.get_process_group_ranks(part.process_group)
        if not set(ranks) <= set(replica.ranks):
            raise InvalidArgument(
                f"The model is a DistributedDataParallel, whose {len(ranks)} processes average their gradients: each "
                "would push the average, and a step count that often. Leave DistributedDataParallel out, so that each "
                "process is a worker, or give RemoteOptimizer replica=Replica() with all of them: one worker together."
            )
        if len(ranks) == replica.count:
            # All processes have the same values and gradients of these.
            alike = set(map(id, part.parameters()))
            replica.replicated |= {plain_name(name) for name, tensor in inner.named_parameters() if id(tensor) in alike}
    whole: torch.nn.Module = inner
    return whole


def _averagers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return each DistributedDataParallel around parameters of a module: trainers may pass on the inner module."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return []
    # torch keeps no list of them.
    kind = torch.nn.parallel.DistributedDataParallel
    own = set(map(id, module.parameters()))
    around_any = (found for found in gc.get_objects() if issubclass(type(found), kind))
    return [found for found in around_any if not own.isdisjoint(map(id, found.parameters()))]
