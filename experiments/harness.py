"""What experiments share: trials in a pool of processes, kept results, conditions, the verdict, picture and page.

An experiment is a file with an `EXPERIMENT`: a claim, the setting, the trials, the conditions with their thresholds,
what it does not show, and how its picture is drawn. The thresholds are fixed in a commit before the first run on the
published seeds; a pilot may choose settings, on seeds of its own, which the file names.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "experiments"
PAGE = ROOT / "docs" / "experiments.md"
# What stands before the verdicts.
HEAD = ROOT / "experiments" / "page.md"
IMAGES = ROOT / "docs" / "images"
SCRATCH = ROOT / "out" / "experiments"

# In the order of the page.
NAMES = (
    "speedup",
    "staleness_law",
    "large_rates",
    "division_needed",
    "second_task",
    "hardsync_accuracy",
    "interplay",
    "convergence_rate",
    "minibatch_time",
    "batch_growth",
    "sixteen_workers",
    "opposed_gradients",
    "adagrad_rates",
    "warm_start",
    "sandblaster_balance",
    "sandblaster_traffic",
    "sandblaster_time",
    "adam_tuning",
    "three_modes",
    "parameter_averaging",
    "exponential_penalty",
    "league",
    "ssp_staleness",
    "backup_workers",
    "replicas_killed",
    "model_parallel",
    "compression",
)
# Published seeds begin here; those below are for pilots and tests.
FIRST_SEED = 100
SEEDS = tuple(range(FIRST_SEED, FIRST_SEED + 5))
# For an experiment whose setting was changed after it had been run on those.
FRESH_SEEDS = tuple(range(FIRST_SEED + 5, FIRST_SEED + 10))
QUICK_SEEDS = (0, 1)
# Virtual seconds to a target that no rate reaches.
NEVER = 1e9
PAGE_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Trial(ABC):
    """One run: a pure function of its fields, which are numbers and texts."""

    seed: int

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Return what was measured, by the names of the table's columns."""


class Results:
    """The rows of a table: a trial's fields, and what it measured."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = list(rows)

    def where(self, **fields: Any) -> Results:
        """Return the rows with these values; LookupError if there are none."""
        rows = [row for row in self.rows if all(row[name] == value for name, value in fields.items())]
        if not rows:
            raise LookupError(f"no trial with {fields}")
        return Results(rows)

    def values(self, column: str, **fields: Any) -> list[float]:
        """Return a column in the order of seeds."""
        rows = self.where(**fields).rows
        return [float(row[column]) for row in sorted(rows, key=lambda row: int(row["seed"]))]

    def mean(self, column: str, **fields: Any) -> float:
        return fmean(self.values(column, **fields))

    def least(self, column: str, by: str, **fields: Any) -> tuple[float, Any]:
        """Return the least mean of a column over the values of another, and the value where it is."""
        chosen = self.where(**fields)
        means = {value: chosen.mean(column, **{by: value}) for value in chosen.distinct(by)}
        best = min(means, key=means.__getitem__)
        return means[best], best

    def soonest(self, **fields: Any) -> float:
        """Return the least mean of `reached_at` over the rates that reach the target with every seed, or NEVER."""
        chosen = self.where(**fields)
        times = [chosen.values("reached_at", rate=rate) for rate in chosen.distinct("rate")]
        return min((fmean(each) for each in times if all(each)), default=NEVER)

    def distinct(self, column: str) -> list[Any]:
        return list(dict.fromkeys(row[column] for row in self.rows))


class Role(StrEnum):
    """What a condition is for."""

    # What the paper says: these decide.
    CLAIM = "claim"
    # Must hold for the others to say anything.
    CONTROL = "control"
    # Reported beside, and decides nothing.
    BESIDE = "beside"


Measure = Callable[[Results], float]


@dataclass(frozen=True)
class Condition:
    """A number of the results, and the bounds that it has to keep."""

    words: str
    measure: Measure
    at_least: float = -math.inf
    at_most: float = math.inf
    # Of a claim: beyond this the opposite of what it says was seen.
    opposite: float | None = None
    role: Role = Role.CLAIM
    # "%" for shares, "points" for their differences; "x" and others are written behind the number.
    unit: str = ""
    # False of the most or the least of seeds, and of a count: the jackknife is no error of these.
    has_error: bool = True

    def judge(self, results: Results) -> dict[str, Any]:
        measured = float(f"{self.measure(results):.6g}")
        assert math.isfinite(measured), self.words
        error = standard_error(self.measure, results) if self.has_error else 0.0
        bounds = {"at_least": self.at_least, "at_most": self.at_most, "opposite": self.opposite}
        given = {name: bound for name, bound in bounds.items() if bound is not None and math.isfinite(bound)}
        reverse = self.opposite is not None and (
            measured <= self.opposite if math.isfinite(self.at_least) else measured >= self.opposite
        )
        return {
            "words": self.words,
            "role": self.role.value,
            **given,
            "unit": self.unit,
            "measured": measured,
            "standard_error": float(f"{error:.2g}"),
            "outcome": "yes" if self.at_least <= measured <= self.at_most else "opposite" if reverse else "no",
        }


def standard_error(measure: Measure, results: Results) -> float:
    """Return the jackknife's standard error over seeds: the best rate is chosen anew without each of them."""
    seeds = results.distinct("seed")
    if len(seeds) < 3:
        return 0.0
    without = [measure(Results(row for row in results.rows if row["seed"] != seed)) for seed in seeds]
    mean = fmean(without)
    return math.sqrt((len(seeds) - 1) / len(seeds) * sum((each - mean) ** 2 for each in without))


