"""The loss as a pass of all workers over the data set, which server 0 hands out in portions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyps.cli.coordination.link import Link
from pyps.cli.coordination.memory import MemoryPlan
from pyps.core.instructions import Instruction, Operation
from pyps.work.machine import Evaluation, Machine
from pyps_client.connection import CALL_SECONDS
from pyps_client.launch import Launch
from pyps_wire import work_pb2 as pb
from pyps_wire.errors import WaitTimedOut

# Server 0 is asked to hold the question for so long; between two the other servers are looked after.
AWAIT_SECONDS = 2.0


@dataclass(frozen=True)
class PassSettings:
    """How a pass is made."""

    memory: MemoryPlan
    # Workers that may compute one portion at once, near the end of a pass.
    copies: int


class RemoteObjective:
    """A `pyps.work.machine.Objective` over the work queue of server 0. Used by one thread."""

    def __init__(
        self,
        link: Link,
        machine: Machine,
        settings: PassSettings,
        *,
        coordinator_epoch: int,
        last_pass: int,
        on_progress: Callable[[pb.WorkProgress], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`last_pass`: the highest that any coordinator began. `on_progress` hears now and then how far a pass is, and
        `say` what people are to do something about.
        """
        self._link = link
        self._machine = machine
        self._settings = settings
        self._coordinator_epoch = coordinator_epoch
        self._pass = last_pass
        self._on_progress = on_progress
        self._say = say
        self._patience = _Patience(link.launch)

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        """Makes one pass; see `Objective.evaluate`. WaitTimedOut where workers do not come, or bring nothing."""
        self._pass += 1
        # Servers take its stages before any worker can have computed one.
        self._machine.execute(Instruction(Operation.BEGIN_PASS, count=self._pass))
        plan = self._settings.memory
        begin = pb.BeginPassRequest(
            sender=self._link.sender,
            coordinator_epoch=self._coordinator_epoch,
            num_portions=plan.num_portions,
            copies_max=self._settings.copies,
            portions_per_stage=plan.fold.portions_per_stage,
            scalars=note,
            **{"pass": self._pass},
        )
        began = self._link.ask(0, "BeginPass", begin, pb.BeginPassReply)
        if not self._patience.begin(num_workers=began.num_workers):
            self._say("no worker is there, and this coordinator waits for one: start workers")
        reply = self._await()
        return Evaluation(reply.loss_sum, reply.example_count, tuple(reply.stage_ids))

    def _await(self) -> pb.AwaitPassReply:
        request = pb.AwaitPassRequest(
            sender=self._link.sender,
            coordinator_epoch=self._coordinator_epoch,
            wait_milliseconds=round(AWAIT_SECONDS * 1000),
            **{"pass": self._pass},
        )
        while True:
            reply = self._link.ask(
                0, "AwaitPass", request, pb.AwaitPassReply, timeout_seconds=AWAIT_SECONDS + CALL_SECONDS
            )
            self._on_progress(reply.progress)
            if reply.complete:
                return reply
            self._patience.check(reply.progress)
            self._link.greet()


class _Patience:
    """How long workers may take to come, and a pass may stand still."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._since = time.monotonic()
        self._done = 0
        # Whether there ever was one.
        self._found_workers = False

    def begin(self, *, num_workers: int) -> bool:
        """Counts from now, when a pass begins; returns whether there are workers, or were in an earlier pass."""
        self._since, self._done = time.monotonic(), 0
        self._found_workers |= num_workers > 0
        return self._found_workers

    def check(self, progress: pb.WorkProgress) -> None:
        """Raises WaitTimedOut where no worker came, or no portion was delivered, for too long."""
        now = time.monotonic()
        came = not self._found_workers and bool(progress.running or progress.done)
        if came or progress.done != self._done:
            self._since, self._done, self._found_workers = now, progress.done, True
        waited = now - self._since
        if not self._found_workers:
            if waited >= self._launch.start_wait_seconds:
                raise WaitTimedOut(
                    f"waited {waited:.0f} s for workers, and none took a portion: start workers, or raise "
                    "start_wait_seconds (PYPS_START_WAIT_SECONDS) to wait longer"
                )
        elif waited >= self._launch.wait_seconds:
            raise WaitTimedOut(
                f"waited {waited:.0f} s for workers: {progress.done} of {progress.num_portions} portions of the pass "
                f"are done, {progress.running} are with workers; look whether workers run (`pyps status`), or raise "
                "wait_seconds (PYPS_WAIT_SECONDS) to wait longer"
            )
