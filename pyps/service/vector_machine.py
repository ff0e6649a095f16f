"""The VectorMachine service: a coordinator's instructions on vectors, and workers' staged sums of gradients."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from pyps.core.vectors.machine import Answer, Job, Plan, VectorMachine, in_sequence
from pyps.core.vectors.program import INSTRUCTIONS_MAX, LISTED_MAX, Instruction, Operation, Program
from pyps.core.vectors.stages import StagePart
from pyps.run.handshake import SECRET_BYTES_MIN, check_secret
from pyps.service.calls import Call
from pyps.service.convert import parse, parse_frame
from pyps.service.limits import check_message_bytes
from pyps.service.transport import Host
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire.codecs import codec_numbered
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import InvalidArgument, NotInitialized

# More than the coordinators that may attach in one epoch of the run: a restored server does not know of those that came
# after its checkpoint.
LIVES_PER_EPOCH = 1000
LIVES_END = 2**62
# The largest message of a program within its bounds.
PROGRAM_BYTES_MAX = 8 * 2**20


class VectorMachineService:
    """The calls of pyps.v1.VectorMachine."""

    def __init__(self, host: Host):
        self._run = host.run
        self._work = host.work
        self._budget = host.budget
        # A program may have to wait until a checkpoint is written.
        self._coordinating = ThreadPoolExecutor(1, thread_name_prefix="coordinator")

    async def Attach(self, message: bytes, context: Call) -> bytes:
        request = parse(wire.AttachRequest, message)
        run, machine = self._run, self._coordinated(request.sender)
        if not request.coordinator_epoch and run.content.server_index:
            raise InvalidArgument(
                f"this is server {run.content.server_index}, and a coordinator's life is counted by server 0: attach "
                "there first, and here with the coordinator_epoch of its reply"
            )
        if not run.content.server_index and request.coordinator_epoch not in (0, machine.coordinator_epoch):
            raise InvalidArgument(
                f"there was no coordinator's life {request.coordinator_epoch}; expected 0, which takes the next, or "
                f"the present one, {machine.coordinator_epoch}"
            )
        if request.coordinator_epoch >= LIVES_END:
            raise InvalidArgument(
                f"a coordinator's life is {request.coordinator_epoch}; expected that of server 0's reply"
            )
        plan = Plan(
            history_pairs=request.history_pairs,
            vectors=request.vectors,
            stages=request.stages,
            num_portions=request.num_portions,
            num_workers=run.membership.num_alive,
        )
        at_least = LIVES_PER_EPOCH * run.content.epoch + 1
        check_secret(request.sender.secret)
        secret = request.sender.secret or secrets.token_bytes(SECRET_BYTES_MIN)
        life = {"coordinator_epoch": request.coordinator_epoch, "at_least": at_least}
        attached = await self._off_loop(partial(machine.attach, plan, secret=secret, **life))
        if not run.content.server_index:
            # From here on no earlier coordinator begins a pass.
            run.work.attach(attached.coordinator_epoch)
        run.events.add(
            "coordinator",
            "a coordinator attached",
            life=attached.coordinator_epoch,
            iteration=attached.iteration,
            planned_bytes=attached.planned_bytes,
        )
        return wire.AttachReply(**asdict(attached), secret=secret).SerializeToString()

    async def Execute(self, message: bytes, context: Call) -> bytes:
        request = parse(wire.ExecuteRequest, message, bytes_max=PROGRAM_BYTES_MAX)
        _require_few(request.instructions)
        machine = self._coordinated(request.sender)
        program = Program(
            coordinator_epoch=request.coordinator_epoch,
            op_seq=request.op_seq,
            instructions=tuple(instruction_from(i, number) for number, i in enumerate(request.instructions, start=1)),
            commits_iteration=request.commits_iteration,
            state=request.state,
        )
        secret = request.sender.secret
        results = await self._off_loop(partial(machine.execute, program, run_all=self._run_all, secret=secret))
        return wire.ExecuteReply(scalars=results.scalars, version=results.version).SerializeToString()

    async def Stage(self, _: object, context: Call) -> bytes:
        """Stage a sum of gradients, shard by shard."""
        part: StagePart | None = None
        complete = False
        # Of a replica each process sends the shards of its own part.
        arrived: set[int] = set()
        while (message := await context.receive(under_way=part is not None)) is not None:
            check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
            request, payload = parse_frame(wire.StageRequest, message)
            sender = request.sender
            self._run.heard(sender.run_id, sender.worker_id, sender.incarnation, sender.secret)
            with self._budget.account(sender.worker_id).holding(len(message)):
                machine = self._machine()
                former, part = part, _stage_part(request, payload)
                if former is not None and (former.pass_, former.stage_id) != (part.pass_, part.stage_id):
                    raise InvalidArgument(
                        f"a stream holds stage {former.stage_id} of pass {former.pass_} and stage {part.stage_id} of "
                        f"pass {part.pass_}: send one stage in a stream"
                    )
                shard = self._run.content.shards.get(part.shard_id)
                complete = await self._work.compute(shard.length if shard else 0, partial(machine.stages.add, part))
                arrived.add(part.shard_id)
        if part is None:
            raise InvalidArgument("Stage has no message: send one for each shard of the stage")
        if not complete and len(arrived) < part.num_shards:
            raise InvalidArgument(
                f"stage {part.stage_id} ended before each of its {part.num_shards} shards arrived: send them all in "
                "one stream"
            )
        return wire.StageReply().SerializeToString()

    def _coordinated(self, sender: Sender) -> VectorMachine:
        """Return the machine; refuse a caller that does not name this run."""
        self._run.shards_to_pull(sender.run_id, "", 0, observer=True, shard_ids=())
        return self._machine()

    def _machine(self) -> VectorMachine:
        run = self._run
        run.refuse_when_unavailable()
        if not run.rounds.behaviour.aggregation.coordinated:
            raise InvalidArgument(
                f"the protocol in force is {run.rounds.behaviour.aggregation.name}, under which workers push gradients:"
                " start the servers with --protocol sandblaster for a coordinator"
            )
        machine = run.content.machine
        if machine is None:
            raise NotInitialized("this server holds no parameters yet: a worker's Hello and Initialize come first")
        return machine

    async def _off_loop(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._coordinating, work)

    def _run_all(self, jobs: Sequence[Job]) -> list[list[Answer]]:
        if self._work.is_little(sum(shard.length for shard in self._run.content.shards.values())):
            return in_sequence(jobs)
        return self._work.run_together(jobs)


def _require_few(instructions: Sequence[wire.Instruction]) -> None:
    """Refuse a program beyond its bounds before it is converted."""
    listed = (len(i.names) + len(i.others) + len(i.scalars) + len(i.stage_ids) for i in instructions)
    if len(instructions) > INSTRUCTIONS_MAX or sum(listed) > LISTED_MAX:
        raise InvalidArgument(
            f"the program has {len(instructions)} instructions; expected {INSTRUCTIONS_MAX} at most, and {LISTED_MAX} "
            "names, stages and scalars in them: send it in parts"
        )


def instruction_from(plain: wire.Instruction, number: int = 1) -> Instruction:
    """Return a message as an instruction. InvalidArgument names its number where the operation is unknown."""
    try:
        operation = Operation(plain.operation)
    except ValueError:
        raise InvalidArgument(
            f"instruction {number} has the operation {plain.operation}; expected {min(Operation):d} to "
            f"{max(Operation):d}, as in vector_machine.proto"
        ) from None
    operands: dict[str, Any] = {each.name: getattr(plain, each.name) for each in fields(Instruction)[1:]}
    lists = {name: tuple(value) for name, value in operands.items() if not isinstance(value, str | int | float)}
    return Instruction(operation, **operands | lists)


def _stage_part(request: wire.StageRequest, payload: memoryview) -> StagePart:
    return StagePart(
        # The field's name is a keyword of Python's.
        pass_=getattr(request, "pass"),
        portion_id=request.portion_id,
        stage_id=request.stage_id,
        shard_id=request.shard_id,
        num_shards=request.num_shards,
        codec=codec_numbered(request.codec),
        payload=payload,
    )