control = partial(Condition, role=Role.CONTROL)
beside = partial(Condition, role=Role.BESIDE)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A claim and what is done to judge it."""

    name: str
    title: str
    # Who says so (the page's head has the title) and where, and what.
    paper: str
    section: str
    claim: str
    setting: str
    # Of the seeds; None where the experiment judges the table of another, `table_of`, which comes before it.
    trials: Callable[[Sequence[int]], Iterable[Trial]] | None = None
    table_of: str = ""
    conditions: Sequence[Condition]
    shows_not: str
    draw: Callable[[Figure, Results], None]
    seeds: Sequence[int] = SEEDS
    # The seeds that settings and thresholds were chosen with, and what was chosen.
    pilot: Sequence[int] = ()
    pilot_chose: str = ""
    # Written after the run: what the figures say together.
    reading: str = ""
    # A sentence of it: what was seen, and where the setting ends.
    in_short: str = ""
    # Fields of a trial that a quick run replaces, where trials have them.
    quick: Mapping[str, Any] = field(default_factory=dict)

    def judge(self, results: Results) -> dict[str, Any]:
        """Return what is kept of the results beside the table."""
        conditions = [condition.judge(results) for condition in self.conditions]
        texts = ("title", "in_short", "paper", "section", "claim", "setting", "shows_not", "pilot_chose", "reading")
        return {
            **{name: " ".join(getattr(self, name).split()) for name in ("name", *texts)},
            "seeds": list(self.seeds),
            "pilot": list(self.pilot),
            "trials": len(results.rows),
            "conditions": conditions,
            "verdict": verdict(conditions),
        }


def verdict(conditions: Iterable[Mapping[str, Any]]) -> str:
    """Return the verdict by the page's rule."""
    outcomes: dict[str, list[str]] = {role.value: [] for role in Role}
    for condition in conditions:
        outcomes[condition["role"]].append(condition["outcome"])
    claims = outcomes[Role.CLAIM]
    if any(outcome != "yes" for outcome in outcomes[Role.CONTROL]):
        return "not judged"
    if all(outcome == "yes" for outcome in claims):
        return "confirmed"
    if "yes" in claims:
        return "mixed"
    return "reversed" if "opposite" in claims else "not reproduced"


def load(name: str) -> Experiment:
    experiment: Experiment = import_module(f"experiments.{name}").EXPERIMENT
    assert experiment.name == name
    assert bool(experiment.trials) != bool(experiment.table_of)
    return experiment


# Trials and tables.


