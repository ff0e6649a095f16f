"""experiments/: what is kept follows from the tables, the page from what is kept, and the rules of honesty hold."""

from dataclasses import dataclass

import pytest

from experiments import harness
from experiments.harness import Condition, Experiment, Results, Trial, beside, control

EXPERIMENTS = {name: harness.load(name) for name in harness.NAMES}


@dataclass(frozen=True, kw_only=True)
class Dice(Trial):
    sides: int

    def measure(self) -> dict[str, float]:
        return {"third": (self.seed % self.sides) / 3, "whole": self.sides}


def a_toy(*conditions: Condition) -> Experiment:
    return Experiment(
        name="toy",
        title="Dice are fair",
        in_short="These are.",
        paper="Somebody 1999",
        section="abstract",
        claim="They are.",
        setting="A table.",
        trials=lambda seeds: [Dice(seed=seed, sides=sides) for seed in seeds for sides in (6, 20)],
        conditions=conditions,
        shows_not="Much.",
        draw=lambda figure, results: None,
        seeds=(100, 101, 102),
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_is_kept_follows_from_the_table_and_the_file(name):
    assert harness.out_of_date(EXPERIMENTS[name]) == ""


def test_the_page_follows_from_what_is_kept():
    assert harness.PAGE.read_text(encoding="utf-8") == harness.page(harness.kept_verdicts())
    for judged in harness.kept_verdicts():
        assert (harness.IMAGES / f"experiment_{judged['name']}.png").exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_at_least_five_fresh_seeds_are_published_and_a_pilot_has_others(name):
    experiment = EXPERIMENTS[name]

    assert len(set(experiment.seeds)) >= 5
    assert min(experiment.seeds) >= harness.FIRST_SEED > max([0, *experiment.pilot, *harness.QUICK_SEEDS])
    assert bool(experiment.pilot) == bool(experiment.pilot_chose)
    claims = [condition for condition in experiment.conditions if condition.role == "claim"]
    assert claims and all(
        condition.at_least > float("-inf") or condition.at_most < float("inf") for condition in claims
    )


def test_the_table_is_the_same_for_any_number_of_processes_and_reads_back_as_it_was():
    trials = harness.trials_of(a_toy(), (100, 101, 102))
    tables = []
    for processes in (1, 2):
        with harness.pool(processes) as executor:
            tables.append(harness.run(trials, executor))

    assert tables[0] == tables[1]
    results = harness.read(tables[0])
    assert results.values("third", sides=6) == [pytest.approx(share, rel=1e-5) for share in (4 / 3, 5 / 3, 0.0)]
    assert results.least("third", "sides") == (pytest.approx(1 / 3, rel=1e-5), 20)


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ([{"at_least": 1}], "confirmed"),
        ([{"at_least": 1}, {"at_most": 1}], "mixed"),
        ([{"at_least": 3, "opposite": 1}], "not reproduced"),
        ([{"at_least": 3, "opposite": 2}], "reversed"),
        ([{"at_most": 1, "opposite": 2}], "reversed"),
        ([{"at_least": 1}, {"at_least": 3, "role": "beside"}], "confirmed"),
        ([{"at_least": 1}, {"at_least": 3, "role": "control"}], "not judged"),
    ],
)
def test_the_verdict_follows_from_the_conditions(bounds, verdict):
    makers = {"claim": Condition, "beside": beside, "control": control}
    conditions = [makers[each.pop("role", "claim")]("two", lambda results: 2.0, **each) for each in bounds]

    judged = a_toy(*conditions).judge(Results([{"seed": 100}]))

    assert judged["verdict"] == verdict
    assert f"**{verdict}**" in harness.page([judged])
