"""L-BFGS in a coordinator that never sees a parameter: Sandblaster (Dean et al. 2012, section 4.2, algorithm 1.2).

The vectors are on the servers, and the gradients come from the workers; the coordinator computes with numbers. An
iteration is a direction, a line search of some passes over the data set, and one commit: a program that a server
executes whole or not at all, with the numbers that a restart needs (`LbfgsState`). A coordinator restarted after a
commit takes the same steps, bit for bit, if a pass gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pyps.core.vectors.program import GRADIENT, PARAMETERS, POINT
from pyps.lbfgs.machine import (
    DIRECTION,
    GRADIENT_CHANGE,
    POINT_CHANGE,
    TRIAL_GRADIENT,
    Evaluation,
    Machine,
    Objective,
    ServerState,
    combine,
    dot,
    fold,
    move,
    norm1,
    norm_inf,
    products,
)
from pyps.lbfgs.resume import LbfgsState, Pair, resume
from pyps_wire.errors import InvalidArgument, NotFinite


@dataclass(frozen=True, kw_only=True)
class LbfgsSettings:
    """Settings of L-BFGS. Raises InvalidArgument for a value out of range."""

    # The most pairs of differences that make the direction, m.
    history: int = 10
    # "armijo": shorter steps until the loss falls enough. "wolfe": until the slope has flattened too.
    line_search: str = "armijo"
    # The parts of the first slope: how much the loss must fall at least, and how steep the slope may still be.
    c1: float = 1e-4
    c2: float = 0.9
    # armijo: the ratio of a step to the one before.
    backtrack: float = 0.5
    # Steps tried along one direction, each a pass over the data set.
    trials_max: int = 20
    iterations_max: int = 20
    # Ends when no element of the gradient is larger.
    gradient_tolerance: float = 1e-5
    # Ends when an iteration lowers the loss by no more than this part of it: less is noise in float32.
    loss_tolerance: float = 1e-7
    # A pair is kept if s.y is larger than this times |s| |y|.
    curvature: float = 1e-10

    def __post_init__(self) -> None:
        tolerances = {name: getattr(self, name) for name in ("gradient_tolerance", "loss_tolerance", "curvature")}
        for name, in_range, expected in (
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("history", "trials_max", "iterations_max")),
            ("line_search", self.line_search in LINE_SEARCHES, "armijo or wolfe"),
            ("c1", 0.0 < self.c1 < 1.0, "a number between 0 and 1"),
            ("c2", self.c1 < self.c2 < 1.0, f"a number between c1, {self.c1}, and 1"),
            ("backtrack", 0.0 < self.backtrack < 1.0, "a number between 0 and 1"),
            *((name, 0.0 <= value < math.inf, "a finite number of at least 0") for name, value in tolerances.items()),
        ):
            if not in_range:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; expected {expected}")


@dataclass(frozen=True)
class Measures:
    """Products of the gradient at a trial point, and of the pair that a commit of it would add."""

    slope: float  # t.d
    gradient_norm: float  # the largest element of t
    sy: float
    ss: float
    yy: float


class Trials:
    """The `Line` of one iteration; the servers' parameters are at its last trial."""

    def __init__(self, machine: Machine, objective: Objective, note: Mapping[str, float]) -> None:
        self.passes = 0
        self.measures: Measures | None = None  # of the last slope
        self._machine = machine
        self._objective = objective
        self._note = note
        self._evaluation: Evaluation | None = None

    def loss(self, step: float) -> float:
        """Move the parameters to x + step d and run a pass, without folding its gradient."""
        self._machine.execute(move(POINT, step, DIRECTION))
        self._evaluation = self._objective.evaluate({**self._note, "step_length": step})
        self.passes += 1
        return self._evaluation.loss

    def slope(self) -> float:
        """Fold the trial's gradient, and compute in the same message the numbers that a commit needs."""
        assert self._evaluation is not None, "slope() follows loss()"
        self.measures = Measures(
            *self._machine.execute(
                fold(TRIAL_GRADIENT, self._evaluation.stage_ids, self._evaluation.example_count),
                # The change after rounding.
                combine(POINT_CHANGE, (PARAMETERS, POINT), (1.0, -1.0)),
                combine(GRADIENT_CHANGE, (TRIAL_GRADIENT, GRADIENT), (1.0, -1.0)),
                dot(TRIAL_GRADIENT, DIRECTION),
                norm_inf(TRIAL_GRADIENT),
                dot(POINT_CHANGE, GRADIENT_CHANGE),
                dot(POINT_CHANGE, POINT_CHANGE),
                dot(GRADIENT_CHANGE, GRADIENT_CHANGE),
            )
        )
        return self.measures.slope if math.isfinite(self.measures.gradient_norm) else math.nan


