"""Sandblaster: vector machines in this process, a coordinator on the generated stubs, a job of real processes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from client_support import addresses, start_servers
from pyps.core.arrays import Floats
from pyps.core.shard import Shard
from pyps.core.vectors.machine import Plan, Program, VectorMachine
from pyps.core.vectors.program import Instruction, Operation, combine_answers
from pyps.core.vectors.stages import StagePart
from pyps.lbfgs.machine import (
    GRADIENT_CHANGE,
    POINT_CHANGE,
    PUSH_HISTORY,
    VECTORS,
    Evaluation,
    ServerState,
    allocate,
    combine,
    fold,
)
from pyps_wire import common_pb2 as common
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire import work_pb2 as work
from pyps_wire.codecs import FLOAT32
from pyps_wire.contract import VECTOR_MACHINE, WORK_QUEUE, stub_of
from shards import make_shard, pull
from support import DEADLINE_SECONDS, ROOT, PythonProcess, ServerProcess, Start, StartPython, inspect, wait_until
from wire_worker import WireWorker, secret_of

Doubles = npt.NDArray[np.float64]
NUM_PORTIONS = 3
# The sum of the losses of a portion's examples at these parameters, its gradient, and the examples.
PortionLoss = Callable[[Doubles, int], tuple[float, Doubles, int]]


class Killed(Exception):
    """The coordinator's process is gone."""


class VectorServer:
    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self.shards = shards
        self.machine = VectorMachine(shards, bytes_max=2**30)
        self.coordinator_epoch = 0
        self.op_seq = 0

    def execute(self, instructions: Sequence[Instruction], commits_iteration: int, state: str) -> tuple[float, ...]:
        self.op_seq += 1
        program = Program(self.coordinator_epoch, self.op_seq, tuple(instructions), commits_iteration, state)
        return self.machine.execute(program).scalars


