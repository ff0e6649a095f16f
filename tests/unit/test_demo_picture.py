"""What the demo's picture shows."""

from __future__ import annotations

from pyps.cli.demo.picture import least_shown, shown_values


def test_a_few_stragglers_are_left_out_of_the_histogram() -> None:
    assert shown_values({0: 1000, 3: 1000, 1: 1000, 61: 1}) == [0, 1, 3]
    assert shown_values({0: 10, 61: 1}) == [0, 61], "more than one in a hundred"
    assert shown_values({}) == []


def test_the_axis_of_the_accuracy_begins_below_the_data() -> None:
    assert least_shown([(0, 0.13), (1, 0.97)]) == 0.1
    assert least_shown([(0, 1.0)]) == 0.5
    assert least_shown([]) == 0.0
