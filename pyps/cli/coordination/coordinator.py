"""A coordinator from start to end: it waits for work, attaches, lowers the loss, saves, and ends the work."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from threading import Event

import typer

from pyps.cli.coordination.link import Link, ServerRestarted, Traffic
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.control import Control
from pyps.core.vectors.program import Instruction, Operation, combine_answers
from pyps.lbfgs.machine import VECTORS, Evaluation, ServerState
from pyps.lbfgs.optimizer import IterationReport, Lbfgs, Summary
from pyps_client.launch import Launch
from pyps_client.retry import RetryPolicy
from pyps_client.transport.connection import CALL_SECONDS
from pyps_wire import inspector_pb2 as inspector
from pyps_wire import vector_machine_pb2 as machine_pb
from pyps_wire import work_pb2 as work_pb
from pyps_wire.errors import InvalidArgument, PypsError, WaitTimedOut
from pyps_wire.work_pb2 import WorkProgress

# A slow machine's time for an instruction: a call waits for so long, and is repeated then.
PARAMETERS_PER_SECOND_MIN = 10_000_000
STATE_PAGE = 4096
# Between two AwaitPass calls of this length the coordinator greets the other servers.
AWAIT_SECONDS = 2.0
# The shortest time between two updates of the line in a terminal.
DRAW_SECONDS = 0.2
# Returns to the start of a terminal's line and erases the line.
ERASE = "\r\x1b[K"


def coordinate(launch: Launch, settings: CoordinationSettings, *, as_json: bool) -> None:
    """Coordinate a run until L-BFGS ends; raise Superseded if another coordinator replaces this one."""
    with Link(launch) as link:
        output = Output(as_json=as_json, traffic=lambda: link.traffic)
        link.join()
        while True:
            try:
                output.ended(Coordinator(link, settings, output).run())
                return
            except ServerRestarted as restarted:
                # The next `run` brings that server to the others' point again.
                output.say(f"{restarted}: resuming the run")


class Coordinator:
    """One coordinator over the servers of a run, from its Attach on."""

    def __init__(self, link: Link, settings: CoordinationSettings, output: Output) -> None:
        self._link = link
        self._settings = settings
        self._output = output
        self._save_failed = False

    def run(self) -> Summary:
        """Continue from the last commit of any coordinator until L-BFGS ends."""
        work = self._await_work()
        num_portions = min(self._settings.portions, work.data.num_examples)
        num_workers = max(1, self._link.num_workers())
        machine = RemoteMachine(self._link, memory_plan(self._settings, num_portions, num_workers=num_workers))
        # No other coordinator begins a pass from here on, and work that an earlier one ended continues.
        work = self._link.work()
        self._output.attached(work, planned_bytes=machine.planned_bytes)
        objective = RemoteObjective(
            self._link,
            machine,
            self._settings,
            num_portions=num_portions,
            last_pass=getattr(work, "pass"),
            on_progress=self._output.passing,
            say=self._output.say,
        )
        summary = Lbfgs(machine, objective, self._settings.lbfgs, on_iteration=self._on_iteration).run(
            machine.servers, machine.state
        )
        self._save()
        end = work_pb.EndWorkRequest(
            sender=self._link.sender, coordinator_epoch=machine.coordinator_epoch, message=summary.reason
        )
        self._link.ask(0, "EndWork", end, work_pb.EndWorkReply)
        return summary

    def _on_iteration(self, report: IterationReport) -> None:
        self._output.iteration(report)
        if self._settings.save_every and report.iteration % self._settings.save_every == 0:
            self._save()

    def _await_work(self) -> WorkProgress:
        """Wait until a worker has opened a data set."""
        policy = RetryPolicy(self._link.launch.start_wait_seconds, "start_wait_seconds")
        wait = policy.begin("a worker that calls pyps_client.sandblaster", stop=Event())
        while not (work := self._link.work()).HasField("data"):
            wait.pause("none has named a data set yet", WaitTimedOut)
        wait.end()
        if not work.data.coordinated:
            raise InvalidArgument(
                f"the workers share out the data set {work.data.name!r} among themselves, pass after pass, and no "
                "coordinator can begin theirs: let their script call pyps_client.sandblaster"
            )
        return work

    def _save(self) -> None:
        """Have every server write a checkpoint now, if it keeps any and accepts the call."""
        for server in map(self._link.connection, range(self._link.num_servers)):
            try:
                # Either port of a server leads to the other.
                with Control(server.address, token=self._link.launch.token) as control:
                    control.call("SaveCheckpoint", inspector.SaveCheckpointRequest())
            except PypsError as error:
                # For example, it accepts the call only from its own machine, and saves in its own time.
                if not self._save_failed:
                    self._output.say(f"{server.name} wrote no checkpoint: {error}")
                self._save_failed = True


def memory_plan(settings: CoordinationSettings, num_portions: int, *, num_workers: int) -> machine_pb.AttachRequest:
    """Return a request, without sender, for the memory that L-BFGS needs on the servers at most."""
    return machine_pb.AttachRequest(
        history_pairs=settings.history,
        vectors=len(VECTORS),
        stages=settings.num_stages(num_portions, num_workers=num_workers),
        num_portions=num_portions,
    )


class RemoteMachine:
    """A `pyps.lbfgs.machine.Machine` whose servers are other processes. Used by one thread."""

    def __init__(self, link: Link, plan: machine_pb.AttachRequest) -> None:
        """Make this process the coordinator, in place of any before it.

        LimitExceeded, with settings that would fit, if a server has too little memory for the plan.
        """
        link.note_epochs()
        plan.sender.CopyFrom(link.sender)
        first = link.ask(0, "Attach", plan, machine_pb.AttachReply)
        plan.coordinator_epoch = self.coordinator_epoch = first.coordinator_epoch
        others = [None, *[plan] * (link.num_servers - 1)]
        attached = [first, *link.ask_all("Attach", others, machine_pb.AttachReply)]
        # The state of the last commit on server 0; empty before the first.
        self.state = first.state
        self.servers = [ServerState(reply.iteration, tuple(reply.vectors)) for reply in attached]
        self.planned_bytes = sum(reply.planned_bytes for reply in attached)
        self._link = link
        self._num_parameters_max = max(reply.num_parameters for reply in attached)
        # By server, the number of its last program.
        self._op_seqs = [0] * len(attached)

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        """Execute one program on every server; see `Machine.execute`."""
        requests = [
            self._request(server, instructions, commits_iteration, state) for server in range(self._link.num_servers)
        ]
        timeout = self._timeout(instructions)
        if not commits_iteration:
            replies = self._link.ask_all("Execute", requests, machine_pb.ExecuteReply, timeout_seconds=timeout)
        else:
            # Server 0 saves the state: no other may be ahead of it.
            replies = [self._link.ask(0, "Execute", requests[0], machine_pb.ExecuteReply, timeout_seconds=timeout)]
            others = [None, *requests[1:]]
            replies += self._link.ask_all("Execute", others, machine_pb.ExecuteReply, timeout_seconds=timeout)
        # A server that had executed the commit before skips it and answers with no numbers.
        answers = [reply.scalars for reply in replies if reply.scalars]
        return combine_answers(instructions, answers) if answers else []

    def execute_on(self, server: int, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> None:
        request = self._request(server, instructions, commits_iteration, state)
        self._link.ask(server, "Execute", request, machine_pb.ExecuteReply, timeout_seconds=self._timeout(instructions))

    def _timeout(self, instructions: Sequence[Instruction]) -> float:
        return CALL_SECONDS + len(instructions) * self._num_parameters_max / PARAMETERS_PER_SECOND_MIN

    def _request(
        self, server: int, instructions: Sequence[Instruction], commits_iteration: int, state: str
    ) -> machine_pb.ExecuteRequest:
        self._op_seqs[server] += 1
        # Numbers as text differ in length. Blanks after the JSON make messages equally long for every model.
        page = state.ljust(math.ceil(len(state) / STATE_PAGE) * STATE_PAGE)
        return machine_pb.ExecuteRequest(
            sender=self._link.sender,
            coordinator_epoch=self.coordinator_epoch,
            op_seq=self._op_seqs[server],
            instructions=[machine_pb.Instruction(**asdict(instruction)) for instruction in instructions],
            commits_iteration=commits_iteration,
            state=page if server == 0 else "",
        )


class RemoteObjective:
    """A `pyps.lbfgs.machine.Objective` over the work queue of server 0. Used by one thread."""

    def __init__(
        self,
        link: Link,
        machine: RemoteMachine,
        settings: CoordinationSettings,
        *,
        num_portions: int,
        last_pass: int,
        on_progress: Callable[[WorkProgress], None] = lambda progress: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`last_pass` is the highest that any coordinator began; `say` prints a sentence for the user."""
        self._link = link
        self._machine = machine
        self._settings = settings
        self._num_portions = num_portions
        self._pass = last_pass
        self._on_progress = on_progress
        self._say = say
        # The number of delivered portions, and the time of the last one; whether there ever was a worker.
        self._since, self._done = 0.0, 0
        self._found_workers = False

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        """Run one pass; see `Objective.evaluate`. WaitTimedOut without workers, or if they deliver nothing."""
        self._pass += 1
        # Servers accept its stages before any worker can have computed one.
        self._machine.execute(Instruction(Operation.BEGIN_PASS, count=self._pass))
        common = {"sender": self._link.sender, "coordinator_epoch": self._machine.coordinator_epoch, "pass": self._pass}
        begin = work_pb.BeginPassRequest(
            num_portions=self._num_portions,
            copies_max=self._settings.copies,
            portions_per_stage=self._settings.portions_per_stage,
            scalars=note,
            **common,  # type: ignore[arg-type]
        )
        began = self._link.ask(0, "BeginPass", begin, work_pb.BeginPassReply)
        self._since, self._done = time.monotonic(), 0
        self._found_workers |= began.num_workers > 0
        if not self._found_workers:
            self._say("no worker is there, and this coordinator waits for one: start workers")
        request = work_pb.AwaitPassRequest(wait_milliseconds=round(AWAIT_SECONDS * 1000), **common)  # type: ignore[arg-type]
        while True:
            reply = self._link.ask(
                0, "AwaitPass", request, work_pb.AwaitPassReply, timeout_seconds=AWAIT_SECONDS + CALL_SECONDS
            )
            self._on_progress(reply.progress)
            if reply.complete:
                return Evaluation(reply.loss_sum, reply.example_count, tuple(reply.stage_ids))
            self._require_progress(reply.progress)
            self._link.greet()

    def _require_progress(self, progress: WorkProgress) -> None:
        """Raise WaitTimedOut if no worker joined, or no portion was delivered, for too long."""
        now, launch = time.monotonic(), self._link.launch
        first_joined = not self._found_workers and bool(progress.running or progress.done)
        if first_joined or progress.done != self._done:
            self._since, self._done, self._found_workers = now, progress.done, True
        waited = now - self._since
        if not self._found_workers:
            if waited >= launch.start_wait_seconds:
                raise WaitTimedOut(
                    f"waited {waited:.0f} s for workers, and none took a portion: start workers, or raise "
                    "start_wait_seconds (PYPS_START_WAIT_SECONDS) to wait longer"
                )
        elif waited >= launch.wait_seconds:
            raise WaitTimedOut(
                f"waited {waited:.0f} s for workers: {progress.done} of {progress.num_portions} portions of the pass "
                f"are done, {progress.running} are with workers; check that workers run (`pyps status`), or raise "
                "wait_seconds (PYPS_WAIT_SECONDS) to wait longer"
            )


