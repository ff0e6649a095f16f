"""What people hear of a coordinator: a line an iteration, on a terminal also how far the pass is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import typer

from pyps.cli.coordination.link import Traffic
from pyps.lbfgs.optimizer import IterationReport, Summary
from pyps_wire.work_pb2 import WorkProgress

# A terminal's line is drawn no more often.
DRAW_SECONDS = 0.2


@dataclass
class _Mark:
    """Where things stood when the last line was written."""

    at: float
    traffic: Traffic
    work: WorkProgress


class Progress:
    """Follows one coordinator. Writes on the thread that coordinates."""

    def __init__(self, *, as_json: bool, traffic: Callable[[], Traffic]) -> None:
        self._as_json = as_json
        self._traffic = traffic
        self._work = WorkProgress()
        self._mark = _Mark(time.monotonic(), traffic(), self._work)
        self._drawn_at = 0.0
        self._drawn_columns = 0

    def attached(self, work: WorkProgress, *, planned_bytes: int) -> None:
        """Takes up the work as it stands; what the queue counted before belongs to nobody's line.

        `planned_bytes`: what vectors and staged gradients will take on all servers together, at most.
        """
        if self._as_json:
            typer.echo(
                json.dumps({"attached": {"planned_bytes": planned_bytes, "passes_begun": getattr(work, "pass")}})
            )
        self._work = work
        self._mark = _Mark(time.monotonic(), self._traffic(), work)

    def passing(self, work: WorkProgress) -> None:
        """Hears how far a pass is."""
        self._work = work
        now = time.monotonic()
        if self._as_json or not sys.stdout.isatty() or now - self._drawn_at < DRAW_SECONDS:
            return
        self._drawn_at = now
        self._draw(f"pass {getattr(work, 'pass')}: {work.done} of {work.num_portions} portions")

    def iteration(self, report: IterationReport) -> None:
        """Writes the line of an iteration."""
        mark, work = self._mark, self._work
        traffic = self._traffic() - mark.traffic
        now = time.monotonic()
        figures = {
            "iteration": report.iteration,
            "loss": report.loss,
            "step_length": report.step_length,
            "gradient_norm": report.gradient_norm,
            "trials": report.trials,
            "pairs": report.pairs,
            "pair_kept": report.pair_kept,
            "restarted": report.restarted,
            "portions": work.num_portions,
            **{name: getattr(work, name) - getattr(mark.work, name) for name in ("copies", "stolen", "lost")},
            "seconds": round(now - mark.at, 3),
            "traffic": asdict(traffic),
        }
        self._mark = _Mark(now, self._traffic(), work)
        if self._as_json:
            typer.echo(json.dumps(figures))
            return
        self._clear()
        restarted = ", history thrown away" if report.restarted else ""
        typer.echo(
            f"iteration {report.iteration:3d}  loss {report.loss:.6g}  step {report.step_length:.3g}  "
            f"gradient {report.gradient_norm:.3g}  trials {report.trials}  "
            f"portions {work.num_portions} ({figures['stolen']} stolen, {figures['lost']} lost)  "
            f"{figures['seconds']:.1f} s  {_in_words(traffic)}{restarted}"
        )

    def ended(self, summary: Summary) -> None:
        """Writes how it ended."""
        traffic = self._traffic()
        if self._as_json:
            typer.echo(json.dumps({"summary": asdict(summary), "traffic": asdict(traffic)}))
            return
        self._clear()
        typer.echo(
            f"{'converged' if summary.converged else 'ended'} after {summary.iterations} iterations and "
            f"{summary.passes} passes, loss {summary.loss:.6g}: {summary.reason}; "
            f"the coordinator's {traffic.messages:,} calls: {_in_words(traffic)}"
        )

    def say(self, text: str) -> None:
        """Writes a line that is no iteration's, beside the figures."""
        self._clear()
        typer.echo(f"pyps: {text}", err=True)

    def _draw(self, text: str) -> None:
        sys.stdout.write("\r" + text.ljust(self._drawn_columns))
        sys.stdout.flush()
        self._drawn_columns = len(text)

    def _clear(self) -> None:
        if self._drawn_columns:
            self._draw("")
            sys.stdout.write("\r")
            self._drawn_columns = 0


def _in_words(traffic: Traffic) -> str:
    """Instructions and passes apart: only the former are as many for every model and pace of the workers."""
    return f"{traffic.instruction_bytes:,} bytes of instructions and {traffic.pass_bytes:,} of passes sent and received"
