"""The vectors of one server's shards, and Sandblaster's programs on them (Dean et al. 2012, section 4.2).

A coordinator sends programs and receives numbers. A program is checked as a whole, then executed shard by shard.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hmac import compare_digest
from typing import TypeAlias

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_copy, aligned_zeros
from pyps.core.shard import Shard
from pyps.core.vectors.program import (
    PARAMETERS,
    POINT,
    Instruction,
    Operation,
    Program,
    VectorTable,
    combine_answers,
    validate,
)
from pyps.core.vectors.stages import Stages
from pyps_wire.errors import InvalidArgument, LimitExceeded, NotAllowed, RunFinished, Superseded

# The upper bound of a plan's counts: no product of them overflows.
_COUNT_MAX = 2**32 - 1
# The numbers that an instruction answers with, none for most.
Answer: TypeAlias = list[float]
Job: TypeAlias = Callable[[], list[Answer]]


@dataclass(frozen=True)
class Plan:
    """The memory that a coordinator needs at most."""

    history_pairs: int
    # Vectors outside the history.
    vectors: int
    # Staged sums of gradients at once.
    stages: int
    # Portions of a pass and workers, from which `stages` was computed: each worker may add a stage of fewer portions.
    num_portions: int = 0
    num_workers: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        return 4 * (2 * self.history_pairs + self.vectors + self.stages)


def require_plan_fits(plan: Plan, *, num_parameters: int, bytes_max: int, existing_pairs: int = 0) -> int:
    """Return the bytes that a plan takes on a server of `num_parameters`.

    `existing_pairs` is the history of an earlier coordinator, which the first commit shortens. Raise LimitExceeded for
    a plan above `bytes_max`; the message names settings that take less.
    """
    for name in ("history_pairs", "vectors", "stages", "num_portions"):
        value = getattr(plan, name)
        if not 0 <= value <= _COUNT_MAX:
            raise InvalidArgument(f"the plan has {name} {value}; expected 0 to {_COUNT_MAX}")
    left = ""
    if existing_pairs > plan.history_pairs:
        left = f" (left by an earlier coordinator; {plan.history_pairs} are kept once an iteration is done)"
        plan = replace(plan, history_pairs=existing_pairs)
    num_bytes = plan.bytes_per_parameter * num_parameters
    if num_bytes > bytes_max:
        raise LimitExceeded(
            f"{plan.history_pairs} pairs of history{left}, {plan.vectors} further vectors and {plan.stages} staged "
            f"sums of gradients take {num_bytes} bytes for the {num_parameters} parameters of this server, which keeps "
            f"{bytes_max} at the most: this would fit: "
            + "; or ".join(_remedies(plan, num_parameters, bytes_max=bytes_max, shortest=max(1, existing_pairs)))
        )
    return num_bytes


def _remedies(plan: Plan, num_parameters: int, *, bytes_max: int, shortest: int) -> Iterator[str]:
    """Yield settings of the coordinator, with `shortest` pairs of history or more, whose plan would fit."""
    room = bytes_max // (4 * num_parameters) - plan.vectors
    history = min((room - plan.stages) // 2, plan.history_pairs)
    stages = min(room - 2 * plan.history_pairs, plan.stages)
    both = min(room - 2 * shortest, plan.stages)
    if history >= shortest:
        yield f"--history {history}"
    if stages >= 1:
        yield _fewer_stages(plan, stages)
    elif history < shortest and both >= 1:
        yield f"--history {shortest} with {_fewer_stages(plan, both)}"
    yield f"more servers, or servers started with --max-vector-bytes {plan.bytes_per_parameter * num_parameters}"


def _fewer_stages(plan: Plan, stages: int) -> str:
    """Return settings of the coordinator that need no more than `stages` stages at once."""
    if not plan.num_portions:
        return f"{stages} staged sums at once"
    settings = [f"--portions {stages}"] if stages < plan.num_portions else []
    if stages > plan.num_workers:
        settings.append(f"--fold group:k={math.ceil(plan.num_portions / (stages - plan.num_workers))}")
    return f"{' or '.join(settings)} ({stages} staged sums at once)"


# VectorMachine has a property `bytes`.
Secret: TypeAlias = bytes
# Runs jobs that share no data, possibly in parallel; returns their results in order.
RunAll: TypeAlias = Callable[[Sequence[Job]], list[list[Answer]]]


@dataclass(frozen=True)
class Attachment:
    """The state of a machine when a coordinator attaches."""

    # The number of the coordinator, from 1.
    coordinator_epoch: int
    # The iterations committed here, and the state that the last one's coordinator saved.
    iteration: int
    state: str
    # Names of the vectors.
    vectors: tuple[str, ...]
    num_parameters: int
    # The bytes that the plan takes.
    planned_bytes: int


@dataclass(frozen=True)
class Results:
    """The answers of a program in order: this server's part of each number."""

    scalars: tuple[float, ...] = ()
    # The largest version among the shards.
    version: int = 0


