"""What the optimizer works with, where servers and workers are other processes; and what it needs of their memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from pyps.cli.coordination.link import Link
from pyps.core.vectors.program import Instruction, Operation, combine_answers
from pyps.lbfgs.machine import VECTORS, Evaluation, ServerState
from pyps_client.launch import Launch
from pyps_client.transport.connection import CALL_SECONDS
from pyps_wire import vector_machine_pb2 as pb
from pyps_wire import work_pb2 as work
from pyps_wire.errors import BadRequest, WaitTimedOut
from pyps_wire.vector_machine_pb2 import AttachRequest

EXPECTED = "portion, or group:k=4 with any whole number k above 0"
GROUP_DEFAULT = 4


@dataclass(frozen=True)
class Fold:
    """Of how many claimed portions a worker sums the gradients before it stages them."""

    # The paper sends gradients "every few completed portions"; with 1 the sum of all has the same bits whichever worker
    # computed which portion.
    portions_per_stage: int = 1

    @classmethod
    def parse(cls, text: str) -> Fold:
        """Reads "portion", "group" or "group:k=4". Raises BadRequest."""
        name, _, rest = text.partition(":")
        key, _, number = rest.partition("=")
        if name == "portion" and not rest:
            return cls(1)
        if name == "group" and not rest:
            return cls(GROUP_DEFAULT)
        if name == "group" and key == "k" and number.isdecimal() and int(number) > 0:
            return cls(int(number))
        raise BadRequest(f"--fold is {text!r}; expected {EXPECTED}")

    def __str__(self) -> str:
        return "portion" if self.portions_per_stage == 1 else f"group:k={self.portions_per_stage}"

    def stages(self, num_portions: int, *, num_workers: int) -> int:
        """Staged sums at once, at most: with groups each worker's last one may be of fewer portions."""
        if self.portions_per_stage == 1:
            return num_portions
        return min(num_portions, math.ceil(num_portions / self.portions_per_stage) + num_workers)


@dataclass(frozen=True)
class MemoryPlan:
    """What L-BFGS keeps on the servers at most."""

    history: int
    num_portions: int
    num_workers: int
    fold: Fold

    def request(self) -> AttachRequest:
        """The plan as the servers are asked for it, without who asks."""
        return AttachRequest(
            history_pairs=self.history,
            vectors=len(VECTORS),
            stages=self.fold.stages(self.num_portions, num_workers=self.num_workers),
            num_portions=self.num_portions,
        )


# What the slowest machine may make of an instruction, by far: it is waited for so long, and asked again then.
PARAMETERS_PER_SECOND_MIN = 10_000_000
STATE_PAGE = 4096


