"""A torch optimizer whose update rule runs on parameter servers, shared by all workers of a run."""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from pyps_client import fork, leave
from pyps_client.data import place
from pyps_client.data.samplers import check_whole
from pyps_client.fork import ForkGuard
from pyps_client.launch import LOCAL, Launch
from pyps_client.log import logger
from pyps_client.replica.group import ALONE, Group, agreed
from pyps_client.torch.embedding import gather
from pyps_client.torch.joining import Joining, OwnModel, unwrapped
from pyps_client.torch.layout import warn_of_float64, warn_of_unshared, whole_state
from pyps_client.torch.schedule import Settings
from pyps_client.torch.steps import Steps
from pyps_client.worker import ONE_THREAD
from pyps_wire.allocator import give_back_free_memory
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import InvalidArgument, SettingsChanged

if TYPE_CHECKING:
    from pyps_client.replica.processes import Replica

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def _uncompiled(function: Function) -> Function:
    """Keep torch.compile out of a function, which it could not trace."""
    plain: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return plain


def _of_steps(name: str, doc: str, *before: object) -> Any:
    """Return a property of the worker's Steps. Reading it joins the run, unless `before` gives its value until then."""

    def read(optimizer: RemoteOptimizer) -> Any:
        if before and not optimizer._is_joined:
            return before[0]
        optimizer.join()
        return attrgetter(name)(optimizer._steps)

    return property(read, doc=doc)


class _OnServers(defaultdict[torch.Tensor, Any]):
    """The empty state of an optimizer whose slots are on servers.

    It is true, or torch.distributed.checkpoint would fill it by a step, of all workers, at a rate of 0.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def __bool__(self) -> bool:
        return True


class OfRun(torch.optim.Optimizer, ABC):
    """An optimizer whose worker joins a run; RemoteOptimizer and LocalTraining are subclasses."""

    _guard: ForkGuard
    _ending: Ending
    _forward_hooks: Sequence[RemovableHandle] = ()
    _is_joined = False
    # Where the script's data stands after the next step, up to 64 KiB in its own words, for `restored_position` of
    # whoever takes this worker's place; None: where its samplers (`worker_sampler`) stand.
    data_position: bytes | None = None

    @abstractmethod
    def close(self, cause: str = "finished", message: str = "") -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(*leave.cause_of(error))

    def __getstate__(self) -> dict[str, Any]:
        """Raise InvalidArgument: no copy, deepcopy or pickle of a connection."""
        raise InvalidArgument(
            f"A {type(self).__name__} is a connection to its servers, of which no copy can be made or saved: make "
            "another one (with worker_id= of its own), save optimizer.state_dict(), or copy the model alone."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise SettingsChanged: all workers of a run agree on its parameters before the first step."""
        if hasattr(self, "_ending"):
            raise SettingsChanged(
                f"A parameter group cannot be added to a {type(self).__name__}: the run's parameters are agreed upon "
                "when it starts. Give the torch optimizer all groups before."
            )
        super().add_param_group(param_group)

    def _check_open(self) -> None:
        self._guard.check()
        if self._ending.begun.locked():
            raise InvalidArgument(f"This {type(self).__name__} was closed: make a new one to go on training.")

    def _join_before_forward(self, module: torch.nn.Module) -> None:
        """Let the first forward pass join, of each module: a script may call a part of the model."""
        parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._forward_hooks = [part.register_forward_pre_hook(_JoinFirst(self)) for part in parts]
        self._ending.hooks += self._forward_hooks


