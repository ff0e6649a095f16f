"""n-softsync decides by the number of gradients that wait (algorithm notes 2.7; Zhang et al. 2016)."""

from __future__ import annotations

import pytest

from pyps.core.aggregation import Acknowledge, Apply, Park, Part, Softsync, parse
from pyps.core.gradient import PayloadKind
from shards import arrival, contribution, crew, roster


@pytest.mark.parametrize(
    ("num_workers", "n", "gradients_per_update"),
    [(30, 1, 30), (30, 4, 7), (30, 30, 1), (4, 3, 1), (2, 5, 1), (0, 1, 1)],
)
def test_c_is_the_floor_of_l_over_n_and_at_least_one(num_workers: int, n: int, gradients_per_update: int) -> None:
    assert Softsync(n).gradients_per_update(num_workers) == gradients_per_update


def test_a_gradient_waits_until_c_are_there_and_no_worker_waits_with_it() -> None:
    assert Softsync(1).decide(arrival("a", workers=crew(3))) == Park(min_version=0)


def test_c_gradients_are_one_mean_in_order_of_arrival_whoever_sent_them() -> None:
    first, second = contribution("b"), contribution("b", sequence=1)
    arrived = arrival("a", first, second, workers=crew(3))
    third = 1 / 3
    assert Softsync(1).decide(arrived) == Apply(
        (Part(first, third), Part(second, third), Part(arrived.contribution, third))
    )


def test_workers_still_expected_count_for_c() -> None:
    assert isinstance(Softsync(1).decide(arrival("a", workers=roster("a", missing=1))), Park)


def test_a_push_of_nothing_is_acknowledged_and_not_counted() -> None:
    assert Softsync(1).decide(arrival("a", workers=crew(1), kind=PayloadKind.NOTHING)) == Acknowledge()


def test_when_workers_go_exactly_c_of_those_that_wait_are_applied() -> None:
    waiting = tuple(contribution("a", sequence=sequence) for sequence in range(3))
    due = Softsync(1).complete(waiting, version=0, roster=crew(2))
    assert due == Apply((Part(waiting[0], 0.5), Part(waiting[1], 0.5)))
    assert Softsync(1).complete(waiting[2:], version=1, roster=crew(2)) is None


def test_what_waits_when_another_protocol_comes_is_one_mean() -> None:
    first, second = contribution("b"), contribution("a")
    assert Softsync(1).settle((first, second)) == Apply((Part(first, 0.5), Part(second, 0.5)))
    assert Softsync(1).settle(()) is None


def test_the_split_is_the_effective_n() -> None:
    assert [Softsync(n).split(crew(30)) for n in (1, 4, 30)] == [1.0, 30 / 7, 30.0]
    assert Softsync(2).split(crew(0)) == 1.0


def test_a_warning_states_the_effective_n_where_n_does_not_divide_l() -> None:
    assert parse("softsync:n=4").warnings(30) == (
        "softsync:n=4 with 30 workers makes an update of every 7 gradients, so the effective n is 4.28571",
    )
    assert parse("softsync:n=5").warnings(30) == ()
    assert parse("softsync:n=4").warnings(0) == ()
