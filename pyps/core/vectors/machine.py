"""Instructions on vectors that lie on one server's shards: Sandblaster's (Dean et al. 2012, section 4.2).

A coordinator sends programs of instructions and gets numbers. Each program is checked as a whole, then executed shard
by shard; a retry of the last one gets the last answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import TypeAlias

from pyps.core.arrays import Floats
from pyps.core.shard import Shard
from pyps.core.vectors.program import (
    POINT,
    Operation,
    Precision,
    Program,
    Validated,
    VectorTable,
    num_answers,
    validate,
)
from pyps.core.vectors.shard_vectors import Answer, Script, ShardVectors, Vector, make_vector
from pyps.core.vectors.stages import StagePart, Stages
from pyps_wire.errors import BadRequest, LimitExceeded, NotAllowed, RunFinished, Superseded

_FLOAT32_BYTES, _FLOAT64_BYTES = 4, 8
# What a plan may name at most: enough for anybody, and no product overflows.
_COUNT_MAX = 2**32 - 1


@dataclass(frozen=True)
class Plan:
    """What a coordinator will need at most."""

    history_pairs: int
    # Further vectors.
    vectors_float32: int
    vectors_float64: int
    # Staged sums of gradients at once.
    stages: int
    # Portions of a pass, of which `stages` was made, and the workers: each may leave a stage of fewer portions.
    num_portions: int = 0
    num_workers: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes that all of it takes for one parameter."""
        float32s = 2 * self.history_pairs + self.vectors_float32 + self.stages
        return _FLOAT32_BYTES * float32s + _FLOAT64_BYTES * self.vectors_float64


def require_plan_fits(plan: Plan, *, num_parameters: int, bytes_max: int, pairs_there: int = 0) -> int:
    """Returns the bytes that the plan comes to on a server with so many parameters.

    `pairs_there`: the history that an earlier coordinator left, of which what is too much goes with the first commit.
    Raises LimitExceeded where it goes beyond bytes_max, naming settings that do not.
    """
    for name in ("history_pairs", "vectors_float32", "vectors_float64", "stages", "num_portions"):
        value = getattr(plan, name)
        if not 0 <= value <= _COUNT_MAX:
            raise BadRequest(f"the plan has {name} {value}; expected 0 to {_COUNT_MAX}")
    left = ""
    if pairs_there > plan.history_pairs:
        left = f" (which an earlier coordinator left; {plan.history_pairs} are kept once an iteration is done)"
        plan = replace(plan, history_pairs=pairs_there)
    num_bytes = plan.bytes_per_parameter * num_parameters
    if num_bytes > bytes_max:
        further, ways = (
            plan.vectors_float32 + plan.vectors_float64,
            _ways_out(plan, num_parameters, bytes_max, pairs_there),
        )
        raise LimitExceeded(
            f"{plan.history_pairs} pairs of history{left}, {further} further vectors and {plan.stages} staged sums of "
            f"gradients take {num_bytes} bytes for the {num_parameters} parameters of this server, which keeps "
            f"{bytes_max} at the most: {ways}"
        )
    return num_bytes