@dataclass(frozen=True)
class MachineState:
    """The part of a machine that a checkpoint keeps."""

    coordinator_epoch: int = 0
    iteration: int = 0
    text: str = ""
    table: VectorTable = field(default_factory=VectorTable)
    # By shard and name; read from a checkpoint.
    vectors: Mapping[int, Mapping[str, Floats]] = field(default_factory=dict)


def in_sequence(jobs: Sequence[Job]) -> list[list[Answer]]:
    return [job() for job in jobs]


class VectorMachine:
    """The vectors of a coordinator on one server's shards. Every method may be called from any thread."""

    def __init__(self, shards: Mapping[int, Shard], *, bytes_max: int, logged: bool = False) -> None:
        """Make a machine without vectors; `bytes_max` is for vectors and stages.

        `logged` is whether the server keeps an update log, which cannot hold instructions.
        """
        self._shards = {shard_id: shards[shard_id] for shard_id in sorted(shards)}
        self._bytes_max = bytes_max
        self._logged = logged
        lengths = {shard_id: shard.length for shard_id, shard in self._shards.items()}
        self._num_parameters = sum(lengths.values())
        # Workers add to them.
        self.stages = Stages(lengths, room=lambda: bytes_max - self._vector_bytes)
        # Held while a program is executed. Taken before _durable and the shards' locks, never after.
        self._lock = threading.Lock()
        # Held while a program changes what a checkpoint keeps, and while a checkpoint copies it.
        self._durable = threading.Lock()
        # Guarded by _lock; replaced as a whole and read without it.
        self.coordinator_epoch = 0
        self.iteration = 0
        self.text = ""
        # The last coordinator that attached since this server's start, and its secret.
        self._attached = (-1, b"")
        self._op_seq = 0
        self._results = Results()
        self._table = VectorTable()
        self._vectors = {shard_id: ShardVectors(shard) for shard_id, shard in self._shards.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._table.names))

    @property
    def bytes(self) -> int:
        """The memory of vectors and stages."""
        return self._vector_bytes + self.stages.bytes

    @property
    def _vector_bytes(self) -> int:
        return self._table.bytes_per_parameter * self._num_parameters

    # For a coordinator.

    def attach(self, plan: Plan, *, coordinator_epoch: int = 0, at_least: int = 1, secret: Secret = b"") -> Attachment:
        """Make the caller the coordinator, in place of any before it.

        Args:
            plan: The memory that it needs.
            coordinator_epoch: 0 for the next one.
            at_least: The smallest next epoch: a restored machine does not know all earlier ones.
            secret: Further calls in this epoch must show it.

        Raises:
            LimitExceeded: The plan is too large; the message names settings that fit.
            Superseded: A later coordinator attached before.
            NotAllowed: The epoch is the current one, and the secret is not.
        """
        if self._logged:
            raise InvalidArgument(
                "this server keeps an update log, which cannot hold instructions on vectors: start it without "
                "--update-log"
            )
        with self._lock:
            planned_bytes = require_plan_fits(
                plan,
                num_parameters=self._num_parameters,
                bytes_max=self._bytes_max,
                existing_pairs=self._table.num_pairs,
            )
            epoch = coordinator_epoch or max(self.coordinator_epoch + 1, at_least)
            if epoch > self.coordinator_epoch:
                self.coordinator_epoch, self._op_seq, self._results = epoch, 0, Results()
                self._attached = epoch, secret
                # The old stages will not be folded, and the plan needs their memory.
                self.stages.begin(self.stages.pass_)
            self.require_coordinator(epoch, secret)
            return Attachment(epoch, self.iteration, self.text, self.names, self._num_parameters, planned_bytes)

    def require_coordinator(self, coordinator_epoch: int, secret: Secret) -> None:
        """Refuse an epoch that never attached (InvalidArgument), an earlier one (Superseded), and a wrong secret."""
        if coordinator_epoch > self.coordinator_epoch:
            raise InvalidArgument(
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
                "one of AttachReply, or attach, which begins a life of its own"
            )

    def execute(self, program: Program, *, run_all: RunAll = in_sequence, secret: Secret = b"") -> Results:
        """Execute a program on all shards; return the sums of their answers, added in the order of the shards.

        A retry of the last program gets its answer. A program that commits an earlier iteration is not executed. A
        program that changes what a checkpoint keeps waits while a checkpoint is copied.

        Raises:
            InvalidArgument: An instruction cannot be executed; none was.
            LimitExceeded: There is too little memory; no instruction was executed.
            Superseded: Another coordinator attached since.
        """
        with self._lock:
            self.require_coordinator(program.coordinator_epoch, secret)
            if program.op_seq == self._op_seq > 0:
                return self._results
            if program.op_seq != self._op_seq + 1:
                raise InvalidArgument(
                    f"the program has op_seq {program.op_seq}, the last executed here had {self._op_seq}: expected "
                    f"{self._op_seq + 1}, or {self._op_seq} for a retry"
                )
            committed = 0 < program.commits_iteration <= self.iteration
            scalars = () if committed else self._execute(program, run_all)
            version = max((shard.version for shard in self._shards.values()), default=0)
            self._op_seq, self._results = program.op_seq, Results(scalars, version)
            return self._results

    # For a checkpoint.

    def durable(self) -> AbstractContextManager[object]:
        """Return a context in which nothing changes that a checkpoint keeps, on all shards."""
        return self._durable

    def state(self) -> MachineState:
        """Return the state for a checkpoint, without the vectors. Call it within `durable`."""
        table = self._table
        names = frozenset(table.kept) | (table.names & {POINT})
        return MachineState(self.coordinator_epoch, self.iteration, self.text, replace(table, names=names))

    def parameters_to_keep(self, shard_id: int) -> Floats | None:
        """Return the accepted point, since the shard may hold a trial; None before the first. See `vectors_to_keep`."""
        return self._vectors[shard_id].arrays.get(POINT)

    def vectors_to_keep(self, shard_id: int) -> dict[str, Floats]:
        """Return the gradient at the accepted point and the history. Use the arrays within `durable`, to read only."""
        arrays = self._vectors[shard_id].arrays
        return {name: arrays[name] for name in self._table.kept}

    def restore(self, state: MachineState) -> None:
        """Continue from a checkpoint, whose parameters are the accepted point; the state's arrays become this object's.

        Stages and other vectors are lost: a coordinator that attaches repeats the iteration.
        """
        with self._lock:
            self._vectors = {
                shard_id: ShardVectors(shard, state.vectors.get(shard_id, {}))
                for shard_id, shard in self._shards.items()
            }
            if POINT in state.table.names:
                for shard_id, shard in self._shards.items():
                    self._vectors[shard_id].arrays[POINT] = shard.read(lambda _, parameters: aligned_copy(parameters))
            self._table = state.table
            self.coordinator_epoch, self.iteration, self.text = state.coordinator_epoch, state.iteration, state.text

    # Called under _lock.

    def _execute(self, program: Program, run_all: RunAll) -> tuple[float, ...]:
        folds: list[list[dict[int, Floats]]] = []

        def take_stages(stage_ids: Iterable[int]) -> None:
            folds.append(self.stages.complete(stage_ids))

        table, durable = validate(program, self._table, take_stages=take_stages, require_room=self._require_room)
        self._require_possible(program)
        # Nothing may fail once the first shard has begun, so all memory is allocated before.
        num_new = sum(instruction.operation == Operation.ALLOC for instruction in program.instructions)
        jobs = [
            partial(
                vectors.execute,
                program.instructions,
                table=self._table,
                memory=[aligned_zeros(self._shards[shard_id].length) for _ in range(num_new)],
                folds=[[stage[shard_id] for stage in stages] for stages in folds],
            )
            for shard_id, vectors in self._vectors.items()
        ]
        with self._durable if durable else nullcontext():
            answers = run_all(jobs)
            self._table = table
            if program.commits_iteration:
                self.iteration, self.text = program.commits_iteration, program.state
        for instruction in program.instructions:
            if instruction.operation == Operation.BEGIN_PASS:
                self.stages.begin(instruction.count)
        flat = [[number for answer in of_shard for number in answer] for of_shard in answers]
        zeros = [0.0] * sum(instruction.num_answers for instruction in program.instructions)
        return tuple(combine_answers(program.instructions, flat or [zeros]))

    def _require_possible(self, program: Program) -> None:
        if program.commits_iteration > self.iteration + 1:
            raise InvalidArgument(
                f"the program commits iteration {program.commits_iteration}, and this server is at iteration "
                f"{self.iteration}: it has lost what was committed since, so restore all servers from checkpoints of "
                "one iteration"
            )
        moves = any(instruction.operation == Operation.MOVE for instruction in program.instructions)
        if moves and any(shard.finished for shard in self._shards.values()):
            raise RunFinished("the run is finished: its parameters move no more")

    def _require_room(self, bytes_per_parameter: int) -> None:
        num_bytes = bytes_per_parameter * self._num_parameters + self.stages.bytes
        if num_bytes > self._bytes_max:
            raise LimitExceeded(
                f"vectors and stages would take {num_bytes} bytes, this server keeps {self._bytes_max} at the most: "
                "raise --max-vector-bytes, or keep a shorter history (--history)"
            )