class RemoteOptimizer(OfRun):
    """A torch optimizer whose update rule runs on parameter servers: `zero_grad`, `backward` and `step` as ever.

    Make it from a model and a fresh torch optimizer over its parameters; the servers take over rule and settings:

        optimizer = RemoteOptimizer(model, torch.optim.Adam(model.parameters(), lr=0.001), servers="host:7610")

    The worker joins the run at its first `zero_grad`, forward pass or `step`, or where a property of the run is read;
    `join` does so at once. Until then the model may be loaded or initialized: worker 0's parameters, or the first
    worker's where there are no numbers, become those of a new run. Then the model has the run's parameters, and only
    `step` may change them: the first step refuses parameters that were written since, and later writes are overwritten,
    with a warning.

    On the worker that owns the schedule, torch's schedulers or the script may change learning rate and momentum (Adam's
    betas[0]); no other setting may change. Parameters that are not the optimizer's stay each worker's own.

    Errors are PypsErrors: after a ConfigurationError (a ValueError too) change the program or its settings; after a
    ConnectionFailed see to the servers; after a RunEnded leave the loop.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        servers: str | Sequence[str] | None = None,
        *,
        launch: Launch | None = None,
        overlap: str = "off",
        replica: Replica | None = None,
        push_every: int | None = None,
        pull_every: int | None = None,
        local_learning_rate: float | None = None,
        compat: str | None = None,
        buffers: str = "local",
        owns_schedule: bool | None = None,
        rescales_gradients: bool | None = None,
    ) -> None:
        """Check model, optimizer and settings; the servers are called when the worker joins.

        `servers`: "host:port", several with commas between, or "local" for a server that it starts; PYPS_SERVERS by
        default. `launch`: a Launch, with the servers and everything else about the connection, instead of `servers`.
        `overlap`: "off" waits for each push and pull. "step" makes them in parallel to the computation, which costs
        about one version of staleness; minibatches that end meanwhile are summed in the next push. "backward" sends a
        shard as soon as the backward pass has its gradients, and `step` waits for the rest: the result is that of
        "off". Where several backward passes precede a step, the last one sends. It refuses a rate that changes between
        backward and `step`. Where the protocol or the transport does not allow overlap, the worker waits, and logs why.
        `replica`: the processes that hold one model together (model parallelism). All of them make a RemoteOptimizer,
        and take the same steps.
        `push_every`, `pull_every`: minibatches in a push, and from pull to pull; by default what the protocol wants
        (asgd:accumulate=), or else 1.
        `local_learning_rate`: the size of the worker's own steps between pulls; by default the servers' present rate
        under plain SGD, and no local steps under other rules.
        `compat`: "paper" for the literal timing of Dean et al. 2012, appendix.
        `buffers`: batch norm's statistics and the like stay with each worker ("local"), are averaged over the workers
        ("average"), or are those of the first worker ("first"); the same for all workers.
        `owns_schedule`: True where this worker's changes of learning rate and momentum apply to the run. By default
        worker 0's do, or those of a worker without an index; until it has pushed, each worker's scheduler does.
        `rescales_gradients`: with overlap="backward", whether gradients are clipped, unscaled or summed before `step`.
        True: servers hold what they get until then. False: each shard is applied, and answered, when it arrives, and
        changed gradients or a second backward pass are refused. By default the first three steps show it; gradients
        that are changed are then sent early in rounds (hardsync), and in `step` elsewhere, where it takes no longer.

        Raises a ConfigurationError for a model, an optimizer or a setting that no run can have.
        """
        leave.install_where_asked()
        if replica is not None and not isinstance(replica, Group):
            raise InvalidArgument(f"replica is {replica!r}; expected a pyps_client.torch.Replica.")
        peers = replica or ALONE

        def checked() -> Joining:
            whole = unwrapped(model, peers)
            settings = Settings(
                overlap=overlap,
                push_every=push_every,
                pull_every=pull_every,
                local_learning_rate=local_learning_rate,
                compat=compat,
                buffers=buffers,
                owns_schedule=owns_schedule,
                rescales_gradients=rescales_gradients,
            )
            joining = Joining(whole, optimizer, Launch.of(servers, launch), settings, peers)
            _require_first(joining.launch, optimizer)
            return joining

        # All processes of a replica raise the same error.
        joining = agreed(peers, checked)
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._joining = joining
        self.state = _OnServers()
        # The same groups: a scheduler of the torch optimizer moves them too.
        self.param_groups = optimizer.param_groups
        self._wrapped = optimizer
        self._model = joining.module
        self._own_model = OwnModel(self._model, self.param_groups, peers)
        self._warned_of_state = False
        # True where joining replaced the model's own parameters.
        self._replaced = False
        self._examples_in_batch: int | None = None
        # A state dict that was loaded before the worker joined.
        self._loaded: Mapping[str, Any] = {}
        # The thread that takes a step now, or 0.
        self._stepping = 0
        self._guard = ForkGuard()
        self._ending = Ending()
        self._ending.hooks.append(optimizer.register_step_pre_hook(partial(_refuse_step, self._guard)))
        if peers is ALONE:
            place.add(self)
            # Not in a replica: a process may wait for another's output before its own forward pass.
            self._join_before_forward(self._model)

    def join(self) -> None:
        """Join the run now, wait for its servers, and bring its parameters into the model; once joined, do nothing.

        Raises a ConfigurationError for a model or settings that differ from the run's, and ServerUnavailable or
        WaitTimedOut where the run could not be joined in time; another call tries again.
        """
        if self._is_joined:
            return
        self._check_open()
        joining = self._joining
        _require_first(joining.launch, self._wrapped)
        self._own_model.check(True)
        joining.join()
        session, layout = joining.session, joining.layout
        try:
            # The servers hold the optimizer's state: this makes room for the worker's vectors.
            self._wrapped.state.clear()
            give_back_free_memory()
            self._steps = steps = joining.steps()
            steps.examples_in_batch = self._examples_in_batch
            # Weakly: `leave` holds the steps, and the model may hold the optimizer.
            steps.check_before = weakref.WeakMethod(self._check)
            before = _first_values(layout.parameters)
            steps.start()
            replaced = float(before != _first_values(layout.parameters))
            self._replaced = joining.replica.all_reduce([replaced])[0] > 0
        except BaseException as error:
            session.close(*leave.cause_of(error))
            raise
        # The session must not close by itself: gathered gradients are pushed before.
        leave.forget(session)
        self._ending.steps = steps
        leave.expect(self._ending, of=self)
        _made[self] = (session.launch.servers, session.launch.worker_id)
        self._is_joined = True
        if joining.replica is not ALONE:
            place.add(self)
        for hook in self._forward_hooks:
            hook.remove()
        warn_of_unshared(self._model, layout)
        warn_of_float64(layout)
        self._take_loaded()
        # The parameters' old memory, where they lie in the worker's vectors now.
        give_back_free_memory()

    @_uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this minibatch's gradients and pull newer parameters into the model, as scheduled.

        A `closure` computes the loss, as for every torch optimizer; its value is reported to the servers and returned.
        After the run's end a step only warns, once: see `finished` and `until_finished`. A gradient with NaN or
        infinity is left out with a warning.

        Raises NotFinite after ten such gradients in a row, ServerUnavailable and WaitTimedOut where a wait for servers
        or workers ended, a RunEnded where another process took this worker's place, and a ConfigurationError for a
        model or settings that were changed.
        """
        if (
            getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        ):
            return _watched_step(self, closure)
        return self._step(closure)

    # Otherwise torch makes every step a range of its profiler, which adds a third to a step of a small model.
    step.hooked = True  # type: ignore[attr-defined]
    # Nor need a scheduler wrap it: `_step` sets what the wrapper would.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as for every torch optimizer.

        With `set_to_none=False`, on the CPU and where each minibatch is pushed by itself, the next gradients are
        computed in the memory that is pushed from, which saves a copy: clone gradients to keep them. With
        overlap="backward" it ends a backward pass that an error broke off, or that no `step` followed, and raises an
        error of its push. Nothing of it counts; without `rescales_gradients` shards that were sent do, with a warning.
        """
        if not (self._ending.begun.locked() or self._guard.in_child):
            if not self._is_joined:
                self.join()
            self._steps.before_clearing(in_place=not set_to_none)
        for table in self._joining.tables:
            table.clear_gradients()
        super().zero_grad(set_to_none)

    def until_finished(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches up to the run's end: `for x, y in optimizer.until_finished(loader)`."""
        if not self.finished:
            yield from itertools.takewhile(lambda _: not self.finished, batches)

    finished: bool = _of_steps("finished", "True when the run is over: leave the loop.")
    global_step: int = _of_steps("session.global_step", "Updates of the whole run: the step to log figures under.")
    run_examples: int = _of_steps(
        "view.state.examples", "Examples behind the run's updates, as far as workers set examples_in_batch."
    )
    batch_size: int = _of_steps(
        "session.terms.batch_size", "Examples in a minibatch by the servers' batch_growth; 0 without it."
    )
    run_id: str = _of_steps("session.run_id", "The run's name.")
    transport: str = _of_steps(
        "session.transport", 'The transport in use: "shm" (shared memory), "tcp", "grpc" or "mixed".'
    )
    num_workers: int = _of_steps("session.num_workers", "Live workers of the run.")
    restored_position: bytes = _of_steps(
        "session.restored_position", 'The newest `data_position` of the worker whose place this one took, or b"".'
    )

    steps: int = _of_steps("steps", "Minibatches of this worker so far.", 0)
    receipts: Sequence[Receipt] = _of_steps("receipts", "The answers to the newest answered push, one per shard.", ())
    skipped: int = _of_steps("finite.skipped", "Gradients of this worker that were left out for NaN or infinity.", 0)

    @property
    def examples_in_batch(self) -> int | None:
        """Examples in each minibatch from now on, which schedules and weights count; None: unknown.

        Set it before backward(): `optimizer.examples_in_batch = len(x)`. `growing_batches` and `Portions` do.
        """
        return self._steps.examples_in_batch if self._is_joined else self._examples_in_batch

    @examples_in_batch.setter
    def examples_in_batch(self, count: int | None) -> None:
        if count is not None:
            check_whole("The number of examples in a minibatch", count)
        self._examples_in_batch = count
        if self._is_joined:
            self._steps.examples_in_batch = count

    @property
    def stepper(self) -> Steps:
        """The worker's steps, for `pyps_client.data.Portions`."""
        self.join()
        return self._steps

    def report(self, **scalars: float) -> None:
        """Send figures of this worker, such as loss=0.3, with its next heartbeat, for `pyps status`."""
        self.join()
        self._steps.session.report(**scalars)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the model's state dict with the servers' present values: float32, on the CPU.

        For evaluation: `twin.load_state_dict(optimizer.snapshot())`. It changes neither the model nor its training.
        Each shard is of one version, and values that servers do not hold are this worker's. In a replica any process
        may call it alone, and gets the whole model.
        """
        self.join()
        return whole_state(self._model, self._steps.layout, self._steps.snapshot())

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Push gathered gradients, unless the cause is "failed", and leave the run. A second call does nothing.

        Without a call this happens when the optimizer is freed, or the program ends.
        """
        place.discard(self)
        self._ending.close(cause, message, separate=True)

    def state_dict(self) -> dict[str, Any]:
        """Return parameter groups, with their learning rates, and the run's update; slots are on the servers.

        Under a gradient codec that loses much of a number, also what this worker's gradients are owed.
        """
        if not self._warned_of_state:
            self._warned_of_state = True
            logger.warning(
                "optimizer.state_dict() holds settings and learning rates only: the run's parameters, and what its "
                "optimizer has gathered, are on the servers. Keep them there with --checkpoint-dir, of `pyps serve` or "
                "`pyps run`, and go on from them with --resume; optimizer.snapshot() is the model alone."
            )
        state = super().state_dict()
        if self._is_joined:
            state[_UPDATE] = self.global_step
            if (residuals := self._steps.residuals()) is not None:
                state[_RESIDUALS] = residuals
            return state
        return state | {name: self._loaded[name] for name in (_UPDATE, _RESIDUALS) if name in self._loaded}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load parameter groups, with their learning rates; slots are on the servers.

        Warns of a state dict of another update than the run's, where the run's parameters replaced this worker's.
        """
        if state_dict.get("state"):
            raise SettingsChanged(
                "The state dict holds a torch optimizer's own state, but this run's slots live on the "
                "servers, where `pyps serve --resume` restores them. Load a state dict that a RemoteOptimizer made, or "
                "the model's alone: slots then begin at zero."
            )
        groups = self.param_groups
        try:
            super().load_state_dict(dict(state_dict))
            loaded = self.param_groups
            self._joining.rates.check(loaded)
        finally:
            # Schedulers of the torch optimizer hold these group objects.
            self.param_groups = groups
            self.state = _OnServers()
        for group, of_file in zip(groups, loaded, strict=True):
            group.clear()
            group.update(of_file)
        self._loaded = state_dict
        if self._is_joined:
            self._take_loaded()

    def _take_loaded(self) -> None:
        """Take over what a loaded state dict says of the run that was joined."""
        loaded, self._loaded = self._loaded, {}
        if (residuals := loaded.get(_RESIDUALS)) is not None:
            self._steps.session.load_residuals(residuals)
        update = loaded.get(_UPDATE)
        if update not in (None, self.global_step) and self._replaced:
            logger.warning(
                "a state dict of update %d was loaded in a run that is at update %d: this worker trains the run's "
                "parameters, not those that it loaded. That is right if the run began with the same checkpoint. Else "
                "load it in every worker of a new run (`pyps reset`), which begins with it then",
                *(update, self.global_step),
            )

    def _check(self, is_first: bool) -> None:
        """Refuse a model or settings that were changed, before anything is sent ahead of a step; note its position."""
        self._joining.rates.check(self.param_groups, follow=True)
        self._own_model.check(is_first)
        if place.newest is not None or self.data_position is not None:
            self._steps.data_position = place.before_step(self)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._guard.generation != fork.generation or self._ending.begun.locked():
            self._check_open()
        joins = not self._is_joined
        if joins:
            self.join()
        self._joining.rates.check(self.param_groups, follow=True)
        # Schedulers of either optimizer read there that a step came before their own.
        self._opt_called = self._wrapped._opt_called = True  # type: ignore[attr-defined]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is not None:
                self.report(loss=float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        if self._steps.settled:
            self._steps.tell_over()
            return loss
        # Threads do not switch between this test and the assignment. A lock might stay locked after Ctrl-C.
        thread = threading.get_ident()
        if self._stepping and self._stepping != thread:
            raise InvalidArgument(ONE_THREAD)
        self._stepping = thread
        try:
            steps = self._steps
            self._own_model.check(steps.steps == 0)
            gradients = list(self._joining.gradients())
            if joins and self._replaced:
                logger.warning(
                    "the worker joined at its first step: that minibatch was computed on the worker's own parameters, "
                    "not the run's, and is left out. Call zero_grad() or join() before the first forward pass."
                )
                gradients = [None] * len(gradients)
            if place.newest is not None or self.data_position is not None:
                steps.data_position = place.after_step(self)
            if (of_run := steps.session.tables) is not None:
                gather(self._joining.tables, of_run, self._joining.finite_rows)
            steps.step(gradients)
        finally:
            self._stepping = 0
        return loss


class Ending:
    """Leaves the run of an optimizer, which may have been freed before."""

    def __init__(self) -> None:
        # Set when the optimizer joins.
        self.steps: Steps | None = None
        self._guard = ForkGuard()
        # Hooks on the torch optimizer and the model.
        self.hooks: list[RemovableHandle] = []
        # Called before the last push; False where no push follows.
        self.before: Callable[[bool], object] = lambda delivers: None
        # Held from the first `close` on.
        self.begun = threading.Lock()

    def close(self, cause: str = "finished", message: str = "", *, separate: bool = False) -> None:
        """As RemoteOptimizer.close; `separate`: the model's parameters leave the memory that servers see."""
        leave.check_cause(cause)
        if self._guard.in_child or not self.begun.acquire(blocking=False):
            return
        leave.forget(self)
        for hook in self.hooks:
            hook.remove()
        if self.steps is None:
            return
        session = self.steps.session
        try:
            if cause == "finished":
                session.hurry()
                self.before(True)
                self.steps.flush()
            else:
                self.before(False)
        except BaseException as error:
            cause, message = leave.cause_of(error)
            raise
        finally:
            try:
                self.steps.close(separate=separate)
            finally:
                session.close(cause, message)