def _ways_out(plan: Plan, num_parameters: int, bytes_max: int, pairs_there: int) -> str:
    def history_that_fits(of: Plan) -> int:
        spare = bytes_max // num_parameters - replace(of, history_pairs=0).bytes_per_parameter
        return min(spare // (2 * _FLOAT32_BYTES), plan.history_pairs)

    def stages_that_fit(of: Plan) -> int:
        spare = bytes_max // num_parameters - replace(of, stages=0).bytes_per_parameter
        return min(spare // _FLOAT32_BYTES, plan.stages)

    ways = []
    history, stages = history_that_fits(plan), stages_that_fit(plan)
    shortest = max(1, pairs_there)
    if history >= shortest:
        ways.append(f"--history {history}")
    if stages >= 1:
        ways.append(_fewer_stages(plan, stages))
    if not ways:
        # Neither alone is enough: the shortest history, and as many stages as then fit.
        stages = stages_that_fit(replace(plan, history_pairs=shortest))
        if stages >= 1:
            ways.append(f"--history {shortest} with {_fewer_stages(plan, stages)}")
    ways.append(f"more servers, or servers started with --max-vector-bytes {plan.bytes_per_parameter * num_parameters}")
    return "this would fit: " + "; or ".join(ways)


def _fewer_stages(plan: Plan, stages: int) -> str:
    """Settings of the coordinator that come to no more than so many stages at once."""
    if not plan.num_portions:
        return f"{stages} staged sums at once"
    ways = [f"--portions {stages}"] if stages < plan.num_portions else []
    if stages > plan.num_workers:
        ways.append(f"--fold group:k={math.ceil(plan.num_portions / (stages - plan.num_workers))}")
    return f"{' or '.join(ways)} ({stages} staged sums at once)"


# In a class of which `bytes` means something else.
Secret: TypeAlias = bytes

# Runs jobs that touch nothing in common, several at once if it likes; returns what they return, in their order.
RunAll = Callable[[Sequence[Callable[[], list[Answer]]]], list[list[Answer]]]


@dataclass(frozen=True)
class Attachment:
    """What a coordinator finds that comes, or comes back."""

    # Its life, from 1.
    coordinator_epoch: int
    # The iterations whose commits were executed here, and what the coordinator of the last wrote down.
    iteration: int
    state: str
    # Names of the vectors that there are.
    vectors: tuple[str, ...]
    # Parameters here, and the bytes that the plan comes to.
    num_parameters: int
    planned_bytes: int


@dataclass(frozen=True)
class Results:
    """What a program answered with, in the order of its instructions: this server's part of each number."""

    scalars: tuple[float, ...] = ()
    # The largest version among the shards.
    version: int = 0


@dataclass(frozen=True)
class MachineState:
    """What a checkpoint keeps of a machine, apart from the vectors."""

    coordinator_epoch: int = 0
    iteration: int = 0
    text: str = ""
    # The standing that a machine restored from it begins with.
    standing: VectorTable = field(default_factory=VectorTable)
    # By shard and name.
    vectors: Mapping[int, Mapping[str, Vector]] = field(default_factory=dict)


def one_after_the_other(jobs: Sequence[Callable[[], list[Answer]]]) -> list[list[Answer]]:
    """Runs jobs in this thread."""
    return [job() for job in jobs]


class VectorMachine:
    """The vectors of a coordinator on one server's shards. Every method may be called from any thread."""

    def __init__(self, shards: Mapping[int, Shard], *, bytes_max: int, logged: bool = False) -> None:
        """`logged` says that updates are logged, which instructions cannot be."""
        self._shards = {shard_id: shards[shard_id] for shard_id in sorted(shards)}
        self._bytes_max = bytes_max
        self._logged = logged
        lengths = {shard_id: shard.length for shard_id, shard in self._shards.items()}
        self._num_parameters = sum(lengths.values())
        self._stages = Stages(lengths, room=lambda: bytes_max - self._vector_bytes)
        # Held while a program is executed. Before _durable and the shards' locks, never after.
        self._lock = threading.Lock()
        # Held while what a checkpoint keeps is changed, and while a checkpoint copies it.
        self._durable = threading.Lock()
        # Guarded by _lock; replaced as a whole, so that it can be read without it.
        self.coordinator_epoch = 0
        self.iteration = 0
        self.text = ""
        # The last life that attached since this server's start, and its secret.
        self._attached = (-1, b"")
        self._op_seq = 0
        self._results = Results()
        self._standing = VectorTable()
        self._vectors = {shard_id: ShardVectors(shard) for shard_id, shard in self._shards.items()}

    # What can be read off it.

    @property
    def names(self) -> tuple[str, ...]:
        """The vectors that there are."""
        return tuple(sorted(self._standing.vectors))

    @property
    def bytes(self) -> int:
        """What vectors and stages take."""
        return self._vector_bytes + self._stages.bytes

    @property
    def num_stages(self) -> int:
        """The staged sums of gradients, complete or not."""
        return self._stages.num_stages

    @property
    def present_pass(self) -> int:
        """The pass whose stages are taken."""
        return self._stages.pass_

    @property
    def _vector_bytes(self) -> int:
        return self._standing.bytes_per_parameter * self._num_parameters

    # What a coordinator calls.

    def attach(self, plan: Plan, *, coordinator_epoch: int = 0, at_least: int = 1, secret: Secret = b"") -> Attachment:
        """Makes the caller the coordinator, in place of any before it; epoch 0 counts its lives up.

        A life that is counted is `at_least` that: a restored machine does not know of all that were.
        Raises LimitExceeded, naming settings that would fit, where the plan is too large; Superseded for an earlier
        life than one that was here, NotAllowed for the present one without its secret.
        """
        if self._logged:
            raise BadRequest(
                "this server keeps an update log, which cannot hold instructions on vectors: start it without "
                "--update-log"
            )
        with self._lock:
            pairs_there = self._standing.newest - self._standing.oldest + 1
            planned_bytes = require_plan_fits(
                plan, num_parameters=self._num_parameters, bytes_max=self._bytes_max, pairs_there=pairs_there
            )
            epoch = coordinator_epoch or max(self.coordinator_epoch + 1, at_least)
            if epoch > self.coordinator_epoch:
                self.coordinator_epoch, self._op_seq, self._results = epoch, 0, Results()
                self._attached = epoch, secret
                # Nobody folds them any more, and the plan counts on their room.
                self._stages.begin(self._stages.pass_)
            self.require_coordinator(epoch, secret)
            return Attachment(epoch, self.iteration, self.text, self.names, self._num_parameters, planned_bytes)

    def require_coordinator(self, coordinator_epoch: int, secret: Secret) -> None:
        """Refuses a life that never attached (BadRequest), an earlier one (Superseded), and who has not its secret."""
        if coordinator_epoch > self.coordinator_epoch:
            raise BadRequest(
                f"the call is of coordinator life {coordinator_epoch}, and the last that attached here was life "
                f"{self.coordinator_epoch}: attach first"
            )
        if coordinator_epoch < self.coordinator_epoch:
            raise Superseded(
                f"coordinator life {coordinator_epoch} was replaced by life {self.coordinator_epoch}: end this one"
            )
        attached, own = self._attached
        if attached != coordinator_epoch or not compare_digest(own, secret):
            raise NotAllowed(
                f"the call is in the name of the coordinator's life {coordinator_epoch} without its secret: send the "
                "one that AttachReply brought, or attach, which begins a life of its own"
            )

    def execute(self, program: Program, *, run_all: RunAll = one_after_the_other, secret: Secret = b"") -> Results:
        """Executes a program on all shards and returns the sums, over the shards in their order, of what they answer.

        The last program again gets the last answer; one that commits an iteration that was committed is not executed.
        A program that changes what a checkpoint keeps waits for one that is being copied. Raises BadRequest or
        LimitExceeded for a program of which nothing can be executed, Superseded for an earlier coordinator's.
        """
        with self._lock:
            self.require_coordinator(program.coordinator_epoch, secret)
            if program.op_seq == self._op_seq > 0:
                return self._results
            if program.op_seq != self._op_seq + 1:
                raise BadRequest(
                    f"the program has op_seq {program.op_seq}, the last executed here had {self._op_seq}: expected "
                    f"{self._op_seq + 1}, or {self._op_seq} for a retry"
                )
            committed = 0 < program.commits_iteration <= self.iteration
            scalars = () if committed else self._execute(program, run_all)
            version = max((shard.version for shard in self._shards.values()), default=0)
            self._op_seq, self._results = program.op_seq, Results(scalars, version)
            return self._results

    # What a worker calls.

    def stage(self, part: StagePart) -> bool:
        """Takes one shard of a stage; see `Stages.add`."""
        return self._stages.add(part)

    # What a checkpoint calls.

    @contextmanager
    def durable(self) -> Iterator[None]:
        """Keeps what a checkpoint is to hold from changing while the block runs: of one iteration, on all shards."""
        with self._durable:
            yield

    def state(self) -> MachineState:
        """What a checkpoint keeps, but for the vectors. To be called within `durable`."""
        kept = self._standing.kept
        if POINT in self._standing.vectors:
            kept = {**kept, POINT: self._standing.vectors[POINT]}
        standing = VectorTable(kept, self._standing.oldest, self._standing.newest)
        return MachineState(self.coordinator_epoch, self.iteration, self.text, standing)

    def parameters_to_keep(self, shard_id: int) -> Floats | None:
        """The accepted point, which a checkpoint keeps as the shard's parameters; None before there is one.

        What the shard holds meanwhile is a trial. To be called within `durable`; not to be kept or written to.
        """
        point = self._vectors[shard_id].arrays.get(POINT)
        return None if point is None else point.astype("f4", copy=False)

    def vectors_to_keep(self, shard_id: int) -> dict[str, Vector]:
        """The gradient at the accepted point and the history; to be called within `durable`, not to be written to."""
        arrays = self._vectors[shard_id].arrays
        return {name: arrays[name] for name in self._standing.kept}

    def restore(self, state: MachineState) -> None:
        """Goes on from what a checkpoint kept; the shards' parameters are the accepted point. Takes its arrays over.

        Stages and other vectors are gone: a coordinator that comes back begins the iteration anew.
        """
        with self._lock:
            vectors = {}
            for shard_id, shard in self._shards.items():
                arrays = dict(state.vectors.get(shard_id, {}))
                if POINT in state.standing.vectors and POINT not in arrays:
                    arrays[POINT] = _point_of(shard)
                vectors[shard_id] = ShardVectors(shard, arrays)
            self._vectors = vectors
            self._standing = state.standing
            self.coordinator_epoch, self.iteration, self.text = state.coordinator_epoch, state.iteration, state.text

    # What follows is called under _lock.

    def _execute(self, program: Program, run_all: RunAll) -> tuple[float, ...]:
        folds: list[list[dict[int, Floats]]] = []

        def take_stages(stage_ids: Iterable[int]) -> None:
            folds.append(self._stages.complete(stage_ids))

        validated = validate(program, self._standing, take_stages=take_stages, require_room=self._require_room)
        self._require_possible(program, validated)
        script = Script(program.instructions, self._standing.oldest, self._standing.newest, folds)
        # Nothing may fail once the first shard has begun.
        memory = {shard_id: vectors.prepare(script) for shard_id, vectors in self._vectors.items()}
        with self._durable if validated.durable else nullcontext():
            jobs = [_job(vectors, script, memory[shard_id]) for shard_id, vectors in self._vectors.items()]
            answers = run_all(jobs)
            self._standing = validated.standing
            if program.commits_iteration:
                self.iteration, self.text = program.commits_iteration, program.state
        for instruction in program.instructions:
            if instruction.operation == Operation.BEGIN_PASS:
                self._stages.begin(instruction.count)
        return _together(program, answers)

    def _require_possible(self, program: Program, validated: Validated) -> None:
        if program.commits_iteration > self.iteration + 1:
            raise BadRequest(
                f"the program commits iteration {program.commits_iteration}, and this server is at iteration "
                f"{self.iteration}: it has lost what was committed since, so restore all servers from checkpoints of "
                "one iteration"
            )
        if validated.moves and any(shard.finished for shard in self._shards.values()):
            raise RunFinished("the run is finished: its parameters move no more")

    def _require_room(self, bytes_per_parameter: int) -> None:
        num_bytes = bytes_per_parameter * self._num_parameters + self._stages.bytes
        if num_bytes > self._bytes_max:
            raise LimitExceeded(
                f"vectors and stages would take {num_bytes} bytes, this server keeps {self._bytes_max} at the most: "
                "raise --max-vector-bytes, or keep a shorter history (--history)"
            )


def _job(vectors: ShardVectors, script: Script, memory: Sequence[Vector]) -> Callable[[], list[Answer]]:
    return lambda: vectors.execute(script, memory)


def _point_of(shard: Shard) -> Vector:
    def copy(_: int, parameters: Floats) -> Vector:
        point = make_vector(shard.length, Precision.FLOAT32)
        point[:] = parameters
        return point

    return shard.read(copy)


def _together(program: Program, answers: Sequence[Sequence[Answer]]) -> tuple[float, ...]:
    """What the shards answered, each number summed in float64 in the order of the shards; for NORM_INF the largest."""
    scalars: list[float] = []
    for index, instruction in enumerate(program.instructions):
        parts = [answer[index] for answer in answers]
        combine = _largest if instruction.operation == Operation.NORM_INF else _sum
        scalars.extend(combine([part[place] for part in parts]) for place in range(num_answers(instruction)))
    return tuple(scalars)


def _sum(numbers: Sequence[float]) -> float:
    total = 0.0
    # Not `sum`, which compensates for rounding from Python 3.12 on: the same bits everywhere.
    for number in numbers:
        total += number
    return total


def _largest(numbers: Sequence[float]) -> float:
    return math.nan if any(math.isnan(number) for number in numbers) else max(numbers, default=0.0)