def quasi_newton(machine: Machine, pairs: Sequence[Pair]) -> float:
    """Set d = -H g from at least one pair, oldest first; return its slope, d.g, or NaN if a coefficient is not finite.

    H is the inverse Hessian that the m pairs stand for, d that of the two-loop recursion (Nocedal and Wright 2006,
    algorithm 7.4). Chen, Wang and Zhou 2014: every vector of the recursion is a combination of s_1..s_m, y_1..y_m and
    g, so it needs only their products; those of two s never occur. 3 instructions in 2 messages for every m.
    """
    num_pairs = len(pairs)
    columns = [*(pair.y for pair in pairs), GRADIENT]
    names = [*(pair.s for pair in pairs), *columns]
    scalars = machine.execute(products(names, columns))
    width = len(columns)
    table = [scalars[row * width : (row + 1) * width] for row in range(len(names))]
    s_products, y_products = table[:num_pairs], table[num_pairs:]
    # q = the sum of s_part[i] s_i, y_part[i] y_i and the last of y_part times g.
    s_part, y_part = [0.0] * num_pairs, [0.0] * num_pairs + [1.0]
    alphas = [0.0] * num_pairs
    for i in reversed(range(num_pairs)):
        alphas[i] = _sum_of_products(y_part, s_products[i]) / pairs[i].sy
        y_part[i] -= alphas[i]
    gamma = pairs[-1].sy / pairs[-1].yy  # the scale of the first guess of H
    y_part = [gamma * part for part in y_part]
    for i in range(num_pairs):
        s_side = _sum_of_products(s_part, [row[i] for row in s_products])
        beta = (s_side + _sum_of_products(y_part, y_products[i])) / pairs[i].sy
        s_part[i] += alphas[i] - beta
    scalars = [-part for part in (*s_part, *y_part)]
    if not all(map(math.isfinite, scalars)):
        return math.nan
    (slope,) = machine.execute(combine(DIRECTION, names, scalars), dot(DIRECTION, GRADIENT))
    return slope


def _sum_of_products(left: Sequence[float], right: Sequence[float]) -> float:
    # Not by sum(): from Python 3.12 on it rounds differently, and a restarted coordinator must find the same bits.
    total = 0.0
    for a, b in zip(left, right, strict=True):
        total += a * b
    return total


@dataclass(frozen=True)
class IterationReport:
    """One iteration, for users."""

    iteration: int  # from 1
    loss: float  # at the point that was accepted
    step_length: float
    gradient_norm: float  # the largest element of the gradient at the new point
    trials: int  # passes over the data set
    pairs: int  # that made the direction; 0 for -g
    pair_kept: bool  # whether s and y of this iteration entered the history
    restarted: bool  # whether the history was deleted because no step along its direction lowered the loss


@dataclass(frozen=True)
class Summary:
    """The end of an optimization; the servers' parameters are at the last accepted point."""

    iterations: int
    loss: float
    gradient_norm: float
    passes: int
    skipped: int  # pairs not kept
    restarts: int  # histories deleted
    converged: bool  # False if iterations_max was reached, or no step lowered the loss
    reason: str  # the end of a sentence