class RemoteMachine:
    """A `pyps.lbfgs.machine.Machine` whose servers are other processes. Used by one thread."""

    def __init__(self, link: Link, attachments: Sequence[pb.AttachReply]) -> None:
        """`attachments` are the servers' answers to one Attach, in their order."""
        first = attachments[0]
        self.coordinator_epoch = first.coordinator_epoch
        # What the last coordinator wrote down on server 0; empty where there was none.
        self.state = first.state
        self.servers = [ServerState(reply.iteration, tuple(reply.vectors)) for reply in attachments]
        self.num_parameters = sum(reply.num_parameters for reply in attachments)
        self.planned_bytes = sum(reply.planned_bytes for reply in attachments)
        self._link = link
        self._parameters = [reply.num_parameters for reply in attachments]
        # The number of each server's last program in this life.
        self._op_seqs = [0] * len(attachments)

    @classmethod
    def attach(cls, link: Link, plan: MemoryPlan) -> RemoteMachine:
        """Makes this process the coordinator, in place of any before it.

        Raises LimitExceeded, with settings that would fit, where a server has not the memory.
        """
        link.note_epochs()
        request = plan.request()
        request.sender.CopyFrom(link.sender)
        first = link.ask(0, "Attach", request, pb.AttachReply)
        request.coordinator_epoch = first.coordinator_epoch
        others = [None, *[request] * (link.num_servers - 1)]
        return cls(link, [first, *link.ask_all("Attach", others, pb.AttachReply)])

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        """Executes one program on every server; see `Machine.execute`."""
        servers = range(self._link.num_servers)
        requests = [self._request(server, instructions, commits_iteration, state) for server in servers]
        timeout = self._timeout(requests)
        if not commits_iteration:
            replies = self._link.ask_all("Execute", requests, pb.ExecuteReply, timeout_seconds=timeout)
            return combine_answers(instructions, [reply.scalars for reply in replies])
        # Server 0 writes the state down: no other may be ahead of it.
        replies = [self._link.ask(0, "Execute", requests[0], pb.ExecuteReply, timeout_seconds=timeout)]
        others = [None, *requests[1:]]
        replies += self._link.ask_all("Execute", others, pb.ExecuteReply, timeout_seconds=timeout)
        # One that had made the commit before skips it, and has no numbers.
        answers = [reply.scalars for reply in replies if reply.scalars]
        return combine_answers(instructions, answers) if answers else []

    def execute_on(self, server: int, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> None:
        """Executes a program on one server."""
        request = self._request(server, instructions, commits_iteration, state)
        self._link.ask(server, "Execute", request, pb.ExecuteReply, timeout_seconds=self._timeout([request]))

    def _request(
        self, server: int, instructions: Sequence[Instruction], commits_iteration: int, state: str
    ) -> pb.ExecuteRequest:
        self._op_seqs[server] += 1
        return pb.ExecuteRequest(
            sender=self._link.sender,
            coordinator_epoch=self.coordinator_epoch,
            op_seq=self._op_seqs[server],
            instructions=[pb.Instruction(**asdict(instruction)) for instruction in instructions],
            commits_iteration=commits_iteration,
            state=_filled_up(state) if server == 0 else "",
        )

    def _timeout(self, requests: Sequence[pb.ExecuteRequest]) -> float:
        longest = max(len(request.instructions) for request in requests)
        return CALL_SECONDS + longest * max(self._parameters) / PARAMETERS_PER_SECOND_MIN


def _filled_up(state: str) -> str:
    """The state, filled up to full pages: numbers as text differ in length, messages are to be as long for any model.

    JSON takes blanks at its end for nothing.
    """
    return state.ljust(math.ceil(len(state) / STATE_PAGE) * STATE_PAGE)


# Server 0 is asked to hold the question for so long; between two the other servers are looked after.
AWAIT_SECONDS = 2.0


class RemoteObjective:
    """A `pyps.lbfgs.machine.Objective` over the work queue of server 0. Used by one thread."""

    def __init__(
        self,
        link: Link,
        machine: RemoteMachine,
        plan: MemoryPlan,
        *,
        copies: int,
        last_pass: int,
        on_progress: Callable[[work.WorkProgress], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`copies`: workers that may compute one portion at once, near the end of a pass. `last_pass`: the highest that
        any coordinator began. `on_progress` hears now and then how far a pass is, and `say` what people are to do
        something about.
        """
        self._link = link
        self._machine = machine
        self._plan = plan
        self._copies = copies
        self._pass = last_pass
        self._on_progress = on_progress
        self._say = say
        self._patience = _Patience(link.launch)

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        """Makes one pass; see `Objective.evaluate`. WaitTimedOut where workers do not come, or bring nothing."""
        self._pass += 1
        # Servers take its stages before any worker can have computed one.
        self._machine.execute(Instruction(Operation.BEGIN_PASS, count=self._pass))
        begin = work.BeginPassRequest(
            sender=self._link.sender,
            coordinator_epoch=self._machine.coordinator_epoch,
            num_portions=self._plan.num_portions,
            copies_max=self._copies,
            portions_per_stage=self._plan.fold.portions_per_stage,
            scalars=note,
            **{"pass": self._pass},
        )
        began = self._link.ask(0, "BeginPass", begin, work.BeginPassReply)
        if not self._patience.begin(num_workers=began.num_workers):
            self._say("no worker is there, and this coordinator waits for one: start workers")
        reply = self._await()
        return Evaluation(reply.loss_sum, reply.example_count, tuple(reply.stage_ids))

    def _await(self) -> work.AwaitPassReply:
        request = work.AwaitPassRequest(
            sender=self._link.sender,
            coordinator_epoch=self._machine.coordinator_epoch,
            wait_milliseconds=round(AWAIT_SECONDS * 1000),
            **{"pass": self._pass},
        )
        while True:
            reply = self._link.ask(
                0, "AwaitPass", request, work.AwaitPassReply, timeout_seconds=AWAIT_SECONDS + CALL_SECONDS
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

    def check(self, progress: work.WorkProgress) -> None:
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
