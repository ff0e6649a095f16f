"""The state that a coordinator saves with each commit, and how a restarted one brings all servers to one point."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace

from pyps.core.vectors.program import GRADIENT, PARAMETERS, POINT, Instruction
from pyps.lbfgs.machine import (
    DIRECTION,
    DROP_OLDEST,
    GRADIENT_CHANGE,
    POINT_CHANGE,
    PUSH_HISTORY,
    TRIAL_GRADIENT,
    VECTORS,
    Machine,
    ServerState,
    allocate,
    copy,
    move,
)
from pyps_wire.errors import InvalidArgument

_FORMAT = 2
_ADVICE = "start the coordinator in the version that began this run, or restart the servers without --resume"
_HALF_OF_PAIR = re.compile(r"s(\d+)")


@dataclass(frozen=True)
class Pair:
    """Two differences in the servers' history: s of two points, y of their gradients."""

    number: int
    sy: float  # s.y = 1 / rho
    yy: float  # y.y

    @property
    def s(self) -> str:
        return f"s{self.number}"

    @property
    def y(self) -> str:
        return f"y{self.number}"


@dataclass(frozen=True)
class LbfgsState:
    """The numbers of the accepted point: with the vectors x, g and the history, all that a restart needs."""

    iteration: int = 0
    # False if the loss and the gradient at the point are unknown: before the first iteration, and after a restart with
    # servers at different iterations.
    evaluated: bool = False
    loss: float = 0.0
    gradient_norm: float = 0.0  # the largest element of g
    decrease: float = 0.0  # of the loss in the last iteration
    steepest: bool = False  # whether the last iteration went along -g
    moved: bool = True  # whether it changed any parameter
    # The pairs that make directions, oldest first.
    pairs: tuple[Pair, ...] = ()
    # The number of pairs on the servers, of which the oldest may be unused; and the number of the newest, from 1.
    held: int = 0
    newest: int = 0
    # Since the first iteration: passes over the data set, pairs that were not kept, histories deleted.
    passes: int = 0
    skipped: int = 0
    restarts: int = 0
    # Whether the commit adds a pair to the history, and how many old ones it deletes.
    pushed: bool = False
    drops: int = 0

    def commit(self) -> list[Instruction]:
        """Return the program that accepts this state's point, for servers whose trial it is."""
        new_pair = [PUSH_HISTORY, *[DROP_OLDEST] * self.drops, allocate(POINT_CHANGE), allocate(GRADIENT_CHANGE)]
        return [*(new_pair if self.pushed else ()), copy(POINT, PARAMETERS), copy(GRADIENT, TRIAL_GRADIENT)]

    def to_text(self) -> str:
        """Return JSON, from which every float comes back with the same bits."""
        plain = {"format": _FORMAT, **asdict(self), "pairs": [astuple(pair) for pair in self.pairs]}
        return json.dumps(plain, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> LbfgsState:
        """Parse `to_text`. Raises InvalidArgument for any other text."""
        try:
            plain = json.loads(text)
            found = plain.pop("format")
            if found == _FORMAT:
                return cls(pairs=tuple(Pair(*pair) for pair in plain.pop("pairs")), **plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"the coordinator's state on server 0 cannot be read ({error}); {_ADVICE}") from error
        raise InvalidArgument(f"the coordinator's state on server 0 has format {found}, expected {_FORMAT}; {_ADVICE}")


def resume(machine: Machine, servers: Sequence[ServerState], text: str) -> LbfgsState:
    """Bring all servers to one accepted point, with their parameters there; return its state.

    A server that missed the last commit repeats it. Servers at points of different iterations, as after a restore of
    one of them from an older checkpoint, continue from their parameters without history: the state is not evaluated.
    An interrupted call is repaired by the next.

    Args:
        machine: The servers.
        servers: Their states, in order.
        text: The state on server 0, empty before the first commit.
    """
    state = LbfgsState.from_text(text) if text else LbfgsState()
    for server, found in enumerate(servers):
        if POINT not in found.vectors:
            machine.execute_on(server, allocate(POINT), copy(POINT, PARAMETERS))
    if not _can_continue(servers, state):
        state = _discard_history(machine, servers, state)
    elif state.evaluated and any(found.iteration < state.iteration for found in servers):
        machine.execute(*state.commit(), commits_iteration=state.iteration, state=text)
    for server, found in enumerate(servers):
        missing = [name for name in VECTORS if name not in (POINT, *found.vectors)]
        if missing:
            machine.execute_on(server, *map(allocate, missing))
    if not state.evaluated:
        state = _align_pair_numbers(machine, servers, state)
    machine.execute(move(POINT))
    return state


def _can_continue(servers: Sequence[ServerState], state: LbfgsState) -> bool:
    """Return whether every server executed the state's commit, or can still execute it."""
    for found in servers:
        needed: set[str] = set()
        if found.iteration == state.iteration:
            if state.evaluated:
                needed = {GRADIENT, *_names(state, up_to=state.newest)}
        elif state.evaluated and found.iteration == state.iteration - 1 and found is not servers[0]:
            # A restored server has no trial gradient, so one that is there belongs to the accepted trial.
            needed = {*VECTORS, *_names(state, up_to=state.newest - state.pushed)} - {DIRECTION}
        else:
            return False
        if not needed <= set(found.vectors):
            return False
    return True


def _names(state: LbfgsState, *, up_to: int) -> Iterable[str]:
    return (name for pair in state.pairs if pair.number <= up_to for name in (pair.s, pair.y))


def _discard_history(machine: Machine, servers: Sequence[ServerState], state: LbfgsState) -> LbfgsState:
    """Commit that there is no history and no gradient: from now on the servers' points are one point.

    Server 0 comes first, so that a restart finds this state before any server's vectors are allocated again. A server
    accepts only the commit after its last one.
    """
    last = max(found.iteration for found in servers) + 1
    state = replace(state, evaluated=False, pairs=(), restarts=state.restarts + 1, pushed=False, drops=0)
    for server, found in enumerate(servers):
        for iteration in range(found.iteration + 1, last + 1):
            text = replace(state, iteration=iteration).to_text()
            machine.execute_on(server, move(POINT), commits_iteration=iteration, state=text)
    return replace(state, iteration=last)


def _align_pair_numbers(machine: Machine, servers: Sequence[ServerState], state: LbfgsState) -> LbfgsState:
    """Leave one unused pair of the same number on every server, so that the next has the same name everywhere.

    Servers at different iterations have pushed different numbers of pairs, and each names a pair by counting.
    """
    numbers = [[int(match[1]) for match in map(_HALF_OF_PAIR.fullmatch, found.vectors) if match] for found in servers]
    if not any(numbers):
        return replace(state, held=0, newest=0)
    newest = max(max(of_server, default=0) for of_server in numbers) + 1
    for server, of_server in enumerate(numbers):
        program = [DROP_OLDEST] * (len(of_server) - 1)
        for number in range(max(of_server, default=0) + 1, newest + 1):
            drop = [DROP_OLDEST] if of_server or number > 1 else []
            program += [PUSH_HISTORY, *drop, allocate(POINT_CHANGE), allocate(GRADIENT_CHANGE)]
        machine.execute_on(server, *program)
    return replace(state, held=1, newest=newest)