class Lbfgs:
    """Lowers a loss, iteration by iteration. `run` may be called again after an error of machine or objective."""

    def __init__(
        self,
        machine: Machine,
        objective: Objective,
        settings: LbfgsSettings | None = None,
        *,
        on_iteration: Callable[[IterationReport], None] = lambda report: None,
    ) -> None:
        self._machine = machine
        self._objective = objective
        self._settings = settings or LbfgsSettings()
        self._on_iteration = on_iteration
        self._state = LbfgsState()

    def run(self, servers: Sequence[ServerState], state: str = "") -> Summary:
        """Iterate from the servers' state to the end.

        Args:
            servers: Their states, in order.
            state: The text of the last commit on server 0.

        Raises:
            NotFinite: The loss or the gradient is not finite at the first point.
        """
        self._state = resume(self._machine, servers, state)
        if not self._state.evaluated:
            self._begin()
        converged, reason = self._ended()
        while not reason:
            if self._iterate():
                converged, reason = self._ended()
            else:
                converged, reason = False, "no step along -g lowers the loss"
        now = self._state
        return Summary(
            iterations=now.iteration,
            loss=now.loss,
            gradient_norm=now.gradient_norm,
            passes=now.passes,
            skipped=now.skipped,
            restarts=now.restarts,
            converged=converged,
            reason=reason,
        )

    def _begin(self) -> None:
        """Compute the loss and the gradient at the point itself, without a commit."""
        state = self._state
        evaluation = self._objective.evaluate({"iteration": float(state.iteration), "step_length": 0.0})
        loss, norm = evaluation.loss, math.nan
        if math.isfinite(loss):
            (norm,) = self._machine.execute(
                fold(GRADIENT, evaluation.stage_ids, evaluation.example_count), norm_inf(GRADIENT)
            )
        if not math.isfinite(norm):
            what = f"its gradient has the element {norm}" if math.isfinite(loss) else f"it is {loss}"
            raise NotFinite(
                f"the loss cannot be lowered from the first parameters: {what}; expected finite numbers there, "
                "so look at how the parameters begin and for examples that are not finite"
            )
        self._state = replace(
            state,
            evaluated=True,
            loss=loss,
            gradient_norm=norm,
            decrease=math.inf,
            moved=True,
            passes=state.passes + 1,
        )

    def _ended(self) -> tuple[bool, str]:
        """Return whether it converged, and the reason to end, which is empty if there is none."""
        state, settings = self._state, self._settings
        if state.gradient_norm <= settings.gradient_tolerance:
            return True, f"no element of the gradient is larger than {settings.gradient_tolerance:g}"
        if not state.moved:
            return True, "the last step was too small to change any parameter"
        # The length of a first step along -g is a guess, so that it gains little means nothing.
        if not state.steepest and state.decrease <= settings.loss_tolerance * abs(state.loss):
            return True, f"the last iteration lowered the loss by no more than {settings.loss_tolerance:g} of it"
        if state.iteration >= settings.iterations_max:
            return False, f"{settings.iterations_max} iterations were requested"
        return False, ""

    def _iterate(self) -> bool:
        """Run and commit one iteration; return False if no step lowers the loss, with the parameters back at x."""
        state, settings = self._state, self._settings
        note = {"iteration": state.iteration + 1.0, "loss": state.loss, "gradient_norm": state.gradient_norm}
        trials = Trials(self._machine, self._objective, note)
        search = LINE_SEARCHES[settings.line_search]
        found = None
        if pairs := state.pairs[-settings.history :]:
            start = Start(state.loss, quasi_newton(self._machine, pairs), step=1.0)
            if -math.inf < start.slope < 0.0:
                found = search(trials, start, settings)
        if found is None:
            pairs = ()
            slope, norm = self._machine.execute(
                combine(DIRECTION, [GRADIENT], [-1.0]), dot(DIRECTION, GRADIENT), norm1(GRADIENT)
            )
            start = Start(state.loss, slope, step=min(1.0, 1.0 / norm))
            found = search(trials, start, settings)
        if found is None:
            self._machine.execute(move(POINT))
            self._state = replace(state, passes=state.passes + trials.passes)
            return False
        self._commit(pairs, start, found, trials)
        return True

    def _commit(self, used: tuple[Pair, ...], start: Start, found: Found, trials: Trials) -> None:
        """Accept the trial as the new point on all servers, with the state that a restart needs.

        `used`: the pairs that made the direction; none for -g.
        """
        assert trials.measures is not None, "a line search computes the slope of the step that it returns"
        before, measures = self._state, trials.measures
        restarted = bool(before.pairs) and not used
        # Then H certainly stays positive definite with the pair.
        kept = measures.sy > self._settings.curvature * math.sqrt(measures.ss) * math.sqrt(measures.yy)
        pairs, held, newest, drops = used, before.held, before.newest, 0
        if kept:
            newest += 1
            pairs = (*pairs, Pair(newest, measures.sy, measures.yy))[-self._settings.history :]
            drops = held + 1 - len(pairs)
            held = len(pairs)
        state = LbfgsState(
            iteration=before.iteration + 1,
            evaluated=True,
            loss=found.loss,
            gradient_norm=measures.gradient_norm,
            decrease=before.loss - found.loss,
            steepest=not used,
            moved=measures.ss > 0.0,
            pairs=pairs,
            held=held,
            newest=newest,
            passes=before.passes + trials.passes,
            skipped=before.skipped + (not kept),
            restarts=before.restarts + restarted,
            pushed=kept,
            drops=drops,
        )
        self._machine.execute(*state.commit(), commits_iteration=state.iteration, state=state.to_text())
        self._state = state
        self._on_iteration(
            IterationReport(
                iteration=state.iteration,
                loss=state.loss,
                step_length=found.step,
                gradient_norm=state.gradient_norm,
                trials=trials.passes,
                pairs=len(used),
                pair_kept=kept,
                restarted=restarted,
            )
        )