class ShardVectors:
    """The vectors of one shard by name. Called under its machine's lock."""

    def __init__(self, shard: Shard, arrays: Mapping[str, Floats] | None = None) -> None:
        self.shard = shard
        self.arrays: dict[str, Floats] = dict(arrays or {})

    def execute(
        self,
        instructions: Sequence[Instruction],
        *,
        table: VectorTable,
        memory: Sequence[Floats],
        folds: Sequence[Sequence[Floats]],
    ) -> list[Answer]:
        """Execute validated instructions in order; return the answers of each.

        `table` holds the vectors before them, `memory` an array for each ALLOC, `folds` this shard's parts of the
        stages of each FOLD.
        """
        arrays, oldest, newest = self.arrays, table.oldest, table.newest
        new_arrays, stages = iter(memory), iter(folds)
        answers: list[Answer] = []
        for instruction in instructions:
            answer: Answer = []
            match instruction.operation:
                case Operation.ALLOC:
                    arrays[instruction.target] = next(new_arrays)
                case Operation.FOLD:
                    _kernels.vector_fold(arrays[instruction.target], next(stages), float(instruction.count))
                case Operation.PUSH_HISTORY:
                    newest += 1
                    arrays[f"s{newest}"] = arrays.pop(instruction.left)
                    arrays[f"y{newest}"] = arrays.pop(instruction.right)
                case Operation.DROP_OLDEST:
                    del arrays[f"s{oldest}"], arrays[f"y{oldest}"]
                    oldest += 1
                case Operation.MOVE:
                    self.shard.rewrite(partial(self._move, instruction))
                case Operation.BEGIN_PASS:
                    # The machine executes it, for all shards.
                    pass
                case _ if PARAMETERS in instruction.reads:
                    answer = self.shard.read(partial(_compute_with_parameters, instruction, arrays))
                case _:
                    answer = _compute(instruction, arrays)
            answers.append(answer)
        return answers

    def _move(self, instruction: Instruction, parameters: Floats) -> None:
        arrays = {**self.arrays, PARAMETERS: parameters}
        right = arrays[instruction.right] if instruction.right else None
        _kernels.vector_move(parameters, arrays[instruction.left], instruction.scalar, right)


def _compute_with_parameters(
    instruction: Instruction, arrays: Mapping[str, Floats], _: int, parameters: Floats
) -> Answer:
    return _compute(instruction, {**arrays, PARAMETERS: parameters})


def _compute(instruction: Instruction, arrays: Mapping[str, Floats]) -> Answer:
    operands = [arrays[name] for name in instruction.reads]
    match instruction.operation:
        case Operation.COPY:
            _kernels.vector_copy(arrays[instruction.target], *operands)
        case Operation.COMBINE:
            _kernels.vector_combine(arrays[instruction.target], list(instruction.scalars), operands)
        case Operation.DOT:
            return [_kernels.vector_dot(*operands)]
        case Operation.NORM1:
            return [_kernels.vector_norm1(*operands)]
        case Operation.NORM_INF:
            return [_kernels.vector_norm_inf(*operands)]
        case Operation.GRAM:
            num_rows = len(instruction.names)
            products: Answer = _kernels.vector_gram(operands[:num_rows], operands[num_rows:]).ravel().tolist()
            return products
    return []
