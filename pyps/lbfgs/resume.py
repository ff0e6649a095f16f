"""What a coordinator writes down with each commit, and how the next one brings all servers to one point."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from pyps.core.vectors.program import PARAMETERS, Instruction, Operation
from pyps.lbfgs.machine import (
    GRADIENT,
    GRADIENT_CHANGE,
    POINT,
    POINT_CHANGE,
    VECTORS_FLOAT32,
    VECTORS_FLOAT64,
    Machine,
    ServerStanding,
    allocate,
    copy,
    drop_oldest,
    move,
    push_history,
)
from pyps_wire.errors import BadRequest

_FORMAT = 1


@dataclass(frozen=True)
class Pair:
    """Two differences that lie in the servers' history: s of two points, y of their gradients."""

    number: int
    sy: float  # s.y = 1 / rho
    yy: float  # y.y

    @property
    def s(self) -> str:
        """The name of s on the servers."""
        return f"s{self.number}"

    @property
    def y(self) -> str:
        """The name of y on the servers."""
        return f"y{self.number}"


@dataclass(frozen=True)
class LbfgsState:
    """The accepted point after an iteration. With the vectors x, g and the history, all that it takes to go on."""

    iteration: int = 0
    # False where the loss and the gradient at the point have yet to be computed: before the first iteration, and where
    # the coordinator found servers that could not go on together.
    evaluated: bool = False
    loss: float = 0.0
    gradient_norm: float = 0.0  # the largest element of g
    decrease: float = 0.0  # by which the last iteration lowered the loss
    steepest: bool = False  # whether it went along -g
    moved: bool = True  # whether it changed any parameter
    # Pairs that directions are made of, oldest first.
    pairs: tuple[Pair, ...] = ()
    # All that lie on the servers, of which the oldest may be of no use any more; and the number of the newest, from 1.
    held: int = 0
    newest: int = 0
    # Since the beginning: passes over the data set, pairs that were not kept, histories thrown away.
    passes: int = 0
    skipped: int = 0
    restarts: int = 0
    # What the commit executed, so that servers that have not done so can.
    commit: tuple[Instruction, ...] = ()

    def to_text(self) -> str:
        """Returns JSON; every float comes back with the same bits."""
        plain = asdict(replace(self, commit=()))
        plain["pairs"] = [[pair.number, pair.sy, pair.yy] for pair in self.pairs]
        plain["commit"] = [instruction.to_plain() for instruction in self.commit]
        return json.dumps({"format": _FORMAT, **plain}, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> LbfgsState:
        """The reverse of `to_text`. Raises BadRequest for a text that no coordinator of this version wrote."""
        try:
            plain = json.loads(text)
            found = plain.pop("format")
            if found == _FORMAT:
                pairs: Sequence[Sequence[float]] = plain.pop("pairs")
                return cls(
                    pairs=tuple(Pair(int(number), sy, yy) for number, sy, yy in pairs),
                    commit=tuple(Instruction.from_plain(instruction) for instruction in plain.pop("commit")),
                    **plain,
                )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRequest(f"the coordinator's state on server 0 cannot be read ({error}); {_ADVICE}") from error
        raise BadRequest(f"the coordinator's state on server 0 has format {found}, expected {_FORMAT}; {_ADVICE}")


_ADVICE = "start the coordinator in the version that began this run, or the servers anew"


_HALF_OF_PAIR = re.compile(r"s(\d+)")


def take_up(machine: Machine, servers: Sequence[ServerStanding], text: str) -> LbfgsState:
    """Returns the state to go on from, the same on all servers, their parameters back at the accepted point.

    `text` is what server 0 has of the last coordinator, empty where there was none. Where another server missed the
    last commit it is made there now. Where servers stand at points of different iterations, as after a restore of one
    of them from an older checkpoint, the state is one that is not evaluated: it goes on from the parameters, without
    history. Whatever a coordinator left half done, and wherever this one is cut off, the next call mends it.
    """
    state = LbfgsState.from_text(text) if text else LbfgsState()
    for server, standing in enumerate(servers):
        if POINT not in standing.vectors:
            machine.execute_on(server, allocate(POINT), copy(POINT, PARAMETERS))
    if not _can_go_on(servers, state):
        state = _leave_behind(machine, servers, state)
    elif state.evaluated and any(standing.iteration < state.iteration for standing in servers):
        machine.execute(*state.commit, commits_iteration=state.iteration, state=text)
    for server, standing in enumerate(servers):
        missing = [name for name in _WORKING if name not in standing.vectors]
        if missing:
            machine.execute_on(server, *map(allocate, missing))
    if not state.evaluated:
        state = _number_alike(machine, servers, state)
    machine.execute(move(POINT))
    return state


_WORKING = tuple(name for name in (*VECTORS_FLOAT32, *VECTORS_FLOAT64) if name != POINT)


def _can_go_on(servers: Sequence[ServerStanding], state: LbfgsState) -> bool:
    """Whether every server made the state's commit, or still has all that it needs to make it."""
    if servers[0].iteration != state.iteration:
        return False
    return all(_has_made(standing, state) or _can_make(standing, state) for standing in servers)


def _has_made(standing: ServerStanding, state: LbfgsState) -> bool:
    needed = [GRADIENT, *_names(state, up_to=state.newest)] if state.evaluated else []
    return standing.iteration == state.iteration and set(needed) <= set(standing.vectors)


def _can_make(standing: ServerStanding, state: LbfgsState) -> bool:
    pushed = any(instruction.operation == Operation.PUSH_HISTORY for instruction in state.commit)
    # A server that was restored has no gradient of a trial any more, so what is there is of the trial that was taken.
    needed = [*VECTORS_FLOAT32, *_names(state, up_to=state.newest - pushed)]
    behind = standing.iteration == state.iteration - 1
    return state.evaluated and behind and set(needed) <= set(standing.vectors)


def _names(state: LbfgsState, *, up_to: int) -> Iterable[str]:
    return (name for pair in state.pairs if pair.number <= up_to for name in (pair.s, pair.y))


def _leave_behind(machine: Machine, servers: Sequence[ServerStanding], state: LbfgsState) -> LbfgsState:
    """Commits that history and gradient are void: the points that servers stand at, whichever, are one point from now.

    Server 0 first, so that whoever comes back sees it before any server's working vectors are made anew. A server takes
    commits one after the other.
    """
    last = max(standing.iteration for standing in servers) + 1
    state = replace(state, evaluated=False, pairs=(), restarts=state.restarts + 1, commit=())
    for server, standing in enumerate(servers):
        for iteration in range(standing.iteration + 1, last + 1):
            text = replace(state, iteration=iteration).to_text()
            machine.execute_on(server, move(POINT), commits_iteration=iteration, state=text)
    return replace(state, iteration=last)


def _number_alike(machine: Machine, servers: Sequence[ServerStanding], state: LbfgsState) -> LbfgsState:
    """Leaves one useless pair on every server, of the same number, so that the next will be called alike everywhere.

    Servers at different iterations have pushed more pairs, or fewer; each names a pair by counting.
    """
    numbers = [
        [int(match[1]) for match in map(_HALF_OF_PAIR.fullmatch, standing.vectors) if match] for standing in servers
    ]
    if not any(numbers):
        return replace(state, held=0, newest=0)
    newest = max(max(found, default=0) for found in numbers) + 1
    for server, found in enumerate(numbers):
        program = [drop_oldest()] * (len(found) - 1)
        for number in range(max(found, default=0) + 1, newest + 1):
            drop = [drop_oldest()] if found or number > 1 else []
            program += [push_history(), *drop, allocate(POINT_CHANGE), allocate(GRADIENT_CHANGE)]
        machine.execute_on(server, *program)
    return replace(state, held=1, newest=newest)
