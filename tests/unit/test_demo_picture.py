"""What the demo's picture shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyps.cli.demo.picture import draw, least_shown, shown_values


def test_a_few_stragglers_are_left_out_of_the_histogram() -> None:
    assert shown_values({0: 1000, 3: 1000, 1: 1000, 61: 1}) == [0, 1, 3]
    assert shown_values({0: 10, 61: 1}) == [0, 61], "more than one in a hundred"
    assert shown_values({}) == []


def test_the_axis_of_the_accuracy_begins_below_the_data() -> None:
    assert least_shown([(0, 0.13), (1, 0.97)]) == 0.1
    assert least_shown([(0, 1.0)]) == 0.5
    assert least_shown([]) == 0.0


def test_the_legend_lies_over_no_curve_and_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Dear to import, and every process that collects tests reads this file.
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **settings: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw(
        tmp_path / "demo.png",
        losses=[(0, 2.3), (1, 0.05)],
        accuracies=[(0, 0.1), (1, 0.98)],
        wanted_accuracy=0.95,
        staleness={0: 10, 3: 2},
        num_shards=2,
        title="async",
    )

    [figure] = drawn
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent()
    assert box.y0 >= axes.get_window_extent().y1, "above the curves"
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
