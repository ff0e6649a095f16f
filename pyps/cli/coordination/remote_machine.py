"""All servers of a run as one machine that executes instructions on vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pyps.cli.coordination.link import Link
from pyps.cli.coordination.memory import MemoryPlan
from pyps.core.instructions import Instruction, Operation
from pyps.core.program import num_answers
from pyps.work.machine import ServerStanding
from pyps_client.connection import CALL_SECONDS
from pyps_wire import vector_machine_pb2 as pb

# What the slowest machine may make of an instruction, by far: it is waited for so long, and asked again then.
PARAMETERS_PER_SECOND_MIN = 10_000_000
STATE_PAGE = 4096


class RemoteMachine:
    """A `pyps.work.machine.Machine` whose servers are other processes. Used by one thread."""

    def __init__(self, link: Link, attachments: Sequence[pb.AttachReply]) -> None:
        """`attachments` are the servers' answers to one Attach, in their order."""
        first = attachments[0]
        self.coordinator_epoch = first.coordinator_epoch
        # What the last coordinator wrote down on server 0; empty where there was none.
        self.state = first.state
        self.standings = [ServerStanding(reply.iteration, tuple(reply.vectors)) for reply in attachments]
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
        return cls(link, [first, *link.ask_others("Attach", [request] * (link.num_servers - 1), pb.AttachReply)])

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        """Executes one program on every server; see `Machine.execute`."""
        servers = range(self._link.num_servers)
        requests = [self._request(server, instructions, commits_iteration, state) for server in servers]
        timeout = self._timeout(requests)
        if not commits_iteration:
            replies = self._link.ask_all("Execute", requests, pb.ExecuteReply, timeout_seconds=timeout)
            return _together(instructions, [reply.scalars for reply in replies])
        # Server 0 writes the state down: no other may be ahead of it.
        replies = [self._link.ask(0, "Execute", requests[0], pb.ExecuteReply, timeout_seconds=timeout)]
        replies += self._link.ask_others("Execute", requests[1:], pb.ExecuteReply, timeout_seconds=timeout)
        # One that had made the commit before skips it, and has no numbers.
        return _together(instructions, [reply.scalars for reply in replies if reply.scalars])

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
            instructions=map(_to_proto, instructions),
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


def _to_proto(instruction: Instruction) -> pb.Instruction:
    return pb.Instruction(
        operation=pb.Instruction.Operation.Name(instruction.operation.value),
        target=instruction.target,
        left=instruction.left,
        right=instruction.right,
        scalar=instruction.scalar,
        precision=pb.Precision.Name(instruction.precision.value) if instruction.operation == Operation.ALLOC else None,
        names=instruction.names,
        others=instruction.others,
        scalars=instruction.scalars,
        stage_ids=instruction.stage_ids,
        count=instruction.count,
    )


def _together(instructions: Iterable[Instruction], answers: Sequence[Sequence[float]]) -> list[float]:
    """The servers' numbers, each summed in their order in float64; for NORM_INF the largest."""
    if not answers:
        return []
    largest = [
        instruction.operation == Operation.NORM_INF
        for instruction in instructions
        for _ in range(num_answers(instruction))
    ]
    return [
        _largest(parts) if is_largest else _sum(parts)
        for is_largest, parts in zip(largest, zip(*answers, strict=True), strict=True)
    ]


def _sum(numbers: Iterable[float]) -> float:
    total = 0.0
    # Not `sum`, which compensates for rounding from Python 3.12 on: the same bits everywhere.
    for number in numbers:
        total += number
    return total


def _largest(numbers: Sequence[float]) -> float:
    return math.nan if any(math.isnan(number) for number in numbers) else max(numbers)
