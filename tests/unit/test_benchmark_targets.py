"""benchmarks/targets.py and document.py: verdicts of figures, and a page of whatever was measured."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("targets")


def results(*, lane: float, without: str = "") -> dict[str, dict[str, Any]]:
    """A run in which the lane is so many times as good as what each of its targets asks for."""
    speeds = {
        ("big", 1): {"pyps gRPC float32": 10.0, "torch RPC auto": 10.0, "torch RPC tcp": 20 / 1.15},
        ("big", 2): {"Ray": 20.0, "torch RPC tcp": 15.0},
        ("mid", 1): {"torch RPC auto": 20.0, "torch RPC tcp": 15.0},
        ("small", 1): {"torch RPC auto": 10.0, "torch RPC tcp": 20.0, "naive gRPC": 20.0},
    }
    rows = [row(case, name, speed) for case, of in speeds.items() for name, speed in of.items()]
    rows += [row(case, "pyps lane float32", 20 * lane) for case in speeds]
    rows += [row(("big", 1), "pyps lane bfloat16", 32 * lane * lane)]
    rows += [row(("big", 1), "pyps lane float32, TLS", 12 * lane * lane)]
    rows += [row(("big", 4), "pyps lane float32", 1.0) | {"server_peak_mb": 335 / lane}]
    rows += [row(("small", 1), "pyps shared memory", 2936 * lane)]
    for one in rows:
        one["server_cpu_s_per_gb"] = 0.4 / lane
    links = {"plain TCP": 1.0, "pyps lane float32": 0.95 * lane, "pyps lane bfloat16": 1.9 * lane}
    links["pyps lane int4"] = 6 * 0.95 * lane * lane
    times = {"longer_s": 1.0, "backward_s": 1.15 / lane}
    rates, shares = ("1gbit", "10gbit"), {"alone": 0.9 * lane}
    return {
        "rounds": {"rows": [one for one in rows if one["subject"] != without]},
        "link": {"rows": [{"subject": k, "rounds_per_s": v, "rate": r} for k, v in links.items() for r in rates]},
        "overlap": {"rows": [times | {"subject": "pyps lane float32", "rate": "1gbit"}]},
        "kernel": {"rows": [{"subject": k, "of_torch": lane, "shares": shares} for k in ("adam", "adamw")]},
        "few_bits": {"rows": [*training_rows(lane)]},
        "local_training": {"rows": [*local_rows(lane)]},
    }


def training_rows(lane: float) -> Iterator[dict[str, Any]]:
    seconds = {"pyps hardsync, overlapped in backward, int4": 9 / lane, "DDP gloo, float16": 10.0}
    for rate, slowed in (("1gbit", 1.0), ("10gbit", 3.0), ("100mbit", 1.0), ("100mbit", 3.0)):
        for name, own in (seconds | {"one process alone": 10.0}).items():
            yield {"subject": name, "rate": rate, "slowed": slowed, "limit_s": 60.0, "seconds_to_loss": own}


def local_rows(lane: float) -> Iterator[dict[str, Any]]:
    few, async_int4 = "pyps local average topk2bit", "pyps local async int4"
    for case in ("100mbit", "50mbit+100ms"):
        for name, seconds in {few: 10 / lane, "DDP PowerSGD rank 4": 10.0}.items():
            yield {"subject": name, "case": case, "workers": 2, "limit_s": 60.0, "seconds_to_loss": seconds}
    for name in ("pyps local average int4", async_int4):
        for case, batches in (("100mbit:killed", 88 * lane), ("100mbit", 100)):
            yield {"subject": name, "case": case, "workers": 4, "batches": batches, "curve": [[0, 0, 6], [10.0, 0, 2]]}
    sizes = {few: 10 / lane, "pyps async float32": 1000.0, "pyps hardsync float32": 1000.0}
    for name, size in sizes.items():
        loss = 1.01 / lane if name == few else 1.0
        yield {"subject": name, "case": "1gbit", "workers": 2, "kilobytes_a_batch": size, "loss_at_batches": loss}


def row(case: tuple[str, int], subject: str, speed: float) -> dict[str, Any]:
    return {"size": case[0], "workers": case[1], "subject": subject, "rounds_per_s": speed}


@pytest.mark.parametrize(("lane", "met"), [(1.001, True), (0.99, False)])
def test_a_target_is_met_from_what_it_asks_for_on(targets, lane, met):
    verdicts = {target.what: target.met for target in targets.targets(results(lane=lane))}

    assert verdicts == dict.fromkeys(verdicts, met)


def test_without_a_peer_that_a_target_names_there_is_no_verdict(targets):
    [found] = [target for target in targets.targets(results(lane=1.1, without="Ray")) if "Ray" in target.what]

    assert found.met is None
    assert found.measured == "1.47 x torch RPC tcp (22 against 15); Ray not measured"


def test_what_was_not_measured_has_no_verdict(targets):
    assert {(target.measured, target.met) for target in targets.targets({})} == {("not measured in this run", None)}


def test_a_loss_that_pyps_did_not_reach_is_a_target_missed_and_one_that_others_did_not_is_met(targets):
    for seconds, met, measured in (((None, 40.0), False, "not in 60 s"), ((40.0, None), True, "0.67 x")):
        rows = [
            {"subject": name, "rate": "100mbit", "slowed": 1.0, "limit_s": 60.0, "seconds_to_loss": own}
            for name, own in zip(("pyps async", "torchft"), seconds, strict=True)
        ]
        [found] = [of for of in targets.targets({"few_bits": {"rows": rows}}) if of.met is not None]

        assert (found.met, found.measured.partition(" (")[0]) == (met, measured)


def test_the_page_has_the_speed_of_training_over_each_link(targets):
    speeds = {"one process alone": (16.0, 5.55), "pyps async": (24.25, None), "DDP gloo": (20.0, 6.0)}
    rows = [
        {"subject": name, "rate": "1gbit", "slowed": 1.0, "limit_s": 20.0}
        | {"samples_per_s": speed, "seconds_to_loss": seconds}
        for name, (speed, seconds) in speeds.items()
    ]
    piece = importlib.import_module("document").PIECES["training_beside"]

    head, *lines = piece({"training": {"rows": rows}}).splitlines()

    assert head == "|  | 1 Gbit/s each way |"
    cells = {"one process alone": "16.0, 5.5 s", "DDP gloo": "20.0, 6.0 s", "pyps async": "24.2, not in 20 s"}
    assert {f"| {name} | {cell} |" for name, cell in cells.items()} == {*lines[1:]}
    assert "Not measured in this run" in piece({})


def test_the_picture_of_local_training_names_who_is_in_some_of_its_panels_only(targets):
    curve = {"workers": 2, "seed": 0, "curve": [[0.0, 0, 6.0], [10.0, 100, 2.0]]}
    subjects = {"100mbit": "torchft DiLoCo", "50mbit+100ms": "Hivemind local updates"}
    rows = [curve | {"subject": name, "case": case} for case, name in subjects.items()]

    figure = importlib.import_module("pictures").local_training({"local_training": {"rows": rows}})

    [legend] = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == [*subjects.values()]


def test_the_pages_match_the_results(targets, tmp_path, monkeypatch):
    document = importlib.import_module("document")
    pages = FOLDER.parent / "docs"
    drawn = {path.stem.partition("_")[2]: path.name for path in (pages / "images").glob("*.png")}
    monkeypatch.setattr(document.pictures, "draw_all", lambda results, folder: drawn)

    for name in document.PAGES:
        document.write(json.loads((pages / f"{name}.json").read_text(encoding="utf-8")), tmp_path)

    assert {path.stem for path in tmp_path.iterdir()} == {page for of in document.PAGES.values() for page in of}
    for page in tmp_path.iterdir():
        assert page.read_text(encoding="utf-8") == (pages / page.name).read_text(encoding="utf-8")
