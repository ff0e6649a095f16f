"""The instruction set on a server's shards, against numpy (Dean et al. 2012, section 4.2)."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pyps.core.vectors.program import Instruction, Operation
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire.errors import InvalidArgument, LimitExceeded, RunFinished
from sandblaster import LENGTHS, Driver, make_machine
from shards import pull, refusal

SIZE = sum(LENGTHS)


@pytest.fixture
def driver() -> Driver:
    return make_machine()


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def made(driver: Driver, names: str) -> list[np.ndarray]:
    for seed, name in enumerate(names):
        driver.make(name, numbers(seed))
    return [numbers(seed).astype(np.float64) for seed, _ in enumerate(names)]


def test_operations_have_the_numbers_of_the_protocol():
    assert {f"OPERATION_{operation.name}": int(operation) for operation in Operation} == {
        name: number for name, number in wire.Instruction.Operation.items() if number
    }


def test_sums_are_of_all_shards_and_norm_inf_is_the_largest(driver):
    x, y = made(driver, "xy")

    dot, norm1, norm_inf = driver.execute(
        Instruction(Operation.DOT, left="x", right="y"),
        Instruction(Operation.NORM1, left="x"),
        Instruction(Operation.NORM_INF, left="x"),
    )

    assert dot == pytest.approx(x @ y, rel=1e-13)
    assert norm1 == pytest.approx(np.abs(x).sum(), rel=1e-13)
    assert norm_inf == np.abs(x).max()


def test_gram_answers_row_by_row_and_combine_sums_into_a_target_that_may_be_among_its_vectors(driver):
    a, b, _ = made(driver, "abc")

    gram = driver.execute(Instruction(Operation.GRAM, names=("a", "b"), others=("a", "b", "c")))
    dots = driver.execute(*(Instruction(Operation.DOT, left=left, right=right) for left in "ab" for right in "abc"))
    assert gram == dots

    driver.execute(
        Instruction(Operation.COPY, target="c", left="a"),
        Instruction(Operation.COMBINE, target="a", names=("a", "b", "b"), scalars=(0.5, -2.0, 3.0)),
    )

    assert np.array_equal(driver.held("a"), (0.5 * a + -2.0 * b + 3.0 * b).astype(np.float32))
    assert np.array_equal(driver.held("c"), a.astype(np.float32))


def test_a_norm_of_nan_is_nan_whichever_shard_has_it(driver):
    driver.make("x", np.zeros(SIZE))
    for vectors in driver.machine._vectors.values():
        vectors.arrays["x"][0] = math.nan
        assert math.isnan(driver.execute(Instruction(Operation.NORM_INF, left="x"))[0])
        vectors.arrays["x"][0] = 0.0


def test_move_writes_the_parameters_as_one_update_of_every_shard_and_wakes_waiting_calls():
    driver = make_machine(numbers(1))
    x, d = made(driver, "xd")
    woken = []
    driver.shards[2].when_version(1, lambda: woken.append(pull(driver.shards[2])[0]))

    driver.execute(Instruction(Operation.MOVE, left="x"))
    assert np.array_equal(driver.parameters(), x.astype(np.float32))
    assert ([shard.version for shard in driver.shards.values()], woken) == ([1, 1, 1], [1])

    driver.execute(Instruction(Operation.MOVE, left="x", right="d", scalar=0.25))
    expected = (x + 0.25 * d).astype(np.float32)
    assert np.array_equal(driver.parameters(), expected)

    driver.execute(Instruction(Operation.MOVE, left="parameters", right="d", scalar=2.0))
    assert np.array_equal(driver.parameters(), (expected.astype(np.float64) + 2.0 * d).astype(np.float32))
    assert [shard.version for shard in driver.shards.values()] == [3, 3, 3]


def test_a_finished_run_moves_no_more(driver):
    driver.make("x", np.ones(SIZE))
    driver.shards[4].finish()

    with pytest.raises(RunFinished, match="the run is finished"):
        driver.execute(Instruction(Operation.MOVE, left="x"))

    assert not driver.parameters().any()


def test_the_history_is_pushed_as_the_newest_pair_and_dropped_as_the_oldest(driver):
    for k in (1, 2, 3):
        driver.make("s", np.full(SIZE, k))
        driver.make("y", np.full(SIZE, -k))
        driver.execute(Instruction(Operation.PUSH_HISTORY, left="s", right="y"))

    driver.execute(Instruction(Operation.DROP_OLDEST))

    assert driver.machine.names == ("s2", "s3", "y2", "y3")
    assert driver.held("s2")[0] == 2 and driver.held("y3")[0] == -3
    with pytest.raises(InvalidArgument, match="moves 's2', which is in the history already"):
        driver.execute(Instruction(Operation.PUSH_HISTORY, left="s2", right="y2"))
    driver.execute(Instruction(Operation.DROP_OLDEST), Instruction(Operation.DROP_OLDEST))
    # Numbers go on growing where the history was emptied: a pair's name is never used twice.
    driver.make("a", np.zeros(SIZE))
    driver.make("b", np.zeros(SIZE))
    driver.execute(Instruction(Operation.PUSH_HISTORY, left="a", right="b"))
    assert driver.machine.names == ("s4", "y4")


I = Instruction  # noqa: E741
O = Operation  # noqa: E741


def test_a_program_with_one_impossible_instruction_changes_nothing(driver):
    driver.make("x", np.ones(SIZE))
    before = driver.machine.bytes
    for bad, words in (
        (I(O.DOT, left="q", right="x"), "3 (DOT) names the vector 'q', which does not exist; the vectors are x, z"),
        (I(O.COPY, target="q", left="x"), "names the vector 'q'"),
        (I(O.COPY, target="parameters", left="x"), "(COPY) writes 'parameters'; only MOVE does that"),
        (I(O.ALLOC, target="x"), "which exists already"),
        (I(O.ALLOC, target="parameters"), "choose another"),
        (I(O.ALLOC, target="s7"), "a pair of the history: choose another"),
        (I(O.ALLOC, target="a" * 17), "16 of them at most"),
        (I(O.ALLOC, target=""), "expected letters, digits and _"),
        (I(O.COMBINE, target="x", names=("x",), scalars=(math.nan,)), "has the scalar nan; expected a finite number"),
        (I(O.COMBINE, target="x", names=("x", "x"), scalars=(1.0,)), "has 2 names and 1 scalars"),
        (I(O.COMBINE, target="x"), "has 0 names and 0 scalars"),
        (I(O.GRAM, names=("x",)), "has 1 names and 0 others"),
        (I(O.DROP_OLDEST), "finds no pair in the history"),
        (I(O.PUSH_HISTORY, left="x", right="x"), "as both halves of a pair"),
        (I(O.PUSH_HISTORY, left="x", right="parameters"), "moves 'parameters' into the history"),
        (I(O.MOVE, left="x", right="q"), "names the vector 'q'"),
        (I(O.FOLD, target="x", stage_ids=(5,), count=1), "names the stage 5, of which 0 of 3 shards are here"),
        (I(O.FOLD, target="x", stage_ids=(5, 5), count=1), "names a stage twice"),
        (I(O.FOLD, target="x", count=1), "names no stage"),
        (I(O.FOLD, target="x", stage_ids=(1,)), "divides by a count of 0"),
        *((I(operation), f"3 ({operation.name}) ") for operation in set(Operation) - {Operation.BEGIN_PASS}),
    ):
        assert words in refusal(
            driver.execute, I(O.ALLOC, target="z"), I(O.COMBINE, target="x", names=("x",), scalars=(9.0,)), bad
        )
        assert driver.machine.names == ("x",), bad
        assert (driver.held("x") == 1).all(), bad
        assert driver.machine.bytes == before, bad
    assert driver.execute(I(O.NORM1, left="x")) == [SIZE]


def test_a_program_sees_vectors_that_it_made_and_none_that_it_dropped(driver):
    driver.make("x", np.ones(SIZE))
    assert driver.execute(I(O.ALLOC, target="q"), I(O.COPY, target="q", left="x"), I(O.NORM1, left="q")) == [SIZE]
    push = I(O.PUSH_HISTORY, left="x", right="q")
    with pytest.raises(InvalidArgument, match=r"instruction 3 \(NORM1\) names the vector 's1'"):
        driver.execute(push, I(O.DROP_OLDEST), I(O.NORM1, left="s1"))


def test_a_program_makes_no_more_than_there_is_room_for_also_of_what_it_drops():
    driver = make_machine(bytes_max=48 * SIZE)
    pair = (I(O.ALLOC, target="s"), I(O.ALLOC, target="y"), I(O.PUSH_HISTORY, left="s", right="y"), I(O.DROP_OLDEST))

    assert driver.execute(*pair * 6) == []
    assert driver.machine.bytes == 0
    for program in (pair * 7, [I(O.ALLOC, target=f"v{k}") for k in range(13)]):
        with pytest.raises(LimitExceeded, match="raise --max-vector-bytes"):
            driver.execute(*program)
        assert driver.machine.names == ()


def test_an_empty_program_and_a_state_without_a_commit_are_refused(driver):
    with pytest.raises(InvalidArgument, match="has no instruction"):
        driver.execute()
    with pytest.raises(InvalidArgument, match="commits no iteration"):
        driver.execute(I(O.ALLOC, target="a"), state="{}")
    with pytest.raises(InvalidArgument, match="the coordinator's state has 65537 bytes; expected 65536 at most"):
        driver.execute(I(O.ALLOC, target="a"), commits=1, state="x" * 65537)


def test_a_server_without_shards_answers_each_instruction_with_nothing_to_add():
    driver = make_machine([], lengths=())

    scalars = driver.execute(
        I(O.ALLOC, target="x"),
        I(O.DOT, left="x", right="x"),
        I(O.GRAM, names=("x", "x"), others=("x",)),
        I(O.NORM_INF, left="x"),
        I(O.MOVE, left="x"),
    )

    assert scalars == [0.0] * 4


def all_numbers(lengths: tuple[int, ...], threads: int) -> tuple[list[float], np.ndarray]:
    """What a few instructions of every kind come to on shards of these lengths."""
    driver = make_machine(numbers(1), lengths)

    def run_all(jobs):
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda job: job(), jobs))

    driver.make("g", numbers(2))
    driver.make("d", numbers(3))
    scalars = driver.execute(
        I(O.COMBINE, target="d", names=("d", "g"), scalars=(1.0, -1 / 3)),
        I(O.MOVE, left="parameters", right="d", scalar=0.1),
        I(O.DOT, left="parameters", right="d"),
        I(O.NORM1, left="d"),
        I(O.NORM_INF, left="d"),
        I(O.GRAM, names=("g", "d"), others=("parameters", "d")),
        run_all=run_all,
    )
    return scalars, driver.parameters()


def test_the_number_of_shards_changes_vectors_not_at_all_and_sums_by_rounding_alone_and_threads_no_bit():
    """B6: the result does not depend on how the model is cut."""
    scalars, parameters = all_numbers((SIZE,), threads=1)

    for lengths in ((1, SIZE - 1), LENGTHS, (1,) * SIZE):
        others, moved = all_numbers(lengths, threads=1)
        assert np.array_equal(moved, parameters)
        assert others == pytest.approx(scalars, rel=1e-12)
        by_threads, moved = all_numbers(lengths, threads=3)
        assert by_threads == others
        assert np.array_equal(moved, parameters)


def test_a_program_that_asks_for_very_much_is_refused_before_anything_is_made_of_it(driver):
    driver.execute(I(O.ALLOC, target="x"))
    for program, words in (
        ([I(O.GRAM, names=("x",) * 8000, others=("x",) * 8000)], "answers with 64000000 numbers; expected 65536"),
        ([I(O.GRAM, names=("x",) * 200, others=("x",) * 200)] * 2, "answers with 80000 numbers; expected 65536"),
        ([I(O.COMBINE, target="x", names=("x",) * 100_001, scalars=(0.5,) * 100_001)], "lists 200002 names"),
        ([I(O.FOLD, target="x", stage_ids=tuple(range(200_001)), count=1)], "lists 200001 names, stages and scalars"),
        ([I(O.NORM1, left="x")] * 10_001, "has 10001 instructions; expected 10000 at most"),
    ):
        assert words in refusal(driver.execute, *program)
    driver.write("x", np.ones(SIZE))
    # As of 150 pairs.
    answers = driver.execute(I(O.GRAM, names=("x",) * 301, others=("x",) * 151))

    assert answers == [float(SIZE)] * (301 * 151)
