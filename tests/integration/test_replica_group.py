"""pyps_client.replica.processes and .dtensor over real process groups: what processes say, hold, hand on and refuse."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import ROOT, PythonProcess

SCRIPT = str(ROOT / "tests" / "replica_process.py")
DEADLINE_SECONDS = 120.0


@contextmanager
def processes(scenario: str, count: int, folder: Path) -> Iterator[list[PythonProcess]]:
    with ExitStack() as stack:
        store = folder / "store"
        yield [
            stack.enter_context(PythonProcess(SCRIPT, scenario, str(rank), str(count), str(store)))
            for rank in range(count)
        ]


def seen(scenario: str, count: int, folder: Path) -> list[Any]:
    with processes(scenario, count, folder) as started:
        for process in started:
            assert process.wait(DEADLINE_SECONDS) == 0, process.output()
        return [json.loads(process.output().splitlines()[-1]) for process in started]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return seen("two", 2, tmp_path_factory.mktemp("two"))


def test_processes_hear_the_leader_each_other_and_sums(two):
    for of_process in two:
        assert of_process["words"] == {
            "name": "replica-0",
            "told": {"index": 0},
            "gathered": ["process 0", "process 1"],
            "total": [2.0, 1.0 + 2.0**-40],
        }


def test_what_parallelize_module_cut_is_claimed_as_it_lies(two):
    first, second = ({name: rest for name, *rest in of_process["cut"]["claims"]} for of_process in two)
    both = [0, 1]
    assert first["up.weight"] == [[4, 6], [0, 0], [8, 6], [0]]
    assert second["up.weight"] == [[4, 6], [4, 0], [8, 6], [1]]
    assert second["up.bias"] == [[4], [4], [8], [1]]
    assert first["down.weight"] == [[6, 4], [0, 0], [6, 8], [0]]
    assert second["down.weight"] == [[6, 4], [0, 4], [6, 8], [1]]
    assert first["uneven.weight"] == [[3, 6], [0, 0], [5, 6], [0]]
    assert second["uneven.weight"] == [[2, 6], [3, 0], [5, 6], [1]]
    for name in ("down.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"):
        assert first[name] == second[name] == [[6], [0], [6], both]


def test_each_tensor_that_both_hold_is_trained_by_one(two):
    first, second = (set(of_process["cut"]["held"]) for of_process in two)
    cut = {f"{layer}.{kind}" for layer in ("up", "uneven") for kind in ("weight", "bias")} | {"down.weight"}
    assert first & second == cut
    copied = {"down.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"}
    assert first | second == cut | copied


def test_gradients_are_those_of_the_model_as_a_whole(two):
    # Algorithms, 2.6, P1.
    for of_process in two:
        differences = of_process["cut"]["differences"]
        assert len(differences) == 8
        assert max(differences.values()) < 1e-6, differences


def test_what_one_process_trains_reaches_all_that_hold_it(two):
    assert [of_process["cut"]["wrong"] for of_process in two] == [[], []]


def test_plain_parameters_are_blocks_copies_or_a_processs_own(two):
    assert two[0]["plain"] == {
        "claims": [
            ["patch", [3, 2], [0, 0], [5, 2], [0]],
            ["stage0", [3], [0], [3], [0]],
            ["shared", [], [], [], [0, 1]],
        ],
        "param_groups": [0, 1, 1],
        "wrong": [],
    }
    assert two[1]["plain"]["claims"][0] == ["patch", [2, 2], [3, 0], [5, 2], [1]]
    assert two[1]["plain"]["wrong"] == []


def test_what_is_wrong_on_one_process_is_said_by_all(two):
    for what, words in (
        ("partial", "'partial' has placements (Partial(sum),); servers hold a tensor that is split into one"),
        ("one extent", "part 0 and part 1 both claim numbers of tensor '0.weight'"),
        ("a part is missing", "parts of tensor 'w' of shape (4,) are missing: there are only"),
        ("beyond the whole", "the block [2:4] of tensor 'w' reaches beyond the whole, whose shape is (3,)"),
        ("no such block", "Replica names 'v', but no parameter of the optimizer has this name"),
        ("no such copy", "Replica names 'v', but no parameter of the optimizer has this name"),
        ("a DTensor's block", "Parameter 'thin.weight' is a DTensor, whose placements say how it is split"),
    ):
        first, second = (of_process["refusals"][what] for of_process in two)
        assert words in first, what
        assert first.startswith("InvalidArgument: ")
        assert first == second


def test_errors_of_torch_that_tell_of_a_loss_are_told_from_all_others(two):
    said = two[1]["errors"]
    lost = (
        "process 1 of replica-0 lost another of its processes (Connection closed by peer): "
        "a replica ends as a whole; start it again"
    )
    assert said == {"of torch": lost, "wrapped": lost, "the user's": "None", "ours": "None"}


def test_a_replica_outlasts_a_world_that_the_program_destroys_before_its_last_push(two):
    for of_process in two:
        assert of_process["ended"] == {**of_process["words"], "name": "the replica", "wrong": []}


def test_meshes_of_two_dimensions_and_replicas_within_a_world(tmp_path):
    four = [of_process["meshes"] for of_process in seen("four", 4, tmp_path)]
    assert [of_process["pair"] for of_process in four] == [
        [0, 2, [0, 1]],
        [1, 2, [0, 1]],
        [0, 2, [2, 3]],
        [1, 2, [2, 3]],
    ]
    rows, tiles, stripes = zip(*(of_process["claims"] for of_process in four), strict=True)
    assert [claim[2:] for claim in rows] == [
        [[0, 0], [8, 6], [0, 2]],
        [[4, 0], [8, 6], [1, 3]],
        [[0, 0], [8, 6], [0, 2]],
        [[4, 0], [8, 6], [1, 3]],
    ]
    assert [claim[2] for claim in tiles] == [[0, 0], [0, 3], [4, 0], [4, 3]]
    assert [claim[2] for claim in stripes] == [[0, 0], [2, 0], [4, 0], [6, 0]]
    for of_process in four:
        assert of_process["wrong"] == []
        assert "which is not in the replica" in of_process["outside"]


def test_a_process_that_outlives_another_says_so_in_one_line(tmp_path):
    with processes("lost", 2, tmp_path) as (survivor, victim):
        for process in (survivor, victim):
            process.wait_for_output("met [0, 1]", DEADLINE_SECONDS)
        victim.signal(signal.SIGKILL)
        assert survivor.wait(DEADLINE_SECONDS) == 1
        *_, caught, uncaught, place = survivor.output().splitlines()
        assert caught.startswith("ReplicaLost: process 0 of replica-0 lost another of its processes (")
        assert caught.endswith("): a replica ends as a whole; start it again")
        assert uncaught.startswith("pyps: process 0 of replica-0 lost another of its processes (")
        assert place.startswith("  at ")
        assert "Traceback" not in survivor.output()