class _JoinFirst:
    """A hook by which an optimizer joins before the model's first forward pass; it does nothing in a model's copy."""

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    @_uncompiled
    def __call__(self, *_: object) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None and not optimizer._guard.in_child:
            optimizer.join()

    def __reduce__(self) -> tuple[type[_JoinFirst], tuple[()]]:
        return _JoinFirst, ()


# A state dict's key for the run's update.
_UPDATE = "pyps_update"
# And for the worker's residuals, with the run's name.
_RESIDUALS = "pyps_residuals"
# Servers and name of each joined worker.
_made: weakref.WeakKeyDictionary[RemoteOptimizer, tuple[tuple[str, ...], str]] = weakref.WeakKeyDictionary()


def _require_first(launch: Launch, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a second open RemoteOptimizer of one worker's name, or of one torch optimizer."""
    worker = (launch.servers, launch.worker_id)
    others = {other: of_other for other, of_other in _made.items() if not other._ending.begun.locked()}
    if any(other._wrapped is optimizer for other in others):
        raise InvalidArgument(
            f"Another RemoteOptimizer was made of this {type(optimizer).__name__} and is open: close() it before, or "
            "give each its own parameters."
        )
    if launch.servers != (LOCAL,) and worker in others.values():
        raise InvalidArgument(
            f"This program has an open RemoteOptimizer on {', '.join(launch.servers)} already, as worker "
            f"{launch.worker_id!r}. To make it again, as where a notebook's cell is run twice, close() the first. "
            "To train two models, start servers for each; to train one model with two optimizers, give one torch "
            "optimizer all parameters, in groups."
        )


def _first_values(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return a number of each parameter, which tells whether the run's parameters replaced the model's own."""
    return [tensor.detach()[(slice(1),) * tensor.dim()].tolist() for tensor in parameters]


def _refuse_step(guard: ForkGuard, optimizer: torch.optim.Optimizer, *_: object) -> None:
    if guard.in_child or not any(group["lr"] for group in optimizer.param_groups):
        # A forked child trains its own copy of the model; torch's checkpoints take a step at rate 0.
        return
    raise InvalidArgument(
        f"This {type(optimizer).__name__} would train this worker's copy of the model alone: a RemoteOptimizer was "
        "made of it, so call step() of that one."
    )


# `_step` with hooks, and as a range of torch's profiler.
_watched_step = torch.optim.Optimizer.profile_hook_step(RemoteOptimizer._step)
