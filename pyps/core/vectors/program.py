"""Programs of instructions on vectors, and the check that a whole program can be executed before any of it is."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyps_wire.errors import InvalidArgument

# The name of the shards' parameters: any operation may read them, only MOVE writes them.
PARAMETERS = "parameters"
# The accepted point and its gradient: a restarted coordinator continues from them and the history.
POINT, GRADIENT = "x", "g"
STATE_BYTES_MAX = 64 * 1024
# The numbers of a program's answer: the products of a history of 180 pairs are fewer.
ANSWERS_MAX = 65_536
# A program's instructions, and all names, stages and scalars that they list.
INSTRUCTIONS_MAX = 10_000
LISTED_MAX = 200_000
_NAME = re.compile(r"[A-Za-z0-9_]{1,16}")
_PAIR_NAME = re.compile(r"[sy]\d+")


class Operation(enum.IntEnum):
    """What an instruction does; x, y, z and a are its left, right, target and scalar. The values are the protocol's."""

    ALLOC = 1  # make z, zeroed; z must not exist
    COPY = 2  # z = x
    COMBINE = 3  # z = the sum of scalars[i] names[i]
    DOT = 4  # answer with the sum of x y
    NORM1 = 5  # answer with the sum of |x|
    NORM_INF = 6  # answer with the largest |x|
    GRAM = 7  # answer with the sums of the products of each of names with each of others, row by row
    FOLD = 8  # z = the sum of the stages, in the order of stage_ids, divided by count
    PUSH_HISTORY = 9  # move x and y into the history as its newest pair, after which x and y do not exist
    DROP_OLDEST = 10  # delete the oldest pair
    MOVE = 11  # parameters = x + a y, and every version grows by one; y may be empty
    BEGIN_PASS = 12  # delete all stages, and accept those of pass count from now on


@dataclass(frozen=True)
class Instruction:
    """One operation and its operands; an operation ignores the fields that it does not name above."""

    operation: Operation
    target: str = ""
    left: str = ""
    right: str = ""
    scalar: float = 0.0
    names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    scalars: tuple[float, ...] = ()
    stage_ids: tuple[int, ...] = ()
    count: int = 0

    @property
    def reads(self) -> tuple[str, ...]:
        """The vectors that it reads, apart from `target`."""
        match self.operation:
            case Operation.DOT | Operation.PUSH_HISTORY:
                return self.left, self.right
            case Operation.MOVE:
                return (self.left, self.right) if self.right else (self.left,)
            case Operation.COPY | Operation.NORM1 | Operation.NORM_INF:
                return (self.left,)
            case Operation.COMBINE:
                return self.names
            case Operation.GRAM:
                return self.names + self.others
        return ()

    @property
    def num_answers(self) -> int:
        if self.operation == Operation.GRAM:
            return len(self.names) * len(self.others)
        return int(self.operation in (Operation.DOT, Operation.NORM1, Operation.NORM_INF))


@dataclass(frozen=True)
class Program:
    """Instructions that a server executes all or none of."""

    coordinator_epoch: int
    op_seq: int
    instructions: tuple[Instruction, ...]
    # The iteration that they complete, 0 for none.
    commits_iteration: int = 0
    # With a commit: the state for a restarted coordinator.
    state: str = ""


@dataclass(frozen=True)
class VectorTable:
    """The vectors that every shard of a server has, each float32."""

    names: frozenset[str] = frozenset()
    # The history's pairs are s<k>, y<k> for oldest <= k <= newest; newest = oldest - 1 in an empty one.
    oldest: int = 1
    newest: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        return 4 * len(self.names)

    @property
    def num_pairs(self) -> int:
        return self.newest - self.oldest + 1

    @property
    def kept(self) -> list[str]:
        """The vectors that a checkpoint stores in addition to x, its parameters: the gradient and the history."""
        pairs = [f"{letter}{k}" for k in range(self.oldest, self.newest + 1) for letter in "sy"]
        return [name for name in (GRADIENT, *pairs) if name in self.names]


def validate(
    program: Program,
    table: VectorTable,
    *,
    take_stages: Callable[[Iterable[int]], None],
    require_room: Callable[[int], None],
) -> tuple[VectorTable, bool]:
    """Return the vectors after a program, and whether it changes anything that a checkpoint keeps.

    Args:
        program: The program to execute.
        table: The vectors before it.
        take_stages: Called with the stages of each FOLD; raises where one is incomplete.
        require_room: Called with bytes per parameter; raises where vectors of that size are too large.

    Raises:
        InvalidArgument: An instruction, which is named, cannot be executed.
    """
    _require_bounds(program)
    draft = _Draft(table, take_stages, require_room, durable=program.commits_iteration > 0)
    for number, instruction in enumerate(program.instructions, start=1):
        draft.add(instruction, where=f"instruction {number} ({instruction.operation.name})")
    return draft.table, draft.durable


