"""How little Sandblaster says (Dean et al. 2012, section 4.2); docs/experiments.md has the verdict and all figures."""

from experiments import sandblaster_traffic as traffic
from experiments.sandblaster_crew import VirtualCrew
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.simulation.simulation import normal


def test_a_coordinators_bytes_do_not_depend_on_the_number_of_parameters():
    small, large = (traffic.CoordinatorBytes(seed=0, size=size).measure()["bytes"] for size in (1_000, 50_000))

    assert small == large > 0


def test_a_worker_pulls_once_a_pass_and_sends_a_sum_for_every_few_portions():
    """B2, and B9: as few vectors as the shares of docs/sandblaster.md are made of."""
    assert CoordinationSettings().portions_per_stage == traffic.SINGLE
    for group, stages in ((traffic.SINGLE, 40), (traffic.GROUPED, 12)):
        crew = VirtualCrew([normal(variation=0.1)] * 4, num_examples=traffic.EXAMPLES)
        crew.begin_pass(1, num_portions=40, portions_per_stage=group)
        crew.await_pass(1)

        assert crew.messages["pull"] == 4
        # Each worker's last sum may have fewer portions.
        assert stages - 2 <= crew.messages["stage"] <= stages + 2