def trials_of(
    experiment: Experiment, seeds: Sequence[int], *, replaced: Mapping[str, Any] | None = None
) -> list[Trial]:
    """Return the trials for these seeds, with the fields that they have replaced."""
    if experiment.trials is None:
        return trials_of(load(experiment.table_of), seeds, replaced=replaced)
    trials = []
    for trial in experiment.trials(seeds):
        names = asdict(trial).keys() & (replaced or {}).keys()
        trials.append(replace(trial, **{name: (replaced or {})[name] for name in names}))
    return trials


@contextmanager
def pool(processes: int | None) -> Iterator[ProcessPoolExecutor]:
    """Yield processes of one thread each: the matrices are tiny, and threads may change the last bits."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as executor:
        yield executor


def run(trials: Sequence[Trial], executor: ProcessPoolExecutor, *, say: Callable[[str], None] | None = None) -> str:
    """Return the table of the trials as CSV, the same for any number of processes."""
    file = io.StringIO(newline="")
    writer = None
    for done, (trial, measured) in enumerate(zip(trials, executor.map(_measure, trials), strict=True), 1):
        row = asdict(trial) | {name: _rounded(value) for name, value in measured.items()}
        if writer is None:
            writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)
        if say and done % max(1, len(trials) // 10) == 0:
            say(f"  {done} of {len(trials)} trials")
    return file.getvalue()


def _measure(trial: Trial) -> dict[str, float]:
    return trial.measure()


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def read(table: str) -> Results:
    """Return the rows of a CSV, numbers as numbers."""
    return Results({name: _value(text) for name, text in row.items()} for row in csv.DictReader(io.StringIO(table)))


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# What is kept.


def require_committed() -> None:
    """Raise SystemExit where git knows of changes: thresholds, or what they judge, are not fixed yet."""
    command = ["git", "status", "--porcelain", "--", "experiments", "pyps", "client", "csrc"]
    try:
        changed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    if changed:
        raise SystemExit(
            f"not committed; the published seeds are run after settings and thresholds are fixed:\n{changed}"
        )


def keep(experiment: Experiment, table: str) -> str:
    """Write table, verdict and picture; return the verdict."""
    results = read(table)
    judged = experiment.judge(results)
    KEPT.mkdir(parents=True, exist_ok=True)
    if not experiment.table_of:
        (KEPT / f"{experiment.name}.csv").write_text(table, encoding="utf-8", newline="")
    (KEPT / f"{experiment.name}.json").write_text(_json(judged), encoding="utf-8")
    picture(experiment, results, IMAGES / f"experiment_{experiment.name}.png")
    return str(judged["verdict"])


def kept_table(experiment: Experiment) -> str | None:
    """Return the kept CSV, or None where the experiment has not been run yet."""
    path = KEPT / f"{experiment.table_of or experiment.name}.csv"
    return path.read_text(encoding="utf-8") if path.exists() else None


def out_of_date(experiment: Experiment) -> str:
    """Return what in the kept files is not what the experiment's file says, or an empty text."""
    table = kept_table(experiment)
    if table is None:
        return ""
    results = read(table)
    trials = [asdict(trial) for trial in trials_of(experiment, experiment.seeds)]
    if [{name: row[name] for name in trials[0]} for row in results.rows] != trials:
        return f"{experiment.name}: the kept table is not of these trials: run it again"
    kept = (KEPT / f"{experiment.name}.json").read_text(encoding="utf-8")
    if kept != _json(experiment.judge(results)):
        return f"{experiment.name}.json does not follow from the table: judge it again (--judge)"
    return ""


