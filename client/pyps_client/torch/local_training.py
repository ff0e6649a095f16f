"""Local training: a torch optimizer trains on the worker, and every so many steps the servers take what it changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from pyps_client.data import place
from pyps_client.data.portions import Stepper
from pyps_client.fork import ForkGuard
from pyps_client.launch import Launch
from pyps_client.pull import LeaseCall
from pyps_client.replica.group import ALONE
from pyps_client.torch.embedding import require_no_tables
from pyps_client.torch.joining import OwnModel, unwrapped
from pyps_client.torch.layout import plan, shareable_buffers
from pyps_client.torch.remote_optimizer import OfRun, RemoteOptimizer, _uncompiled
from pyps_client.torch.rules import TRANSLATIONS, ServersRule
from pyps_client.torch.schedule import Due
from pyps_client.torch.steps import Steps
from pyps_client.transport.threads import Future, Threads
from pyps_wire.common_pb2 import OUTCOME_APPLIED, Receipt
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import LeaseReply

T = TypeVar("T")

# With sync_every="auto": the steps of the slowest worker's rounds, and how many times as many another worker may take.
AUTO_STEPS = 16
FASTER_MAX = 16

# Outer rules by name: the servers' rule, and settings that fit deltas (Douillard et al. 2023, "DiLoCo", section 3.1).
_NESTEROV = {"learning_rate": 0.7, "momentum": 0.9}
OUTER: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "average": ("sgd", {"learning_rate": 1.0}),
    "nesterov": ("nesterov", _NESTEROV),
    # Each delta is computed ahead of the next momentum step, as Nesterov's gradient is; without it, losses were higher.
    "delayed_nesterov": ("delayed_nesterov", {**_NESTEROV, "lookahead": 1.0}),
}

# heavy_ball has no counterpart in torch.
_OUTER_RULES = {*OUTER, "heavy_ball", *(translation.rule for translation in TRANSLATIONS)}

# A state dict's key for the position in the round, and for what the exchanges keep.
_ROUND = "pyps_round"


def _of_remote(name: str) -> Any:
    """Return a property or method of the RemoteOptimizer that makes the exchanges; reading it joins the run."""

    def read(optimizer: LocalTraining) -> Any:
        optimizer.join()
        return getattr(optimizer._remote, name)

    return property(read, doc=getattr(RemoteOptimizer, name).__doc__)


class LocalTraining(OfRun):
    """A torch optimizer that trains on the worker, and joins what all workers trained every `sync_every` steps.

        optimizer = LocalTraining(model, torch.optim.AdamW(model.parameters(), lr=0.001), sync_every=32)

    A round is `sync_every` steps of the wrapped, the inner, optimizer, whose state stays with the worker. Then the
    worker pushes its delta, the parameters with which the round began minus the present ones, as one gradient, and
    pulls. The servers apply the delta by their own rule, the outer one: SGD at rate 1 under `hardsync` averages the
    workers' models (Stich 2019, "Local SGD converges fast and communicates little"), Nesterov's momentum is DiLoCo.
    Schedulers, GradScaler, clipping and hooks act on the inner optimizer, through this object or directly.

    The worker joins as a RemoteOptimizer does. If it dies, its steps since the last push are lost; a worker that comes
    back begins with the servers' parameters. The properties of the run and the errors are RemoteOptimizer's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        servers: str | Sequence[str] | None = None,
        *,
        sync_every: int | str = 32,
        outer: str = "",
        overlap: str = "off",
        launch: Launch | None = None,
        buffers: str = "local",
    ) -> None:
        """Check model, optimizer and settings; the servers are called when the worker joins.

        `sync_every`: steps in a round, or "auto": 16 in the slowest worker's rounds and, where workers wait for each
        other (hardsync), up to 16 times as many in those of faster ones, in proportion to their speed.
        `outer`: the rule by which servers apply deltas: "average" (sgd at rate 1), "nesterov" (rate 0.7, momentum 0.9),
        "delayed_nesterov:n=2" (the same, and lookahead=1), or any rule of the servers with its settings. If it is
        left out, the rule is that of `pyps serve --optimizer` or of the run, or else "average".
        `overlap`: "off" waits for each exchange; "step" makes it beside the next steps, and moves the model by what the
        servers changed when that has come.
        `servers`, `launch`, `buffers`: as for RemoteOptimizer. `launch` has the codecs of deltas and parameters.

        Raises a ConfigurationError for a model, an optimizer or a setting that no run can have.
        """
        module = unwrapped(model, ALONE)
        require_no_tables(module, user="LocalTraining")
        _check_inner(optimizer)
        if sync_every != "auto" and (not isinstance(sync_every, int) or isinstance(sync_every, bool) or sync_every < 1):
            raise InvalidArgument(f"sync_every is {sync_every!r}; expected a number of steps, 1 or more, or 'auto'.")
        if overlap not in ("off", "step"):
            raise InvalidArgument(f"overlap is {overlap!r}; expected 'off' or 'step'.")
        launch = Launch.of(servers, launch)
        launch.require_one_process("LocalTraining")
        # Refuses parameters that no server can hold, by their own names and addresses.
        plan(module, optimizer.param_groups)
        self._inner = optimizer
        self._model = module
        self._own_model = OwnModel(module, optimizer.param_groups, ALONE)
        self._make = partial(_make_remote, module, optimizer, launch, _outer_of(outer), buffers)
        self._rounds = Rounds(Pace(sync_every), overlaps=overlap == "step")
        # Made again when it joins, with the values, types and places that the model has then.
        self._remote, _ = self._make()
        self._ending = self._remote._ending
        self._guard = ForkGuard()
        # Not __init__, which would set groups and state: both are the inner optimizer's.
        super().__setstate__({"defaults": optimizer.defaults})
        self._join_before_forward(module)
        place.add(self)

    def join(self) -> None:
        """Join the run now, wait for its servers, and bring its parameters into the model; once joined, do nothing."""
        if self._is_joined:
            return
        self._check_open()
        self._own_model.check(True)
        remote, twins = self._make()
        if self._remote._loaded:
            remote.load_state_dict(self._remote._loaded)
        remote.join()
        self._remote, self._ending = remote, remote._ending
        self._rounds.begin(remote.stepper, twins)
        self._ending.before = self._rounds.leave
        self._is_joined = True
        for hook in self._forward_hooks:
            hook.remove()

    @_uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the inner optimizer; at the end of a round push the delta and pull, as RemoteOptimizer does.

        Raises what RemoteOptimizer.step raises; the model has the servers' parameters then, and the round is lost.
        """
        self.join()
        self._check_open()
        rounds = self._rounds
        if rounds.finished:
            rounds.finish()
            rounds.tell_over()
            return None
        self._own_model.check(rounds.steps == 0)
        loss = self._inner.step(closure) if closure is not None else self._inner.step()
        rounds.data_position = place.after_step(self)
        rounds.stepped()
        return loss

    def sync(self) -> None:
        """End the round now: push its delta, if there is one, pull, and wait for both. For the end of an epoch."""
        self.join()
        self._rounds.flush()

    @_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as for every torch optimizer."""
        if not (self._ending.begun.locked() or self._guard.in_child):
            self.join()
        self._inner.zero_grad(set_to_none)

    # The inner optimizer's own: a scheduler or a state dict of either acts on both.
    param_groups: list[dict[str, Any]] = property(  # type: ignore[assignment]
        lambda self: self._inner.param_groups, lambda self, groups: setattr(self._inner, "param_groups", groups)
    )
    state: Any = property(lambda self: self._inner.state, lambda self, state: setattr(self._inner, "state", state))

    finished: bool = _of_remote("finished")
    global_step: int = _of_remote("global_step")
    run_examples: int = _of_remote("run_examples")
    batch_size: int = _of_remote("batch_size")
    run_id: str = _of_remote("run_id")
    transport: str = _of_remote("transport")
    num_workers: int = _of_remote("num_workers")
    restored_position: bytes = _of_remote("restored_position")
    receipts: Sequence[Receipt] = _of_remote("receipts")
    skipped: int = _of_remote("skipped")
    until_finished: Callable[[Iterable[T]], Iterator[T]] = _of_remote("until_finished")
    report: Callable[..., None] = _of_remote("report")
    snapshot: Callable[[], dict[str, torch.Tensor]] = _of_remote("snapshot")

    @property
    def steps(self) -> int:
        """Steps of this worker's inner optimizer so far."""
        return self._rounds.steps

    @property
    def sync_every(self) -> int:
        """Steps in a round now."""
        return self._rounds.pace.steps

    @property
    def examples_in_batch(self) -> int | None:
        """Examples in each minibatch from now on, which schedules and weights count; None: unknown."""
        return self._rounds.examples_in_batch

    @examples_in_batch.setter
    def examples_in_batch(self, count: int | None) -> None:
        # Which checks the number.
        self._remote.examples_in_batch = count
        self._rounds.examples_in_batch = count

    @property
    def stepper(self) -> Rounds:
        """The worker's rounds, for `pyps_client.data.Portions`."""
        self.join()
        return self._rounds

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Push the delta so far, unless the cause is "failed", and leave the run. A second call does nothing.

        Without a call this happens when the optimizer is freed, or the program ends.
        """
        place.discard(self)
        self._remote.close(cause, message)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, the position in the round, and what the exchanges keep."""
        self._remote._warned_of_state = True
        if self._rounds._exchange is not None:
            # It changes what encodings left out.
            self._rounds._exchange.wait()
        # None are left where an exchange failed: the next step ends that round.
        round_ = {"steps_left": max(1, self._rounds.steps_left), "sync_every": self._rounds.pace.steps}
        return self._inner.state_dict() | {_ROUND: {**round_, "remote": self._remote.state_dict()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or a state dict of the inner optimizer alone.

        The model's parameters are the servers' from joining on: the first round is shorter, as that of the state dict.
        `sync_every` stays as it is. Raises InvalidArgument for a malformed position in the round.
        """
        own = dict(state_dict)
        round_ = own.pop(_ROUND, None)
        if round_ is not None:
            _check_round(round_)
        self._inner.load_state_dict(own)
        if round_ is not None:
            self._rounds.steps_left = min(round_["steps_left"], self._rounds.pace.steps)
            self._remote.load_state_dict(round_["remote"])


class Pace:
    """How many steps a round has. With "auto" it is in proportion to the worker's speed, so that nobody waits long.

    A worker that waited for others takes half of the steps for which it waited more in its next round. The worker that
    came last takes fewer, down to AUTO_STEPS. Where nobody waits (async) all rounds have AUTO_STEPS.
    """

    def __init__(self, sync_every: int | str) -> None:
        self._adapts = sync_every == "auto"
        self.steps = sync_every if isinstance(sync_every, int) else AUTO_STEPS
        # How long an exchange took that waited for no other worker; 0 until there was one.
        self._alone_seconds = 0.0

    def note(self, *, step_seconds: float, exchange_seconds: float, came_last: bool) -> None:
        """Note a whole round: the mean time of its steps, how long its exchange took, and whether others waited."""
        if not self._adapts:
            return
        if came_last:
            self._alone_seconds = exchange_seconds
            self.steps = max(AUTO_STEPS, self.steps - max(1, self.steps // AUTO_STEPS))
        else:
            self._alone_seconds = min(self._alone_seconds, exchange_seconds)
            waited = (exchange_seconds - self._alone_seconds) / max(step_seconds, 1e-9)
            self.steps = min(FASTER_MAX * AUTO_STEPS, self.steps + math.floor(waited / 2))


class Shadow(torch.nn.Module):
    """A module with the names of another's and tensors of its own: what servers hold of that model. It never runs."""

    def __init__(
        self,
        module: torch.nn.Module,
        twins: dict[torch.Tensor, Any],
        made: dict[torch.nn.Module, torch.nn.Module],
    ) -> None:
        """`twins`: the tensors to take in place of the module's; others are shared with it."""
        super().__init__()
        made[module] = self
        # The name of the class, under which workers compare their models.
        self.original_name = getattr(module, "original_name", type(module).__name__)
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        for own, theirs in ((self._parameters, module._parameters), (self._buffers, module._buffers)):
            own.update({name: None if each is None else twins.get(each, each) for name, each in theirs.items()})
        for name, part in module._modules.items():
            self._modules[name] = part and (made.get(part) or Shadow(part, twins, made))


class Rounds(Stepper):
    """One worker's rounds. A round's delta, held minus present, is pushed as a gradient by the steps of a Shadow.

    "Held" are the servers' parameters as last pulled, in the Shadow; "present" are the model's. Where rounds overlap,
    the exchange goes on beside the next steps: when the new parameters come, the model moves by their distance from
    what was sent, so that its delta since stays as it is. The model changes inside the methods only.
    """

    # Steps of the worker's optimizer, and those whose push is answered, refused or left out.
    steps = 0
    steps_answered = 0

    def __init__(self, pace: Pace, *, overlaps: bool) -> None:
        self.pace = pace
        self.examples_in_batch: int | None = None
        # Steps to the end of the round.
        self.steps_left = pace.steps
        # Where the data stands after the newest step.
        self.data_position = b""
        # Steps and examples of the delta.
        self._taken = self._examples = 0
        self._threads = Threads() if overlaps else None
        self._exchange: Future[None] | None = None
        # The present values of the exchange under way, and the worker's steps when it began.
        self._sent: list[torch.Tensor] = []
        self._sent_steps = 0
        self._began = 0.0

    def begin(self, steps: Steps, twins: dict[torch.Tensor, torch.Tensor]) -> None:
        """Begin with the servers' parameters. `twins`: the Shadow's tensors by the model's."""
        self._steps, self.session = steps, steps.session
        present = {twin: tensor for tensor, twin in twins.items()}
        self._held = list(steps.layout.parameters)
        self._present = [present[twin] for twin in self._held]
        self._take()
        self._began = time.monotonic()

    @property
    def finished(self) -> bool:
        return self._steps.finished

    def stepped(self) -> None:
        """Count a step that the worker's optimizer has taken, and end the round where it is due."""
        self.steps += 1
        self._taken += 1
        self._examples += self.examples_in_batch or 0
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.sync()
        elif self._exchange is not None and self._exchange.done():
            self.wait()

    def sync(self) -> None:
        """End the round now: push its delta, if there is one, and pull."""
        is_whole = self.steps_left <= 0
        began = time.monotonic()
        step_seconds = (began - self._began) / max(1, self._taken)
        self.wait()
        self.steps_left = self.pace.steps
        if self._taken:
            self._sent_steps = self.steps
            delta = self._delta()
            if self._threads is not None:
                self._sent = [tensor.detach().clone() for tensor in self._present]
                self._exchange = Future(partial(self._steps.step, delta))
                self._threads.start(self._exchange)
            else:
                try:
                    self._steps.step(delta)
                finally:
                    self._take()
        self._began = time.monotonic()
        if is_whole:
            came_last = all(receipt.outcome == OUTCOME_APPLIED for receipt in self._steps.receipts)
            self.pace.note(step_seconds=step_seconds, exchange_seconds=self._began - began, came_last=came_last)
            self.steps_left = self.pace.steps

    def wait(self) -> None:
        """Take over the exchange that is under way, if any; raise its error."""
        if (exchange := self._exchange) is not None:
            # Ctrl-C may interrupt the wait, and the exchange goes on.
            exchange.wait()
            self._exchange = None
            try:
                exchange.value()
            finally:
                self._take()

    def leave(self, delivers: bool) -> None:
        """End, and leave the delta to the worker's last push, if there is one."""
        try:
            if delivers:
                self.wait()
                if self._taken and not self.finished:
                    self._steps.gather(self._delta(), Due(push=True, pull=True, ends_portion=False))
        finally:
            if self._threads is not None:
                self._threads.close()

    def tell_examples(self, count: int) -> None:
        self.examples_in_batch = count

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        return ask(None)

    def flush(self) -> None:
        self.sync()
        self.wait()

    def idle(self) -> None:
        self.flush()
        self._steps.idle()
        self._take()

    def finish(self) -> None:
        if not self._steps.settled:
            self.wait()
            self._taken = self._examples = 0
            self._steps.finish()
            self._take()

    def tell_over(self) -> None:
        self._steps.tell_over()

    @torch.no_grad()
    def _delta(self) -> Sequence[torch.Tensor]:
        """Return held minus present by parameter, and bring the model's shared buffers into the shadow."""
        steps, first_buffer = self._steps, self._steps.layout.first_buffer
        steps.local_steps, steps.examples_in_batch = self._taken, self._examples or None
        steps.data_position = self.data_position
        self._taken = self._examples = 0
        if buffers := self._held[first_buffer:]:
            torch._foreach_copy_(buffers, self._present[first_buffer:])
        return torch._foreach_sub(self._held[:first_buffer], self._present[:first_buffer])

    @torch.no_grad()
    def _take(self) -> None:
        """Bring the servers' parameters, as last pulled, into the model."""
        sent, self._sent = self._sent, []
        self.steps_answered = self._sent_steps
        if sent and not self._steps.settled:
            torch._foreach_add_(self._present, torch._foreach_sub(self._held, sent))
            for present, held in zip(self._present, self._held, strict=True):
                # The delta with such a number was left out, and no sum would ever make it finite.
                if present.is_floating_point():
                    torch.where(present.isfinite(), present, held, out=present)
        else:
            torch._foreach_copy_(self._present, self._held)


def _check_round(saved: Any) -> None:
    """Raise InvalidArgument unless `saved` is what `state_dict` keeps under `pyps_round`."""
    if isinstance(saved, Mapping):
        steps, left, remote = saved.get("sync_every"), saved.get("steps_left"), saved.get("remote")
        if isinstance(steps, int) and isinstance(left, int) and 1 <= left <= steps and "param_groups" in (remote or ()):
            return
        saved = {name: "a state dict" if isinstance(each, Mapping) else each for name, each in saved.items()}
    raise InvalidArgument(
        f"The state dict's {_ROUND} is {saved!r}; expected sync_every, the steps of a round, steps_left, 1 to that "
        "number, and remote, a state dict with param_groups: load what LocalTraining.state_dict() returned."
    )


def _check_inner(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, OfRun):
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}; expected a torch optimizer that trains on this worker, such "
            "as torch.optim.AdamW(model.parameters()): LocalTraining calls the servers itself."
        )


