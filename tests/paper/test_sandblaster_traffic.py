"""How little Sandblaster says: no vector to its coordinator, few to its workers (Dean et al. 2012, section 4.2)."""

import pytest

from experiments import sandblaster_traffic as traffic
from pyps.cli.coordination.settings import CoordinationSettings


def test_a_coordinators_bytes_do_not_depend_on_the_number_of_parameters():
    small, large = (
        [(row.iteration, row.messages, row.bytes) for row in traffic.coordinator_traffic(parameters)]
        for parameters in (1_000, 200_000)
    )

    assert len(small) == traffic.LBFGS.iterations
    assert small == large


def test_workers_with_a_fair_share_of_a_pass_exchange_a_tenth_of_downpours_bytes_at_most_if_they_sum_portions():
    assert traffic.worker_traffic(4).share <= 0.1
    # The default, `--fold portion`, pays for the same bits with any number of workers: docs/sandblaster.md.
    assert CoordinationSettings().portions_per_stage == 1
    assert round(100 * traffic.worker_traffic(4, portions_per_stage=1).share) == 12


@pytest.mark.parametrize("workers", traffic.WORKERS)
def test_workers_exchange_bytes_in_the_ratio_of_a_minibatch_to_what_is_summed(workers):
    """B9: bytes per example <= Downpour's x minibatch / (portion x k_send).

    Of all that is sent and got, as Downpour pulls with each minibatch and Sandblaster once a pass. Of the gradients
    alone it does not hold where a worker's portions are no multiple of k_send: its last sum has fewer.
    """
    portion = traffic.EXAMPLES / (traffic.PORTIONS_PER_WORKER * workers)

    assert traffic.worker_traffic(workers).share <= traffic.BATCH_SIZE / (portion * traffic.PORTIONS_PER_STAGE)


def test_sums_of_gradients_are_sent_as_often_as_portions_are_grouped():
    workers = 4
    vector_bytes = sum(map(len, traffic.payloads()))
    groups = traffic.PORTIONS_PER_WORKER * workers / traffic.PORTIONS_PER_STAGE

    row = traffic.worker_traffic(workers)

    # One vector a group; each worker's last group may be smaller, and headers take a little.
    most = 1.05 * vector_bytes * (groups + workers)
    assert vector_bytes * groups <= row.gradients * traffic.EXAMPLES <= most
    assert vector_bytes * workers <= row.parameters * traffic.EXAMPLES <= 1.05 * vector_bytes * workers