class Line(Protocol):
    """The loss along the search direction, phi(a) = f(x + a d)."""

    def loss(self, step: float) -> float:
        """Return phi(step), by a pass over the whole data set."""

    def slope(self) -> float:
        """Return phi' at the step of the last `loss`, from that pass's gradient; not finite if the gradient is not."""


@dataclass(frozen=True)
class Start:
    """The point at which a search begins."""

    loss: float  # phi(0)
    slope: float  # phi'(0), below 0
    step: float  # the first to try


@dataclass(frozen=True)
class Found:
    """A step with its loss and its slope."""

    step: float
    loss: float
    slope: float


def armijo(line: Line, start: Start, settings: LbfgsSettings) -> Found | None:
    """Shorten the step until phi(a) <= phi(0) + c1 a phi'(0)."""
    step = start.step
    for _ in range(settings.trials_max):
        loss = line.loss(step)
        if decreases_enough(loss, step, start, c1=settings.c1):
            slope = line.slope()
            if math.isfinite(slope):
                return Found(step, loss, slope)
        step *= settings.backtrack
    return None


def strong_wolfe(line: Line, start: Start, settings: LbfgsSettings) -> Found | None:
    """Bracket a step that holds Armijo's condition and |phi'(a)| <= c2 |phi'(0)|, then close in on it.

    Nocedal and Wright's algorithms 3.5 and 3.6 as one loop: `low` is the best step that holds Armijo's condition, `far`
    the other end of an interval that contains a good step, None while the loss falls beyond every step tried.
    """
    low, far = Found(0.0, start.loss, start.slope), None
    step = start.step
    for number in range(1, settings.trials_max + 1):
        if number == settings.trials_max and low.step > 0.0:
            # Another trial might not be better, and to come back from it would cost a pass.
            break
        trial = _try(line, start, step, low, c1=settings.c1)
        if abs(trial.slope) <= settings.c2 * abs(start.slope):
            return trial
        if not math.isfinite(trial.slope):
            far = trial
        else:
            before, low = low, trial
            ahead = 1.0 if far is None else far.step - before.step
            if trial.slope * ahead >= 0.0:
                far = before
            elif far is None:
                step = _beyond(before, low)
                continue
        step = _between(low, far)
        if step in (low.step, far.step):
            break
    # The best step found, whatever its slope.
    if low.step == 0.0 or low.step == trial.step:
        return low if low.step else None
    # Another pass brings the line back to it.
    again = _try(line, start, low.step, Found(0.0, start.loss, start.slope), c1=settings.c1)
    return again if math.isfinite(again.slope) else None


# Searches along d, which the paper leaves open (Nocedal and Wright 2006, chapter 3). Each returns the step of the
# last `loss`, which holds Armijo's condition at least, or None if no trial did. A step whose loss or slope is not
# finite is too long.
LINE_SEARCHES: Mapping[str, Callable[[Line, Start, LbfgsSettings], Found | None]] = {
    "armijo": armijo,
    "wolfe": strong_wolfe,
}


def _try(line: Line, start: Start, step: float, low: Found, *, c1: float) -> Found:
    """Return the trial; its slope is NaN unless the step may become `low`."""
    loss = line.loss(step)
    if not decreases_enough(loss, step, start, c1=c1) or (low.step > 0.0 and loss >= low.loss):
        return Found(step, loss, math.nan)
    return Found(step, loss, line.slope())


def decreases_enough(loss: float, step: float, start: Start, *, c1: float) -> bool:
    """Return whether Armijo's condition holds; never for a loss that is not finite."""
    return math.isfinite(loss) and loss <= start.loss + c1 * step * start.slope


def _between(low: Found, far: Found) -> float:
    """Return the least point of the parabola through both losses and low's slope, kept inside the interval."""
    length = far.step - low.step
    place = 0.5
    if math.isfinite(far.loss):
        bend = far.loss - low.loss - low.slope * length
        if bend > 0.0:
            place = -low.slope * length / (2.0 * bend)
    # Not too close to either end.
    return low.step + min(max(place, 0.1), 0.9) * length


def _beyond(before: Found, low: Found) -> float:
    """Return where the slope would be 0 if it changed as between the two, kept beyond the second."""
    rise = low.slope - before.slope
    step = low.step - low.slope * (low.step - before.step) / rise if rise > 0.0 else math.inf
    return min(max(step, 1.1 * low.step), 10.0 * low.step)
