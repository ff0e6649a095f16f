"""L-BFGS in a coordinator that never sees a parameter: Sandblaster (Dean et al. 2012, section 4.2, algorithm 1.2).

The vectors lie on the servers, the gradients come from the workers; here are numbers. An iteration is a direction, a
line search of some passes over the data set, and one commit: a program that is executed on a server whole or not at
all, and brings the numbers that it takes to go on (`LbfgsState`). Whoever begins again after a commit takes the same
steps, bit for bit, as long as a pass gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyps.core.instructions import PARAMETERS
from pyps.work.formulas import (
    GRADIENT,
    GRADIENT_CHANGE,
    POINT,
    POINT_CHANGE,
    TRIAL_GRADIENT,
    allocate,
    copy,
    drop_oldest,
    fold,
    move,
    norm_inf,
    push_history,
)
from pyps.work.lbfgs_settings import LbfgsSettings
from pyps.work.lbfgs_state import LbfgsState, Pair
from pyps.work.line_search import Found, LineSearch, Start
from pyps.work.machine import Machine, Objective, ServerStanding
from pyps.work.resume import take_up
from pyps.work.trials import Measures, Trials
from pyps.work.two_loop import steepest, two_loop
from pyps.work.vector_free import vector_free
from pyps_wire.errors import NotFinite

__all__ = ["IterationReport", "Lbfgs", "LbfgsSettings", "Summary"]


@dataclass(frozen=True)
class IterationReport:
    """One iteration, as people may want to see it."""

    iteration: int  # from 1
    loss: float  # at the point that was accepted
    decrease: float  # by which it is lower than before
    step_length: float
    slope: float  # d.g at the point before
    gradient_norm: float  # the largest element of the gradient at the new point
    trials: int  # passes over the data set
    pairs: int  # that made the direction; 0 where it was -g
    pair_kept: bool  # whether s and y of this iteration went into the history
    restarted: bool  # whether the history was thrown away, since its direction led nowhere


@dataclass(frozen=True)
class Summary:
    """How it ended; the servers' parameters are at the point that was accepted last."""

    iterations: int
    loss: float
    gradient_norm: float
    passes: int
    skipped: int  # pairs not kept
    restarts: int  # histories thrown away
    converged: bool  # False where iterations_max was reached, or no step lowered the loss
    reason: str  # why it ended, as a sentence's end


@dataclass(frozen=True)
class _Direction:
    pairs: tuple[Pair, ...]
    start: Start


class Lbfgs:
    """Lowers a loss, iteration by iteration. After an error of machine or objective `run` may be called again."""

    def __init__(
        self,
        machine: Machine,
        objective: Objective,
        settings: LbfgsSettings | None = None,
        *,
        on_iteration: Callable[[IterationReport], None] = lambda report: None,
        line_search: LineSearch | None = None,
    ) -> None:
        self._machine = machine
        self._objective = objective
        self._settings = settings or LbfgsSettings()
        self._on_iteration = on_iteration
        self._line_search = line_search or self._settings.make_line_search()
        self._make_direction = vector_free if self._settings.vector_free else two_loop
        self._state = LbfgsState()

    def run(self, servers: Sequence[ServerStanding], state: str = "") -> Summary:
        """Goes on from where the servers are until it ends; `state` is what server 0 has of the last coordinator.

        Raises NotFinite where the loss or the gradient is not finite at the very first point.
        """
        self._state = take_up(self._machine, servers, state)
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
        """Computes the loss and the gradient at the point itself. Nothing is committed: it can be done again."""
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
        """Returns whether it converged, and why it is over: nothing where it is not."""
        state, settings = self._state, self._settings
        if state.gradient_norm <= settings.gradient_tolerance:
            return True, f"no element of the gradient is larger than {settings.gradient_tolerance:g}"
        if not state.moved:
            return True, "the last step was too small to change any parameter"
        # The first step along -g is as long as a guess: that it gains little says nothing.
        if not state.steepest and state.decrease <= settings.loss_tolerance * abs(state.loss):
            return True, f"the last iteration lowered the loss by no more than {settings.loss_tolerance:g} of it"
        if state.iteration >= settings.iterations_max:
            return False, f"{settings.iterations_max} iterations were asked for"
        return False, ""

    def _iterate(self) -> bool:
        """Makes one iteration and commits it; False where no step lowers the loss, with the parameters back at x."""
        state = self._state
        note = {"iteration": state.iteration + 1.0, "loss": state.loss, "gradient_norm": state.gradient_norm}
        trials = Trials(self._machine, self._objective, note)
        direction = self._quasi_newton() or self._steepest()
        found = self._line_search.search(trials, direction.start)
        if found is None and direction.pairs:
            direction = self._steepest()
            found = self._line_search.search(trials, direction.start)
        if found is None:
            self._machine.execute(move(POINT))
            self._state = replace(state, passes=state.passes + trials.passes)
            return False
        self._commit(direction, found, trials)
        return True

    def _quasi_newton(self) -> _Direction | None:
        """Makes the direction from the history; None where there is none, or the loss does not fall along it."""
        pairs = self._state.pairs[-self._settings.history :]
        if not pairs:
            return None
        slope = self._make_direction(self._machine, pairs)
        if not -math.inf < slope < 0.0:
            return None
        return _Direction(pairs, Start(self._state.loss, slope, step=1.0))

    def _steepest(self) -> _Direction:
        slope, norm = steepest(self._machine)
        return _Direction((), Start(self._state.loss, slope, step=min(1.0, 1.0 / norm)))

    def _commit(self, direction: _Direction, found: Found, trials: Trials) -> None:
        """Takes the trial as the new point, on all servers, and writes down what it takes to go on from there."""
        assert trials.measures is not None, "a line search asks for the slope of the step it returns"
        before, measures = self._state, trials.measures
        restarted = bool(before.pairs) and not direction.pairs
        kept = self._is_curved(measures)
        pairs, held, newest = direction.pairs, before.held, before.newest
        program = []
        if kept:
            newest += 1
            pairs = (*pairs, Pair(newest, measures.sy, measures.yy))[-self._settings.history :]
            drops = held + 1 - len(pairs)
            held = len(pairs)
            program = [push_history(), *[drop_oldest()] * drops, allocate(POINT_CHANGE), allocate(GRADIENT_CHANGE)]
        program += [copy(POINT, PARAMETERS), copy(GRADIENT, TRIAL_GRADIENT)]
        state = LbfgsState(
            iteration=before.iteration + 1,
            evaluated=True,
            loss=found.loss,
            gradient_norm=measures.gradient_norm,
            decrease=before.loss - found.loss,
            steepest=not direction.pairs,
            moved=measures.ss > 0.0,
            pairs=pairs,
            held=held,
            newest=newest,
            passes=before.passes + trials.passes,
            skipped=before.skipped + (not kept),
            restarts=before.restarts + restarted,
            commit=tuple(program),
        )
        self._machine.execute(*program, commits_iteration=state.iteration, state=state.to_text())
        self._state = state
        self._on_iteration(
            IterationReport(
                iteration=state.iteration,
                loss=state.loss,
                decrease=state.decrease,
                step_length=found.step,
                slope=direction.start.slope,
                gradient_norm=state.gradient_norm,
                trials=trials.passes,
                pairs=len(direction.pairs),
                pair_kept=kept,
                restarted=restarted,
            )
        )

    def _is_curved(self, measures: Measures) -> bool:
        """Whether H stays positive definite with the pair, beyond doubt."""
        return measures.sy > self._settings.curvature * math.sqrt(measures.ss) * math.sqrt(measures.yy)
