"""How a torch model joins a run: whole, sliced as the run's model is, or as the parts of a replica."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from pyps_client.join import model_of_run
from pyps_client.launch import Launch, check_types
from pyps_client.replica.group import ALONE, Group, agreed, led
from pyps_client.torch.buffers import BUFFER_MODES, SharedBuffers
from pyps_client.torch.layout import Layout, named_groups, plain_name, plan, several
from pyps_client.torch.overlap import steps_of
from pyps_client.torch.parameters import initial_values
from pyps_client.torch.rates import Rates
from pyps_client.torch.rules import translate, translation_of
from pyps_client.torch.schedule import Pace
from pyps_client.torch.steps import Steps
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import PAYLOAD_KIND_BUFFER, OptimizerSettings
from pyps_wire.errors import InvalidArgument, ModelMismatch
from pyps_wire.partition import Model

if TYPE_CHECKING:
    from pyps_client.replica.dtensor import ModelCut

_gradient = attrgetter("grad")


@dataclass(frozen=True)
class Joined:
    """A run that a worker has joined, with the layout of the worker's model."""

    session: Worker
    layout: Layout
    # This minibatch's gradients, one entry a tensor of the layout.
    gradients: Callable[[], Iterable[torch.Tensor | None]]
    # None where the model is not cut.
    cut: ModelCut | None = None

    @property
    def groups_of_vectors(self) -> Sequence[int] | None:
        """The optimizer's group of each pushed vector; None where it is the vector's number."""
        return None if self.cut is None else self.cut.arrangement.own_param_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Pace):
    """The settings of a RemoteOptimizer."""

    local_learning_rate: float | None = None
    read_my_writes: bool = False
    buffers: str = "local"
    owns_schedule: bool | None = None

    def __post_init__(self) -> None:
        check_types(self)
        Pace.__post_init__(self)
        if self.buffers not in BUFFER_MODES:
            raise InvalidArgument(f"buffers is {self.buffers!r}; expected one of {', '.join(BUFFER_MODES)}.")
        rate = self.local_learning_rate
        if rate is not None and not 0 <= rate < math.inf:
            raise InvalidArgument(f"local_learning_rate is {rate!r}; expected 0 (no local steps) or more.")