def _outer_of(text: str) -> tuple[str, Mapping[str, float]]:
    """Return the servers' rule and its settings for the text of `outer`; the servers check the settings."""
    # No rule, but a rate: servers that have no rule of their own take sgd at this rate.
    if not text:
        return "", OUTER["average"][1]
    name, _, rest = text.partition(":")
    rule, settings = OUTER.get(name, (name, {}))
    pairs = [item.partition("=") for item in rest.split(",") if item]
    try:
        if name not in _OUTER_RULES:
            raise ValueError
        given = {setting.strip(): float(number) for setting, _, number in pairs}
    except ValueError:
        raise InvalidArgument(
            f"outer is {text!r}; expected one of {', '.join(sorted(_OUTER_RULES))}, with settings such as "
            "nesterov:learning_rate=0.7,momentum=0.9."
        ) from None
    return rule, {**settings, **given}


def _make_remote(
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    launch: Launch,
    outer: tuple[str, Mapping[str, float]],
    buffers: str,
) -> tuple[RemoteOptimizer, dict[torch.Tensor, torch.Tensor]]:
    """Return a RemoteOptimizer of a shadow of the model, and the shadow's tensors by the model's."""
    trained = {parameter for group in inner.param_groups for parameter in group["params"]}
    twins: dict[torch.Tensor, torch.Tensor] = {
        tensor: torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad) for tensor in trained
    }
    if buffers != "local":
        twins |= {buffer: buffer.detach().clone() for buffer in shareable_buffers(module).values()}
    groups = [{"params": [twins[tensor] for tensor in group["params"]]} for group in inner.param_groups]
    # A round is a push and a pull, whatever number of minibatches the protocol sums.
    remote = RemoteOptimizer(
        Shadow(module, twins, {}),
        ServersRule(groups, *outer),
        launch=launch,
        push_every=1,
        pull_every=1,
        buffers=buffers,
        owns_schedule=False,
    )
    # Its own join alone would begin no round.
    place.discard(remote)
    return remote, twins
