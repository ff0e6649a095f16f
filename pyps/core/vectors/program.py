"""Programs of instructions on vectors, and whether one can be executed: found out as a whole, before any of it is."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pyps_wire.errors import BadRequest

# The vector that stands for the shards' parameters: any operation may read it, MOVE alone writes it.
PARAMETERS = "parameters"


class Operation(enum.IntEnum):
    """What an instruction does; x, y, z and a are its left, right, target and scalar. The values are the protocol's."""

    ALLOC = 1  # makes z, zeroed; z must not exist
    FREE = 2  # forgets z
    FILL = 3  # z = a, in every element
    COPY = 4  # z = x
    SCALE = 5  # z = a z
    ADD = 6  # z = x + y
    SUB = 7  # z = x - y
    MUL = 8  # z = x y, element by element
    AXPY = 9  # z = z + a x
    DOT = 10  # answers with the sum of x y
    NORM1 = 11  # answers with the sum of |x|
    NORM_INF = 12  # answers with the largest |x|
    COMBINE = 13  # z = the sum of scalars[i] names[i]
    GRAM = 14  # answers with the sums of the products of each of names with each of others, row by row
    FOLD = 15  # z = the sum of the stages, in the order of stage_ids, divided by count
    PUSH_HISTORY = 16  # moves x and y into the history as its newest pair; x and y are gone then
    DROP_OLDEST = 17  # forgets the oldest pair
    MOVE = 18  # parameters = x + a y, and every version grows by one; y may be empty
    BEGIN_PASS = 19  # forgets all stages, and takes from now on those of pass count


class Precision(enum.IntEnum):
    """How the numbers of a vector are kept. The values are the protocol's."""

    FLOAT32 = 1
    FLOAT64 = 2