class VectorWorld:
    """A machine over servers that hold shards in turn, as a coordinator's is; counts what it sends.

    It is killed at the `kill_at`-th moment: before and after each server's execution, and within passes.
    """

    def __init__(self, parameters: npt.ArrayLike, *, num_shards: int = 4, num_servers: int = 2) -> None:
        parts = np.array_split(np.asarray(parameters, np.float32), num_shards)
        self.shards = [make_shard(part, shard_id=shard_id) for shard_id, part in enumerate(parts)]
        self.servers = [
            VectorServer({shard.shard_id: shard for shard in self.shards[server::num_servers]})
            for server in range(num_servers)
        ]
        self.present_pass = 0
        self.lives = 0
        self.kill_at = 0
        self.moment = 0
        self.sent: list[tuple[Instruction, ...]] = []

    def attach(self, *, history: int = 10) -> tuple[list[ServerState], str]:
        """Makes the caller the coordinator; returns where the servers stand, and what server 0 has of the last one."""
        plan = Plan(history, len(VECTORS), stages=16)
        self.lives += 1
        epoch, found = 0, []
        for server in self.servers:
            attachment = server.machine.attach(plan, coordinator_epoch=epoch, at_least=self.lives)
            epoch = server.coordinator_epoch = attachment.coordinator_epoch
            server.op_seq = 0
            found.append(attachment)
        return [ServerState(each.iteration, each.vectors) for each in found], found[0].state

    def execute(self, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> list[float]:
        self.sent.append(instructions)
        # Servers are independent, but for commits: any order is as good.
        order = range(len(self.servers)) if commits_iteration else reversed(range(len(self.servers)))
        parts = {server: self._execute(server, instructions, commits_iteration, state) for server in order}
        # A server that had made the commit before answers with nothing.
        answers = [parts[server] for server in sorted(parts) if parts[server]]
        return combine_answers(instructions, answers) if answers else []

    def execute_on(self, server: int, *instructions: Instruction, commits_iteration: int = 0, state: str = "") -> None:
        self._execute(server, instructions, commits_iteration, state)

    def happen(self) -> None:
        """A moment at which the coordinator may be killed."""
        self.moment += 1
        if self.moment == self.kill_at:
            raise Killed

    def _execute(self, server: int, instructions: Sequence[Instruction], commits: int, state: str) -> tuple[float, ...]:
        self.happen()
        scalars = self.servers[server].execute(instructions, commits, state)
        self.happen()
        return scalars

    @property
    def parameters(self) -> Floats:
        return np.concatenate([shard.read(lambda _, parameters: parameters.copy()) for shard in self.shards])

    def begin_pass(self) -> None:
        self.present_pass += 1
        self.execute(Instruction(Operation.BEGIN_PASS, count=self.present_pass))

    def stage(self, gradient: Doubles, *, portion_id: int = 0) -> int:
        """Lays a sum of gradients aside; returns the stage's id."""
        values = gradient.astype(np.float32)
        starts = np.cumsum([0, *(shard.length for shard in self.shards)])
        for server in self.servers:
            for shard_id in server.shards:
                payload = values[starts[shard_id] : starts[shard_id + 1]].tobytes()
                server.machine.stages.add(
                    StagePart(
                        pass_=self.present_pass,
                        portion_id=portion_id,
                        stage_id=portion_id + 1,
                        shard_id=shard_id,
                        num_shards=len(server.shards),
                        codec=FLOAT32,
                        payload=payload,
                    )
                )
        return portion_id + 1

    def load(self, name: str, values: Doubles) -> None:
        """Writes a vector, rounded to float32, the way a gradient comes."""
        self.begin_pass()
        self.execute(fold(name, [self.stage(values)], 1))

    def load_pair(self, s: Doubles, y: Doubles) -> None:
        self.load(POINT_CHANGE, s)
        self.load(GRADIENT_CHANGE, y)
        self.execute(PUSH_HISTORY, allocate(POINT_CHANGE), allocate(GRADIENT_CHANGE))


class Passes:
    """An objective whose workers are a function: one stage a portion, in any order that the workers like."""

    def __init__(self, world: VectorWorld, portion_loss: PortionLoss, *, num_portions: int = NUM_PORTIONS) -> None:
        self.world = world
        self.notes: list[dict[str, float]] = []
        self._portion_loss = portion_loss
        self._num_portions = num_portions

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        self.notes.append(dict(note))
        world = self.world
        world.begin_pass()
        parameters = world.parameters.astype(np.float64)
        loss_sum, example_count = 0.0, 0
        computed = [self._portion_loss(parameters, portion) for portion in range(self._num_portions)]
        finite = all(np.isfinite(loss) and np.isfinite(gradient).all() for loss, gradient, _ in computed)
        for portion, (loss, gradient, count) in enumerate(computed):
            loss_sum += loss
            example_count += count
            if finite:
                world.stage(gradient, portion_id=portion)
        world.happen()
        stage_ids = tuple(range(1, self._num_portions + 1)) if finite else ()
        return Evaluation(loss_sum if finite else float("nan"), example_count, stage_ids)


def rosenbrock(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
    """Rosenbrock's valleys, one for each two parameters; a portion has every third of them."""
    mine = slice(portion, None, NUM_PORTIONS)
    a, b = parameters[0::2], parameters[1::2]
    loss = 100.0 * (b - a**2) ** 2 + (1.0 - a) ** 2
    gradient = np.zeros_like(parameters)
    gradient[0::2][mine] = (-400.0 * a * (b - a**2) - 2.0 * (1.0 - a))[mine]
    gradient[1::2][mine] = (200.0 * (b - a**2))[mine]
    return float(loss[mine].sum()), gradient, 1


def rosenbrock_start(num_valleys: int) -> Doubles:
    return np.tile([-1.2, 1.0], num_valleys)


# One machine alone.

BYTES_MAX = 2**20
PLAN = Plan(history_pairs=2, vectors=5, stages=2, num_portions=8)
LENGTHS = (17, 5, 33)


def make_shards(parameters: npt.ArrayLike, lengths: Sequence[int] = LENGTHS) -> dict[int, Shard]:
    """Shards 0, 2, 4, ... that hold the parameters end to end, as those of one of two servers."""
    values = np.asarray(parameters, dtype=np.float32)
    cuts = np.split(values, np.cumsum(lengths)[:-1])
    return {2 * i: make_shard(part, shard_id=2 * i, protocol="sandblaster") for i, part in enumerate(cuts)}


class Driver:
    """A coordinator of one machine, and a way to see and set whole vectors."""

    def __init__(self, machine: VectorMachine, shards: dict[int, Shard], *, attach: bool = True) -> None:
        self.machine = machine
        self.shards = shards
        self.op_seq = 0
        self.epoch = machine.attach(PLAN).coordinator_epoch if attach else 0

    def program(self, *instructions: Instruction, commits: int = 0, state: str = "") -> Program:
        return Program(self.epoch, self.op_seq + 1, instructions, commits, state)

    def execute(self, *instructions: Instruction, commits: int = 0, state: str = "", **how: Any) -> list[float]:
        results = self.machine.execute(self.program(*instructions, commits=commits, state=state), **how)
        self.op_seq += 1
        return list(results.scalars)

    def make(self, name: str, values: npt.ArrayLike) -> None:
        """Makes a vector of these values, which come as stages do."""
        self.execute(allocate(name))
        self.write(name, values)

    def write(self, name: str, values: npt.ArrayLike) -> None:
        """Folds a stage of these values into the vector; other stages are forgotten."""
        pass_ = self.machine.stages.pass_ + 1
        self.execute(Instruction(Operation.BEGIN_PASS, count=pass_))
        self.stage(values, stage_id=1)
        self.execute(Instruction(Operation.FOLD, target=name, stage_ids=(1,), count=1))

    def stage(self, values: npt.ArrayLike, **fields: Any) -> list[bool]:
        return [self.machine.stages.add(part) for part in self.parts(values, **fields)]

    def parts(self, values: npt.ArrayLike, **fields: Any) -> list[StagePart]:
        fields = {"pass_": self.machine.stages.pass_, "portion_id": 0, "stage_id": 1, **fields}
        num_shards = fields.pop("num_shards", len(self.shards))
        whole = np.asarray(values, dtype=np.float32)
        cuts = np.split(whole, np.cumsum([shard.length for shard in self.shards.values()])[:-1])
        return [
            StagePart(shard_id=shard_id, num_shards=num_shards, codec=FLOAT32, payload=values.tobytes(), **fields)
            for shard_id, values in zip(self.shards, cuts, strict=True)
        ]

    def parameters(self) -> npt.NDArray[np.float32]:
        return np.concatenate([pull(shard)[1] for shard in self.shards.values()])

    def held(self, name: str) -> npt.NDArray[Any]:
        """The numbers of a vector, which no caller could ask for."""
        return np.concatenate([vectors.arrays[name] for vectors in self.machine._vectors.values()])


def fill(target: str, value: float) -> Instruction:
    """target = value, in every element, where there is a vector "one" of ones."""
    return combine(target, ["one"], [value])


def make_machine(
    parameters: npt.ArrayLike | None = None,
    lengths: Sequence[int] = LENGTHS,
    *,
    bytes_max: int = BYTES_MAX,
    attach: bool = True,
) -> Driver:
    """A machine over shards of these lengths, with a coordinator that has attached."""
    values = np.zeros(sum(lengths)) if parameters is None else parameters
    shards = make_shards(values, lengths)
    return Driver(VectorMachine(shards, bytes_max=bytes_max), shards, attach=attach)


# On the wire.

# Room for a few vectors, a pair of history and two stages.
WIRE_PLAN = {"history_pairs": 1, "vectors": 5, "stages": 2, "num_portions": 8}


def instruction(operation: str, **fields: object) -> wire.Instruction:
    """One instruction: instruction("DOT", left="x", right="y")."""
    return wire.Instruction(operation=f"OPERATION_{operation}", **fields)


class WireCoordinator:
    """A coordinator of one server, over a worker's connection."""

    def __init__(self, worker: WireWorker, *, run_id: str = "run-1", epoch: int = 0) -> None:
        self.stub = stub_of(VECTOR_MACHINE, worker.channel)
        self.queue = stub_of(WORK_QUEUE, worker.channel)
        self.sender = common.Sender(run_id=run_id, secret=secret_of("coordinator"))
        self.epoch = epoch
        self.op_seq = 0

    @property
    def known(self) -> dict[str, Any]:
        return {"sender": self.sender, "coordinator_epoch": self.epoch}

    def attach(self, coordinator_epoch: int = 0, **plan: int) -> wire.AttachReply:
        request = wire.AttachRequest(sender=self.sender, coordinator_epoch=coordinator_epoch, **{**WIRE_PLAN, **plan})
        reply = self.stub.Attach(request, timeout=DEADLINE_SECONDS)
        self.epoch, self.op_seq = reply.coordinator_epoch, 0
        return reply

    def request(self, *instructions: wire.Instruction, commits: int = 0, state: str = "") -> wire.ExecuteRequest:
        return wire.ExecuteRequest(
            **self.known, op_seq=self.op_seq + 1, instructions=instructions, commits_iteration=commits, state=state
        )

    def execute(self, *instructions: wire.Instruction, commits: int = 0, state: str = "") -> wire.ExecuteReply:
        reply = self.stub.Execute(self.request(*instructions, commits=commits, state=state), timeout=DEADLINE_SECONDS)
        self.op_seq += 1
        return reply

    def begin(self, pass_: int, *, num_portions: int = 2, **fields: object) -> work.BeginPassReply:
        settings = {"pass": pass_, "num_portions": num_portions, "copies_max": 2, "portions_per_stage": 1} | fields
        return self.queue.BeginPass(work.BeginPassRequest(**self.known, **settings), timeout=DEADLINE_SECONDS)

    def wait(self, pass_: int, seconds: float = 0.0) -> work.AwaitPassReply:
        return self.waiting(pass_, seconds).result()

    def waiting(self, pass_: int, seconds: float = 50.0) -> Any:
        wait = {"wait_milliseconds": round(seconds * 1000), "pass": pass_}
        return self.queue.AwaitPass.future(work.AwaitPassRequest(**self.known, **wait), timeout=DEADLINE_SECONDS)

    def end(self, message: str) -> None:
        self.queue.EndWork(work.EndWorkRequest(**self.known, message=message), timeout=DEADLINE_SECONDS)


# A job of processes.

SCRIPT = ROOT / "tests" / "sandblaster_script.py"
FLAGS = ("--protocol", "sandblaster", "--run-id", "blast")
# Enough for many iterations of a small model on a machine that is busy with others.
END_SECONDS = 120.0


class SandblasterJob:
    """The processes of one job; those that start them end them too."""

    def __init__(
        self,
        start_server: Start,
        start_python: StartPython,
        *,
        servers: int = 2,
        server_flags: Sequence[str] = (),
        checkpoints: Path | None = None,
    ) -> None:
        """`checkpoints`: a folder for those of all servers, which `revive` needs, as it needs servers that can die."""
        self._start_server = start_server
        self._start_python = start_python
        self._checkpoints = checkpoints
        if checkpoints is None:
            self.servers = start_servers(start_server, servers, *FLAGS, *server_flags)
        else:
            self.servers = [
                start_server(*FLAGS, *server_flags, "--checkpoint-dir", self._folder(server))
                for server in range(servers)
            ]
        self.addresses = addresses(self.servers)
        self.workers: list[PythonProcess] = []

    def hire(self, count: int = 1, *arguments: str) -> PythonProcess:
        for _ in range(count):
            worker_id = f"worker-{len(self.workers)}"
            own = {"PYPS_SERVERS": self.addresses, "PYPS_RUN_ID": "blast", "PYPS_WORKER_ID": worker_id}
            self.workers.append(self._start_python(str(SCRIPT), *arguments, env=own))
        return self.workers[-1]

    def coordinate(self, *flags: str, env: Mapping[str, str | None] | None = None) -> PythonProcess:
        """Starts a coordinator that tells what it does as JSON."""
        command = ("-m", "pyps", "coordinate", "--servers", self.addresses, "--run-id", "blast", "--json")
        return self._start_python(*command, *flags, env={"PYPS_START_WAIT_SECONDS": "60", **(env or {})})

    def revive(self, server: int) -> None:
        """Kills a server and starts it again, from its newest checkpoint and at its old address."""
        killed = self.servers[server]
        assert isinstance(killed, ServerProcess)
        killed.kill()
        port = killed.data.rpartition(":")[2]
        self.servers[server] = self._start_server(
            *("--protocol", "sandblaster", "--port", port, "--checkpoint-dir", self._folder(server), "--resume")
        )

    def work(self) -> Any:
        return inspect(self.servers[0].control, "GetWork", work.GetWorkRequest())

    def wait_for_data(self) -> None:
        wait_until(lambda: self.work().HasField("data"), END_SECONDS, "a data set's opening")

    def bits(self) -> str:
        """The bits of the parameters with which all workers ended that are still there, the same for all."""
        found = set()
        for worker in self.workers:
            if worker.returncode == -9:
                continue
            assert worker.wait(END_SECONDS) == 0, worker.output()
            match = re.search(r"^bits (\w+)$", worker.output(), re.M)
            assert match is not None, worker.output()
            found.add(match[1])
        assert len(found) == 1
        return found.pop()

    def _folder(self, server: int) -> str:
        assert self._checkpoints is not None, "a job whose servers come back keeps checkpoints"
        return str(self._checkpoints / f"server-{server}")


def figures(coordinator: PythonProcess) -> list[dict[str, Any]]:
    """What a coordinator told of its iterations so far."""
    return [line for line in _lines(coordinator) if "iteration" in line]


def summary(coordinator: PythonProcess) -> dict[str, Any]:
    """How a coordinator ended, which must have gone well."""
    assert coordinator.wait(END_SECONDS) == 0, coordinator.output()
    return next(line["summary"] for line in _lines(coordinator) if "summary" in line)


def planned_bytes(coordinator: PythonProcess) -> int:
    """What vectors and staged gradients take on all servers at most, as a coordinator told when it attached."""
    planned: int = next(line["attached"]["planned_bytes"] for line in _lines(coordinator) if "attached" in line)
    return planned


def _lines(coordinator: PythonProcess) -> list[dict[str, Any]]:
    complete = coordinator.output().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]