class _Draft:
    """The table of vectors as it will be after each instruction."""

    def __init__(
        self,
        table: VectorTable,
        take_stages: Callable[[Iterable[int]], None],
        require_room: Callable[[int], None],
        *,
        durable: bool,
    ) -> None:
        self.durable = durable
        self._names = set(table.names)
        self._oldest, self._newest = table.oldest, table.newest
        self._where = ""
        self._take_stages = take_stages
        self._require_room = require_room
        self._stages_gone = False
        # All vectors that the program makes are allocated before it begins, also those that it deletes again.
        self._num_made = 0

    @property
    def table(self) -> VectorTable:
        return VectorTable(frozenset(self._names), self._oldest, self._newest)

    def add(self, instruction: Instruction, *, where: str) -> None:
        self._where = where
        for value in (instruction.scalar, *instruction.scalars):
            self._require(math.isfinite(value), f"has the scalar {value}; expected a finite number")
        for name in instruction.reads:
            if name != PARAMETERS:
                self._require_exists(name)
        if instruction.operation in (Operation.COPY, Operation.COMBINE, Operation.FOLD):
            self._write(instruction.target)
        match instruction.operation:
            case Operation.ALLOC:
                self._alloc(instruction.target)
            case Operation.COMBINE:
                names, scalars = len(instruction.names), len(instruction.scalars)
                expected = "expected one scalar for each name, and one name at least"
                self._require(names == scalars > 0, f"has {names} names and {scalars} scalars; {expected}")
            case Operation.GRAM:
                names, others = len(instruction.names), len(instruction.others)
                expected = "expected one of each at least"
                self._require(names * others > 0, f"has {names} names and {others} others; {expected}")
            case Operation.FOLD:
                self._fold(instruction)
            case Operation.PUSH_HISTORY:
                self._push_history(instruction.left, instruction.right)
            case Operation.DROP_OLDEST:
                self._require(self._oldest <= self._newest, "finds no pair in the history; expected one at least")
                self._names -= {f"s{self._oldest}", f"y{self._oldest}"}
                self._oldest += 1
                self.durable = True
            case Operation.MOVE:
                # Without an accepted point a checkpoint keeps the parameters themselves.
                self.durable = self.durable or POINT not in self._names
            case Operation.BEGIN_PASS:
                self._stages_gone = True

    def _alloc(self, name: str) -> None:
        fits = bool(_NAME.fullmatch(name))
        self._require(fits, f"makes the vector {name!r}; expected letters, digits and _, 16 of them at most")
        self._require(
            name != PARAMETERS and not _PAIR_NAME.fullmatch(name),
            f"makes the vector {name!r}, a name reserved for the shards' parameters or a pair of the history: "
            "choose another",
        )
        self._require(name not in self._names, f"makes the vector {name!r}, which exists already")
        self._names.add(name)
        self._note_durable(name)
        self._num_made += 1
        self._require_room(4 * max(len(self._names), self._num_made))

    def _fold(self, instruction: Instruction) -> None:
        stage_ids = instruction.stage_ids
        self._require(instruction.count > 0, "divides by a count of 0; expected the examples behind the stages")
        self._require(bool(stage_ids), "names no stage; expected those that AwaitPass returned")
        self._require(len(set(stage_ids)) == len(stage_ids), "names a stage twice; expected each once")
        self._require(not self._stages_gone, "follows a BEGIN_PASS of its own program, which deletes all stages")
        try:
            self._take_stages(stage_ids)
        except InvalidArgument as error:
            raise InvalidArgument(f"{self._where} {error}") from None

    def _push_history(self, left: str, right: str) -> None:
        for name in (left, right):
            self._require(name != PARAMETERS, f"moves {PARAMETERS!r} into the history; expected a vector")
            in_history = bool(_PAIR_NAME.fullmatch(name))
            self._require(not in_history, f"moves {name!r}, which is in the history already")
        self._require(left != right, f"moves {left!r} as both halves of a pair; expected two vectors")
        self._newest += 1
        self._names -= {left, right}
        self._names |= {f"s{self._newest}", f"y{self._newest}"}
        self.durable = True

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvalidArgument(f"{self._where} {what}; nothing of the program was executed")

    def _require_exists(self, name: str) -> None:
        known = ", ".join(sorted(self._names)) or "none"
        self._require(name in self._names, f"names the vector {name!r}, which does not exist; the vectors are {known}")

    def _write(self, name: str) -> None:
        self._require(name != PARAMETERS, f"writes {PARAMETERS!r}; only MOVE does that")
        self._require_exists(name)
        self._note_durable(name)

    def _note_durable(self, name: str) -> None:
        self.durable |= name in (POINT, GRADIENT) or bool(_PAIR_NAME.fullmatch(name))


def _require_bounds(program: Program) -> None:
    """Refuse an empty program, and one with too many instructions, names or answers."""
    if not program.instructions:
        raise InvalidArgument("the program has no instruction; expected one at least")
    num_bytes = len(program.state.encode())
    if num_bytes > STATE_BYTES_MAX:
        raise InvalidArgument(f"the coordinator's state has {num_bytes} bytes; expected {STATE_BYTES_MAX} at most")
    if program.state and not program.commits_iteration:
        raise InvalidArgument("the program brings a state but commits no iteration; send the state with a commit")
    lists = (i.names + i.others + i.stage_ids + i.scalars for i in program.instructions)
    bounds = (
        ("has", len(program.instructions), "instructions", INSTRUCTIONS_MAX),
        ("lists", sum(map(len, lists)), "names, stages and scalars", LISTED_MAX),
        ("answers with", sum(i.num_answers for i in program.instructions), "numbers", ANSWERS_MAX),
    )
    for verb, number, what, most in bounds:
        if number > most:
            raise InvalidArgument(
                f"the program {verb} {number} {what}; expected {most} at most: send it in parts, or keep a shorter "
                "history (--history)"
            )


def combine_answers(instructions: Iterable[Instruction], parts: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of several shards' or servers' answers, in float64 in their order; for NORM_INF the largest."""
    operations = [instruction.operation for instruction in instructions for _ in range(instruction.num_answers)]
    return [
        _largest(numbers) if operation == Operation.NORM_INF else _sum(numbers)
        for operation, numbers in zip(operations, zip(*parts, strict=True), strict=True)
    ]


def _sum(numbers: Iterable[float]) -> float:
    total = 0.0
    # Not `sum`, which compensates for rounding from Python 3.12 on: the same bits everywhere.
    for number in numbers:
        total += number
    return total


def _largest(numbers: Sequence[float]) -> float:
    return math.nan if any(math.isnan(number) for number in numbers) else max(numbers)
