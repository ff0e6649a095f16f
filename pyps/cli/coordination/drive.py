"""A coordinator's life: it waits for work, makes itself the coordinator, lowers the loss, saves, and ends the work."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pyps.cli.control import SAVE_TIMEOUT_SECONDS, Control
from pyps.cli.coordination.link import Link, ServerRestarted
from pyps.cli.coordination.progress import Progress
from pyps.cli.coordination.remote import Fold, MemoryPlan, RemoteMachine, RemoteObjective
from pyps.lbfgs.optimizer import IterationReport, Lbfgs, LbfgsSettings, Summary
from pyps_client.launch import Launch
from pyps_client.retry import RetryPolicy
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import BadRequest, PypsError, WaitTimedOut
from pyps_wire.work_pb2 import EndWorkReply, EndWorkRequest, WorkProgress


@dataclass(frozen=True)
class CoordinationSettings:
    """What a user may choose of a coordinator."""

    lbfgs: LbfgsSettings = field(default_factory=LbfgsSettings)
    # Portions that the data set is cut into, where it has as many examples.
    num_portions: int = 80
    fold: Fold = field(default_factory=Fold)
    # Workers that may compute one portion at once, near the end of a pass.
    copies: int = 2
    # Iterations between two checkpoints that it asks the servers for; 0 leaves them to the servers.
    save_every: int = 0


class Coordination:
    """One coordinator over the servers of a run, whose connections are the caller's."""

    def __init__(self, link: Link, settings: CoordinationSettings, progress: Progress) -> None:
        self._link = link
        self._settings = settings
        self._progress = progress
        # Servers that cannot save are told of once.
        self._told_of_saving = False

    def run(self) -> Summary:
        """Goes on from the last commit, whoever made it, until L-BFGS ends.

        A server that is restored from a checkpoint meanwhile is brought to the others' point again. Raises Superseded
        where another coordinator came after this one.
        """
        while True:
            try:
                return self._run()
            except ServerRestarted as restarted:
                self._progress.say(f"{restarted}: taking the run up again")

    def _run(self) -> Summary:
        work = self._await_work()
        plan = self._memory_plan(work)
        machine = RemoteMachine.attach(self._link, plan)
        # Nobody begins another pass from here on, and work that an earlier coordinator ended goes on.
        work = self._link.work()
        self._progress.attached(work, planned_bytes=machine.planned_bytes)
        objective = RemoteObjective(
            self._link,
            machine,
            plan,
            copies=self._settings.copies,
            last_pass=getattr(work, "pass"),
            on_progress=self._progress.passing,
            say=self._progress.say,
        )
        lbfgs = Lbfgs(machine, objective, self._settings.lbfgs, on_iteration=self._on_iteration)
        summary = lbfgs.run(machine.servers, machine.state)
        self._save()
        end = EndWorkRequest(
            sender=self._link.sender, coordinator_epoch=machine.coordinator_epoch, message=summary.reason
        )
        self._link.ask(0, "EndWork", end, EndWorkReply)
        return summary

    def _memory_plan(self, work: WorkProgress) -> MemoryPlan:
        return MemoryPlan(
            history=self._settings.lbfgs.history,
            num_portions=min(self._settings.num_portions, work.data.num_examples),
            num_workers=max(1, self._link.num_workers()),
            fold=self._settings.fold,
        )

    def _on_iteration(self, report: IterationReport) -> None:
        self._progress.iteration(report)
        if self._settings.save_every and report.iteration % self._settings.save_every == 0:
            self._save()

    def _await_work(self) -> WorkProgress:
        """Waits until a worker has named a data set, of which a coordinator begins the passes."""
        policy = RetryPolicy(self._link.launch.start_wait_seconds, "start_wait_seconds")
        wait = policy.begin("a worker that calls pyps_client.sandblaster", stop=threading.Event())
        while True:
            work = self._link.work()
            if work.HasField("data"):
                wait.end()
                break
            wait.pause("none has named a data set yet", WaitTimedOut)
        if not work.data.coordinated:
            raise BadRequest(
                f"the workers share out the data set {work.data.name!r} among themselves, pass after pass, and no "
                "coordinator can begin theirs: let their script call pyps_client.sandblaster"
            )
        return work

    def _save(self) -> None:
        """Lets every server write a checkpoint now, if it keeps any and may be asked so."""
        for server in range(self._link.num_servers):
            try:
                # Either port of a server leads to the other.
                with Control(self._link.address(server), token=self._link.launch.token) as control:
                    request = pb.SaveCheckpointRequest()
                    control.call("SaveCheckpoint", request, timeout_seconds=SAVE_TIMEOUT_SECONDS)
            except PypsError as error:
                # It keeps none, say, or takes the call from its own machine only and saves in its own time.
                if not self._told_of_saving:
                    self._progress.say(f"{self._link.name(server)} wrote no checkpoint: {error}")
                self._told_of_saving = True


def coordinate(launch: Launch, settings: CoordinationSettings, *, as_json: bool) -> Summary:
    """Coordinates the run that the launch names, from here until L-BFGS ends."""
    with Link(launch) as link:
        progress = Progress(as_json=as_json, traffic=lambda: link.traffic)
        link.join()
        summary = Coordination(link, settings, progress).run()
        progress.ended(summary)
        return summary