def _json(judged: Mapping[str, Any]) -> str:
    return json.dumps(judged, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# Pictures.


def picture(experiment: Experiment, results: Results, path: Path) -> None:
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    experiment.draw(figure, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def plot(
    axis: Axes,
    results: Results,
    column: str,
    along: str,
    *,
    scale: float = 1.0,
    label: str,
    style: str = "-o",
    color: str | None = None,
    **fields: Any,
) -> None:
    """Draw the means of a column along another, with bars of the seeds' standard deviation."""
    chosen = results.where(**fields)
    places = chosen.distinct(along)
    values = [chosen.values(column, **{along: place}) for place in places]
    means = [scale * fmean(each) for each in values]
    deviations = [scale * stdev(each) if len(each) > 1 else 0.0 for each in values]
    drawn: dict[str, Any] = {"capsize": 3, "markersize": 4, "linewidth": 1.2, "color": color, "label": label}
    axis.errorbar(places, means, yerr=deviations, fmt=style, **drawn)


# The page.


def page(judged: Sequence[Mapping[str, Any]]) -> str:
    """Return docs/experiments.md of what is kept."""
    rows = [
        f"| [{title}](#{anchor(title)}) | {each['paper']} | **{each['verdict']}** | {each['in_short']} |"
        for each in judged
        for title in [each["title"]]
    ]
    table = "\n".join(["| claim | who | verdict | in short |", "|---|---|---|---|", *rows])
    return "\n\n".join([HEAD.read_text(encoding="utf-8").strip(), table, *map(_chapter, judged)]) + "\n"


def anchor(title: str) -> str:
    """Return what a link to a chapter ends with."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def write_page() -> None:
    PAGE.write_text(page(kept_verdicts()), encoding="utf-8")


def kept_verdicts() -> list[dict[str, Any]]:
    paths = [KEPT / f"{name}.json" for name in NAMES]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def _chapter(judged: Mapping[str, Any]) -> str:
    seeds, pilot = judged["seeds"], judged["pilot"]
    by = f"{judged['trials']} trials, {_seeds(seeds)}."
    if pilot:
        by += f" A pilot on {_seeds(pilot)} chose {judged['pilot_chose']}."
    rows = [
        f"| {each['words']} | {_bounds(each)} "
        f"| {_number(each['measured'], each['unit'], each['standard_error'])} | {_outcome(each)} |"
        for each in judged["conditions"]
    ]
    paragraphs = [
        f"## {judged['title']}",
        _fill(f"**Claim** ({judged['paper']}; {judged['section']}): {judged['claim']}"),
        _fill(f"**Setting**: {judged['setting']} {by}"),
        f"![{judged['title']}](images/experiment_{judged['name']}.png)",
        "\n".join(["| condition | threshold | measured | holds |", "|---|--:|--:|---|", *rows]),
        _fill(f"**Verdict: {judged['verdict']}.** {judged['reading']}".strip()),
        _fill(f"**Does not show**: {judged['shows_not']}"),
    ]
    return "\n\n".join(paragraphs)


def _seeds(seeds: Sequence[int]) -> str:
    whole = len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    named = f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))
    return f"seed{'s' * (len(seeds) > 1)} {named}"


def _fill(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)


def _bounds(condition: Mapping[str, Any]) -> str:
    unit = condition["unit"]
    bounds = {sign: condition[name] for sign, name in (("≥", "at_least"), ("≤", "at_most")) if name in condition}
    threshold = ", ".join(f"{sign} {_number(bound, unit)}" for sign, bound in bounds.items())
    if "opposite" not in condition:
        return threshold
    return f"{threshold} (reversed {'≤' if 'at_least' in condition else '≥'} {_number(condition['opposite'], unit)})"


def _number(value: float, unit: str, error: float = 0.0) -> str:
    if value >= NEVER:
        return "never"
    if unit in ("%", "points"):
        # Adding zero makes -0 zero.
        number, within = f"{round(100 * value, 2) + 0.0:.3g}", round(100 * error, 2)
    else:
        number, within = f"{value:.4g}", error
    # Twice: `.2g` alone writes 340 as 3.4e+02.
    return number + (f" ± {float(f'{within:.2g}'):g}" if within else "") + (unit if unit in ("", "x") else f" {unit}")


def _outcome(condition: Mapping[str, Any]) -> str:
    words = {"yes": "yes", "no": "**no**", "opposite": "**no: the opposite**"}[condition["outcome"]]
    return words if condition["role"] == Role.CLAIM else f"{words} ({condition['role']})"