class Joining:
    """How one worker, or one process of a replica, joins a run."""

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
        if settings.read_my_writes and (local_rate == 0 or not steps_known):
            raise InvalidArgument(
                "read_my_writes repeats the worker's own steps on pulled parameters, but there are no local steps: "
                "pass local_learning_rate, the size of a plain SGD step."
            )
        if replica is not ALONE:
            for name, possible in (("buffers", "local"), ("read_my_writes", False)):
                if (value := getattr(settings, name)) != possible:
                    raise InvalidArgument(
                        f"{name} is {value!r}; in a replica of several processes it must be {possible!r}."
                    )
        if settings.overlap == "backward" and (replica is not ALONE or settings.buffers != "local"):
            what = "a replica's processes take" if replica is not ALONE else f"buffers={settings.buffers!r} takes"
            raise InvalidArgument(f"overlap is 'backward', but {what} a push as a whole: use overlap='step' or 'off'.")
        if replica is ALONE and launch.parts > 1:
            raise InvalidArgument(
                f"This process is one of the {launch.parts} parts of {launch.worker_id} (PYPS_PARTS, which "
                "`pyps run --parts` sets): give RemoteOptimizer replica=Replica(), or start workers of one process."
            )
        self.module, self.launch, self.replica = module, launch, replica
        self.param_groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
        self.settings = replace(settings, local_rate_known=steps_known)
        # The optimizer in the servers' words.
        self.translation, self.optimizer = translation, translate(optimizer)
        if replica is ALONE:
            self._layout()
        else:
            named_groups(module, optimizer.param_groups)

    @property
    def is_first(self) -> bool:
        """Whether the worker is the first of several, or has no index."""
        return self.launch.worker_index in (None, 0)

    def join(self) -> Joined:
        """Join the run; all processes of a replica call it, and raise the same error or none."""
        if self.replica is not ALONE:
            self._take_one_name()
            return self._as_a_replica()
        try:
            return self._whole()
        except ModelMismatch:
            run = self._run()
            if run is None or run.num_parts == 1 or self.settings.buffers != "local":
                raise
        return self._cut(run)

    def rates(self) -> Rates:
        owns_schedule = self.settings.owns_schedule
        return Rates(
            *(self.translation, self.param_groups, self.optimizer),
            owns_schedule=self.is_first if owns_schedule is None else owns_schedule,
            local_rate=self.settings.local_learning_rate,
        )

    def steps(self, joined: Joined, rates: Rates) -> Steps:
        session, cut = joined.session, joined.cut
        none = [0.0] * len(joined.groups_of_vectors or self.param_groups)
        common: dict[str, Any] = {
            "pace": self.settings,
            "local_rates": lambda: rates.sizes(session.next_rates()) or none,
            "rate_changes": rates.changes,
        }
        if cut is not None and self.replica.count > 1:
            from pyps_client.torch.replica_steps import ReplicaSteps

            common |= {"replica": self.replica, "cut": cut, "takes_local_steps": rates.takes_local_steps}
            steps: Steps = ReplicaSteps(session, joined.layout, **common)
        elif cut is not None and self.settings.overlap == "backward":
            raise InvalidArgument(
                "overlap is 'backward', but this run's model is cut in parts: use overlap='step' or 'off'."
            )
        else:
            buffers = None
            if joined.layout.kinds is not None:
                overlaps = self.settings.overlap == "step"
                buffers = SharedBuffers(
                    *(self.module, joined.layout, self.settings.buffers), is_first=self.is_first, overlaps=overlaps
                )
            common |= {"buffers": buffers, "read_my_writes": self.settings.read_my_writes}
            steps = steps_of(session, joined.layout, **common)
        return steps

    def _layout(self) -> Layout:
        return plan(
            *(self.module, self.param_groups),
            shard_size=self.launch.shard_size,
            with_buffers=self.settings.buffers != "local",
        )

    def _whole(self) -> Joined:
        layout = self._layout()
        # With a group for buffers, where they are shared.
        settings = OptimizerSettings()
        settings.CopyFrom(self.optimizer)
        while len(settings.groups) < layout.model.num_groups:
            settings.groups.add(kind=PAYLOAD_KIND_BUFFER)
        trained = layout.parameters[: layout.first_buffer]
        session = self._connected(layout, layout.model, settings)
        return Joined(session, layout, partial(map, _gradient, trained))

    def _take_one_name(self) -> None:
        """Take over the leader's name and place where nobody chose one, as under torchrun."""
        own = self.launch
        name, index, count = led(self.replica, lambda: (own.worker_id, own.worker_index, own.worker_count))
        if not own.named:
            self.launch = own.with_(worker_id=name, worker_index=index, worker_count=count)

    def _as_a_replica(self) -> Joined:
        """Initialize the run, or take over its cut; again where another worker initialized it meanwhile."""
        self.replica.name = self.launch.worker_id
        agreed(self.replica, self._check_common)
        before = led(self.replica, self._run)
        try:
            return self._cut(before)
        except ModelMismatch as mismatch:
            run = led(self.replica, self._run)
            if run is None or run == before:
                raise mismatch from None
        return self._cut(run)

    def _cut(self, run: Model | None) -> Joined:
        # Imported here: DTensors take a second to load, which workers of whole models need not spend.
        from pyps_client.replica.arrangement import arrange
        from pyps_client.replica.dtensor import ModelCut, claims_of

        replica = self.replica
        groups = agreed(replica, lambda: named_groups(self.module, self.param_groups))
        claimed = claims_of(groups, replica)
        claims = replica.all_gather(claimed.claims)
        cut = ModelCut(arrange(claims, replica.index, run=run, shard_size=self.launch.shard_size), claimed)
        layout, model = cut.layout(), cut.arrangement.model
        parts = cut.arrangement.parts if model.num_parts > 1 else ()
        session = self._connected(layout, model, cut.settings(self.optimizer), parts=parts, peers=replica)
        return Joined(session, layout, cut.gradients, cut)

    def _run(self) -> Model | None:
        found = model_of_run(self.launch)
        return None if found is None else found[0]

    def _connected(self, layout: Layout, model: Model, settings: OptimizerSettings, **part: Any) -> Worker:
        initial = partial(initial_values, layout)
        session = Worker(model, settings, launch=self.launch, initial=initial, device=layout.devices, **part)
        session.connect()
        return session

    def _check_common(self) -> None:
        groups = [dict(sorted(group.hyperparameters.items())) for group in self.optimizer.groups]
        common = {
            "The optimizer's rule": self.optimizer.rule,
            **{f"The optimizer's group {index}": group for index, group in enumerate(groups)},
            "push_every": self.settings.push_every,
            "pull_every": self.settings.pull_every,
            "overlap": self.settings.overlap,
            "compat": self.settings.compat,
            "local_learning_rate": self.settings.local_learning_rate,
            "gradient_codec": self.launch.gradient_codec,
            "parameter_codec": self.launch.parameter_codec,
            "shard_size": self.launch.shard_size,
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


def check_examples(count: object) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, Integral) or count < 0):
        raise InvalidArgument(
            f"The number of examples in a minibatch is {count!r}; expected a whole number, 0 or more."
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
        """Refuse a model whose trained parameters were replaced; at first also one in DistributedDataParallel."""
        if is_first:
            unwrapped(self._module, self._replica)
        # A walk through the modules takes longer than a step of a small model.
        for table, name, held in self._places:
            if table.get(name) is not held:
                break
        else:
            return
        # A forward pass without a backward one leaves whole parameters in fully_shard's modules: the next would read
        # these and not the pulled ones.
        kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for part in self._module.modules():
            if isinstance(part, kind):
                part.reshard()
        now = {id(parameter) for parameter in self._module.parameters()}
        known = {id(parameter): plain_name(name) for name, parameter in self._known.items()}
        lost = [name for key, name in known.items() if key in self._trained - now]
        # A part may be removed, if nothing takes its place.
        if lost and now - known.keys():
            raise InvalidArgument(
                f"Parameters ({several(lost)}) are no longer the model's: others were put in their place after "
                "RemoteOptimizer was made, by load_state_dict(..., assign=True) or a new layer, and no step would "
                "train them. Change the model, and load it so, before the torch optimizer is made."
            )
        self._places = _places_in(self._module)


def _places_in(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return each module's table, name and value of its parameters and parts; torch.jit has no such tables."""
    tables = (table for part in module.modules() for table in (part._parameters, part._modules))
    return [(table, name, held) for table in tables if isinstance(table, dict) for name, held in table.items()]


def unwrapped(model: torch.nn.Module, replica: Group) -> torch.nn.Module:
    """Return the model without torch's wrapper for several processes, which must be one worker.

    Refuses wrappers that average gradients among workers, each of which would push the average, or that hide slices.
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
            # All hold these alike, with the same gradients.
            alike = set(map(id, part.parameters()))
            replica.replicated |= {plain_name(name) for name, tensor in inner.named_parameters() if id(tensor) in alike}
    whole: torch.nn.Module = inner
    return whole


def _averagers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return each DistributedDataParallel over parameters of a module: trainers may pass on the wrapped part."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return []
    # torch keeps no list of them.
    kind = torch.nn.parallel.DistributedDataParallel
    own = set(map(id, module.parameters()))
    around_any = (found for found in gc.get_objects() if issubclass(type(found), kind))
    return [found for found in around_any if not own.isdisjoint(map(id, found.parameters()))]