class Output:
    """A coordinator's output: a line an iteration, and on a terminal the progress of the pass. For its thread."""

    def __init__(self, *, as_json: bool, traffic: Callable[[], Traffic]) -> None:
        self._as_json = as_json
        self._traffic = traffic
        self._work = WorkProgress()
        # At the last line: the time, the traffic and the work.
        self._mark = (time.monotonic(), traffic(), self._work)
        self._draws = not as_json and sys.stdout.isatty()
        self._drawn_at = 0.0

    def attached(self, work: WorkProgress, *, planned_bytes: int) -> None:
        """Begin with the queue's counts as they are; `planned_bytes` is the memory on all servers together."""
        if self._as_json:
            attached = {"planned_bytes": planned_bytes, "passes_begun": getattr(work, "pass")}
            typer.echo(json.dumps({"attached": attached}))
        self._work = work
        self._mark = (time.monotonic(), self._traffic(), work)

    def passing(self, work: WorkProgress) -> None:
        self._work = work
        if self._draws and time.monotonic() >= self._drawn_at + DRAW_SECONDS:
            self._drawn_at = time.monotonic()
            self._erase()
            typer.echo(f"pass {getattr(work, 'pass')}: {work.done} of {work.num_portions} portions", nl=False)

    def iteration(self, report: IterationReport) -> None:
        (last_at, last_traffic, last_work), work = self._mark, self._work
        traffic = self._traffic() - last_traffic
        now = time.monotonic()
        named = ("iteration", "loss", "step_length", "gradient_norm", "trials", "pairs", "pair_kept", "restarted")
        figures = {
            **{name: getattr(report, name) for name in named},
            "portions": work.num_portions,
            **{name: getattr(work, name) - getattr(last_work, name) for name in ("copies", "stolen", "lost")},
            "seconds": round(now - last_at, 3),
            "traffic": asdict(traffic),
        }
        self._mark = (now, self._traffic(), work)
        if self._as_json:
            typer.echo(json.dumps(figures))
            return
        self._erase()
        restarted = ", history deleted" if report.restarted else ""
        typer.echo(
            f"iteration {report.iteration:3d}  loss {report.loss:.6g}  step {report.step_length:.3g}  "
            f"gradient {report.gradient_norm:.3g}  trials {report.trials}  "
            f"portions {work.num_portions} ({figures['stolen']} stolen, {figures['lost']} lost)  "
            f"{figures['seconds']:.1f} s  {traffic}{restarted}"
        )

    def ended(self, summary: Summary) -> None:
        traffic = self._traffic()
        if self._as_json:
            typer.echo(json.dumps({"summary": asdict(summary), "traffic": asdict(traffic)}))
            return
        self._erase()
        typer.echo(
            f"{'converged' if summary.converged else 'ended'} after {summary.iterations} iterations and "
            f"{summary.passes} passes, loss {summary.loss:.6g}: {summary.reason}; "
            f"the coordinator's {traffic.messages:,} calls: {traffic}"
        )

    def say(self, text: str) -> None:
        """Print a sentence to standard error."""
        self._erase()
        typer.echo(f"pyps: {text}", err=True)

    def _erase(self) -> None:
        if self._draws:
            typer.echo(ERASE, nl=False)