@dataclass(frozen=True)
class Instruction:
    """One operation, and what it needs; what an operation does not name above is ignored."""

    operation: Operation
    target: str = ""
    left: str = ""
    right: str = ""
    scalar: float = 0.0
    precision: Precision = Precision.FLOAT32
    names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    scalars: tuple[float, ...] = ()
    stage_ids: tuple[int, ...] = ()
    count: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Returns it as JSON can hold it, without what is at its default."""
        plain: dict[str, Any] = {"operation": self.operation.name}
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if value != each.default:
                plain[each.name] = value.name if isinstance(value, Precision) else _plain(value)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Instruction:
        """The reverse of `to_plain`."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        given["operation"] = Operation[given["operation"]]
        if "precision" in given:
            given["precision"] = Precision[given["precision"]]
        return cls(**given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# A name fits into messages and files: letters, digits and _, 16 characters at most.
_NAME = re.compile(r"[A-Za-z0-9_]{1,16}")
_PAIR_NAME = re.compile(r"[sy]\d+")
STATE_BYTES_MAX = 64 * 1024
# Numbers that a program may answer with: the products of a history of 180 pairs take less.
ANSWERS_MAX = 65_536
# Instructions of a program, and names, stages and scalars that they list in all.
INSTRUCTIONS_MAX = 10_000
LISTED_MAX = 200_000
# The accepted point and its gradient: what a coordinator that comes back goes on from, with the history.
POINT, GRADIENT = "x", "g"


@dataclass(frozen=True)
class Program:
    """Instructions to be executed in one go, all of them or none."""

    coordinator_epoch: int
    op_seq: int
    instructions: tuple[Instruction, ...]
    # The iteration that they complete, 0 for none.
    commits_iteration: int = 0
    # With a commit: what a coordinator that comes back needs to know.
    state: str = ""


@dataclass(frozen=True)
class Operands:
    """Which fields of an instruction name vectors."""

    # One each, and a list each, that are read.
    reads: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    # Whether `target` is a vector that is there and is written.
    writes: bool = False
    # Whether the instruction answers with numbers.
    answers: bool = False


OPERANDS: Mapping[Operation, Operands] = {
    Operation.ALLOC: Operands(),
    Operation.FREE: Operands(),
    Operation.FILL: Operands(writes=True),
    Operation.COPY: Operands(("left",), writes=True),
    Operation.SCALE: Operands(writes=True),
    Operation.ADD: Operands(("left", "right"), writes=True),
    Operation.SUB: Operands(("left", "right"), writes=True),
    Operation.MUL: Operands(("left", "right"), writes=True),
    Operation.AXPY: Operands(("left",), writes=True),
    Operation.DOT: Operands(("left", "right"), answers=True),
    Operation.NORM1: Operands(("left",), answers=True),
    Operation.NORM_INF: Operands(("left",), answers=True),
    Operation.COMBINE: Operands(writes=True, lists=("names",)),
    Operation.GRAM: Operands(answers=True, lists=("names", "others")),
    Operation.FOLD: Operands(writes=True),
    Operation.PUSH_HISTORY: Operands(("left", "right")),
    Operation.DROP_OLDEST: Operands(),
    Operation.MOVE: Operands(("left",)),
    Operation.BEGIN_PASS: Operands(),
}


def names_read(instruction: Instruction) -> list[str]:
    """Returns the vectors that an instruction reads besides its target, in the order of its fields."""
    operands = OPERANDS[instruction.operation]
    names = [getattr(instruction, name) for name in operands.reads]
    if instruction.operation == Operation.MOVE and instruction.right:
        names.append(instruction.right)
    return [*names, *(name for part in operands.lists for name in getattr(instruction, part))]


def num_answers(instruction: Instruction) -> int:
    """Returns how many numbers an instruction answers with."""
    if instruction.operation == Operation.GRAM:
        return len(instruction.names) * len(instruction.others)
    return 1 if OPERANDS[instruction.operation].answers else 0


@dataclass(frozen=True)
class VectorTable:
    """Which vectors there are on every shard of a server, and how each is kept."""

    vectors: Mapping[str, Precision] = field(default_factory=dict)
    # The history's pairs are s<k>, y<k> for oldest <= k <= newest; newest = oldest - 1 where there is none.
    oldest: int = 1
    newest: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        """What all vectors take."""
        return sum(4 if precision == Precision.FLOAT32 else 8 for precision in self.vectors.values())

    @property
    def history(self) -> list[str]:
        """The names of the pairs, from the oldest to the newest."""
        return [f"{letter}{k}" for k in range(self.oldest, self.newest + 1) for letter in "sy"]

    @property
    def kept(self) -> dict[str, Precision]:
        """The vectors that a checkpoint keeps, with the point where the shards' parameters cannot stand for it."""
        names = [GRADIENT, *self.history]
        if self.vectors.get(POINT) == Precision.FLOAT64:
            names.append(POINT)
        return {name: self.vectors[name] for name in names if name in self.vectors}


@dataclass(frozen=True)
class Validated:
    """What a program comes to, should it be executed."""

    standing: VectorTable
    # Whether it changes what a checkpoint keeps of the coordinator's.
    durable: bool
    moves: bool


def validate(
    program: Program,
    standing: VectorTable,
    *,
    take_stages: Callable[[Iterable[int]], None],
    require_room: Callable[[int], None],
) -> Validated:
    """Returns what the program comes to. Raises BadRequest, naming the instruction, where it cannot be executed.

    `take_stages` is told the stages of each FOLD and raises where one is not complete here; `require_room` raises where
    vectors of so many bytes a parameter are too large.
    """
    _require_state(program)
    _require_few(program)
    draft = _Draft(standing, take_stages, require_room, durable=program.commits_iteration > 0)
    for number, instruction in enumerate(program.instructions, start=1):
        draft.where = f"instruction {number} ({instruction.operation.name})"
        draft.add(instruction)
    moves = any(instruction.operation == Operation.MOVE for instruction in program.instructions)
    return Validated(draft.standing, draft.durable, moves)


class _Draft:
    """The standing as it will be after each instruction."""

    def __init__(
        self,
        standing: VectorTable,
        take_stages: Callable[[Iterable[int]], None],
        require_room: Callable[[int], None],
        *,
        durable: bool,
    ) -> None:
        self.vectors = dict(standing.vectors)
        self.oldest, self.newest = standing.oldest, standing.newest
        self.durable = durable
        self.where = ""
        self._take_stages = take_stages
        self._require_room = require_room
        self._stages_gone = False
        # Of all vectors that the program makes: their memory is there before it begins, also for those that it frees.
        self._made_bytes = 0

    @property
    def standing(self) -> VectorTable:
        return VectorTable(self.vectors, self.oldest, self.newest)

    def add(self, instruction: Instruction) -> None:
        for value in (instruction.scalar, *instruction.scalars):
            self._require(math.isfinite(value), f"has the scalar {value}; expected a finite number")
        for name in names_read(instruction):
            if name != PARAMETERS:
                self._require_there(name)
        if OPERANDS[instruction.operation].writes:
            self._require_writable(instruction.target)
        check = _CHECKS.get(instruction.operation)
        if check is not None:
            check(self, instruction)

    def alloc(self, instruction: Instruction) -> None:
        name = instruction.target
        fits = bool(_NAME.fullmatch(name))
        self._require(fits, f"makes the vector {name!r}; expected letters, digits and _, 16 of them at most")
        reserved = name == PARAMETERS or bool(_PAIR_NAME.fullmatch(name))
        self._require(
            not reserved,
            f"makes the vector {name!r}; that name stands for the shards' parameters or a pair of the history: "
            "choose another",
        )
        self._require(name not in self.vectors, f"makes the vector {name!r}, which is there already: FREE it first")
        self.vectors[name] = instruction.precision
        self._touch(name)
        self._made_bytes += VectorTable({name: instruction.precision}).bytes_per_parameter
        self._require_room(max(self.standing.bytes_per_parameter, self._made_bytes))

    def free(self, instruction: Instruction) -> None:
        name = instruction.target
        self._require_there(name)
        self._require_loose(name, "forgets")
        self._touch(name)
        del self.vectors[name]

    def combine(self, instruction: Instruction) -> None:
        names, scalars = len(instruction.names), len(instruction.scalars)
        self._require(
            names == scalars > 0,
            f"has {names} names and {scalars} scalars; expected one scalar for each name, and one name at least",
        )

    def gram(self, instruction: Instruction) -> None:
        self._require(
            bool(instruction.names and instruction.others),
            f"has {len(instruction.names)} names and {len(instruction.others)} others; expected one of each at least",
        )

    def fold(self, instruction: Instruction) -> None:
        stage_ids = instruction.stage_ids
        self._require(instruction.count > 0, "divides by a count of 0; expected the examples behind the stages")
        self._require(bool(stage_ids), "names no stage; expected those that AwaitPass told")
        self._require(len(set(stage_ids)) == len(stage_ids), "names a stage twice; expected each once")
        self._require(not self._stages_gone, "comes after a BEGIN_PASS of its own program, which forgets all stages")
        try:
            self._take_stages(stage_ids)
        except BadRequest as error:
            raise BadRequest(f"{self.where} {error}") from None

    def push_history(self, instruction: Instruction) -> None:
        left, right = instruction.left, instruction.right
        for name in (left, right):
            self._require(name != PARAMETERS, f"moves {PARAMETERS!r} into the history; expected a vector")
            self._require_loose(name, "moves")
        self._require(left != right, f"moves {left!r} as both halves of a pair; expected two vectors")
        self.newest += 1
        self.vectors[f"s{self.newest}"] = self.vectors.pop(left)
        self.vectors[f"y{self.newest}"] = self.vectors.pop(right)
        self.durable = True

    def drop_oldest(self, _: Instruction) -> None:
        self._require(self.oldest <= self.newest, "finds no pair in the history; expected one at least")
        del self.vectors[f"s{self.oldest}"], self.vectors[f"y{self.oldest}"]
        self.oldest += 1
        self.durable = True

    def move(self, _: Instruction) -> None:
        # Without an accepted point a checkpoint keeps the parameters themselves.
        self.durable = self.durable or POINT not in self.vectors

    def begin_pass(self, _: Instruction) -> None:
        self._stages_gone = True

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise BadRequest(f"{self.where} {what}; nothing of the program was executed")

    def _require_there(self, name: str) -> None:
        there = ", ".join(sorted(self.vectors)) or "none"
        self._require(name in self.vectors, f"names the vector {name!r}, which is not there; there are {there}")

    def _require_writable(self, name: str) -> None:
        self._require(name != PARAMETERS, f"writes {PARAMETERS!r}; MOVE alone does that")
        self._require_there(name)
        self._touch(name)

    def _require_loose(self, name: str, verb: str) -> None:
        in_history = bool(_PAIR_NAME.fullmatch(name))
        self._require(not in_history, f"{verb} {name!r}, which is of the history; DROP_OLDEST alone takes it away")

    def _touch(self, name: str) -> None:
        if name in (POINT, GRADIENT) or _PAIR_NAME.fullmatch(name):
            self.durable = True


_CHECKS: Mapping[Operation, Callable[[_Draft, Instruction], None]] = {
    Operation.ALLOC: _Draft.alloc,
    Operation.FREE: _Draft.free,
    Operation.COMBINE: _Draft.combine,
    Operation.GRAM: _Draft.gram,
    Operation.FOLD: _Draft.fold,
    Operation.PUSH_HISTORY: _Draft.push_history,
    Operation.DROP_OLDEST: _Draft.drop_oldest,
    Operation.MOVE: _Draft.move,
    Operation.BEGIN_PASS: _Draft.begin_pass,
}


def _require_few(program: Program) -> None:
    """Bounds what a program asks for before anything is made of it: a short message could ask for very much."""
    answers = sum(map(num_answers, program.instructions))
    lists = (i.names + i.others + i.stage_ids + i.scalars for i in program.instructions)
    bounds = (
        ("has", len(program.instructions), "instructions", INSTRUCTIONS_MAX),
        ("lists", sum(map(len, lists)), "names, stages and scalars", LISTED_MAX),
        ("answers with", answers, "numbers", ANSWERS_MAX),
    )
    for verb, number, what, most in bounds:
        if number > most:
            raise BadRequest(
                f"the program {verb} {number} {what}; expected {most} at most: send it in parts, or keep a shorter "
                "history (--history)"
            )


def _require_state(program: Program) -> None:
    if not program.instructions:
        raise BadRequest("the program has no instruction; expected one at least")
    num_bytes = len(program.state.encode())
    if num_bytes > STATE_BYTES_MAX:
        raise BadRequest(f"the coordinator's state has {num_bytes} bytes; expected {STATE_BYTES_MAX} at most")
    if program.state and not program.commits_iteration:
        raise BadRequest("the program brings a state but commits no iteration; send the state with a commit")
