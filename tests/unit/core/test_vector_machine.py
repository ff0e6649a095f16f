"""The instruction set on a server's shards, against numpy (Dean et al. 2012, section 4.2)."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pyps.core.vectors.program import Instruction, Operation, Precision
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire.errors import BadRequest, LimitExceeded, RunFinished
from sandblaster import LENGTHS, Driver, make_machine
from shards import pull, refusal

F32, F64 = Precision.FLOAT32, Precision.FLOAT64
SIZE = sum(LENGTHS)
DTYPES = {F32: np.float32, F64: np.float64}


@pytest.fixture
def driver() -> Driver:
    """A machine with a coordinator that has attached."""
    return make_machine()


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def thirds(driver: Driver, name: str, precision: Precision, seed: int) -> np.ndarray:
    """Makes a vector whose numbers need float64 where it is kept so; returns them in its precision."""
    values = numbers(seed)
    driver.make(name, values, precision)
    driver.execute(Instruction(Operation.SCALE, target=name, scalar=1 / 3))
    return (values.astype(np.float64) * (1 / 3)).astype(DTYPES[precision])


def test_operations_and_precisions_have_the_numbers_of_the_protocol():
    assert {f"OPERATION_{operation.name}": int(operation) for operation in Operation} == {
        name: number for name, number in wire.Instruction.Operation.items() if number
    }
    assert {f"PRECISION_{precision.name}": int(precision) for precision in Precision} == {
        name: number for name, number in wire.Precision.items() if number
    }


def test_an_instruction_is_the_same_after_its_way_through_json():
    instruction = Instruction(
        Operation.COMBINE,
        target="d",
        precision=Precision.FLOAT64,
        names=("g", "s1"),
        scalars=(-0.1, 1 / 3),
        stage_ids=(2**63 + 1,),
        count=7,
    )

    again = Instruction.from_plain(json.loads(json.dumps(instruction.to_plain())))

    assert again == instruction


WRITERS = {
    Operation.COPY: lambda z, x, y: x,
    Operation.FILL: lambda z, x, y: np.full(SIZE, 1.7),
    Operation.SCALE: lambda z, x, y: 1.7 * z,
    Operation.ADD: lambda z, x, y: x + y,
    Operation.SUB: lambda z, x, y: x - y,
    Operation.MUL: lambda z, x, y: x * y,
    Operation.AXPY: lambda z, x, y: z + 1.7 * x,
}


def test_each_operation_writes_what_numpy_computes_in_float64_rounded_once():
    for operation, precisions in itertools.product(WRITERS, itertools.product((F32, F64), repeat=3)):
        driver = make_machine()
        z, x, y = (thirds(driver, name, p, seed) for seed, (name, p) in enumerate(zip("zxy", precisions, strict=True)))

        driver.execute(Instruction(operation, target="z", left="x", right="y", scalar=1.7))

        expected = WRITERS[operation](*(values.astype(np.float64) for values in (z, x, y)))
        assert driver.held("z").dtype == DTYPES[precisions[0]], (operation, precisions)
        assert np.array_equal(driver.held("z"), expected.astype(DTYPES[precisions[0]])), (operation, precisions)


def test_sums_are_of_all_shards_and_norm_inf_is_the_largest():
    for precisions in itertools.product((F32, F64), repeat=2):
        driver = make_machine()
        x, y = (thirds(driver, name, p, seed) for seed, (name, p) in enumerate(zip("xy", precisions, strict=True)))
        x, y = x.astype(np.float64), y.astype(np.float64)

        dot, norm1, norm_inf = driver.execute(
            Instruction(Operation.DOT, left="x", right="y"),
            Instruction(Operation.NORM1, left="x"),
            Instruction(Operation.NORM_INF, left="x"),
        )

        assert dot == pytest.approx(x @ y, rel=1e-13), precisions
        assert norm1 == pytest.approx(np.abs(x).sum(), rel=1e-13), precisions
        assert norm_inf == np.abs(x).max(), precisions


def test_gram_answers_row_by_row_and_combine_sums_into_a_target_that_may_be_among_its_vectors(driver):
    a, b, _ = (thirds(driver, name, F32 if name == "c" else F64, seed) for seed, name in enumerate("abc"))

    gram = driver.execute(Instruction(Operation.GRAM, names=("a", "b"), others=("a", "b", "c")))
    dots = driver.execute(*(Instruction(Operation.DOT, left=left, right=right) for left in "ab" for right in "abc"))
    assert gram == dots

    driver.execute(Instruction(Operation.COMBINE, target="a", names=("a", "b", "b"), scalars=(0.5, -2.0, 3.0)))

    assert np.array_equal(driver.held("a"), 0.5 * a + -2.0 * b + 3.0 * b)


def test_a_norm_of_nan_is_nan_whichever_shard_has_it(driver):
    driver.make("x", np.zeros(SIZE))
    for vectors in driver.machine._vectors.values():
        vectors.arrays["x"][0] = math.nan
        assert math.isnan(driver.execute(Instruction(Operation.NORM_INF, left="x"))[0])
        vectors.arrays["x"][0] = 0.0


def test_move_writes_the_parameters_as_one_update_of_every_shard_and_wakes_who_waits_for_it():
    driver = make_machine(numbers(1))
    x, d = thirds(driver, "x", F32, 2), thirds(driver, "d", F64, 3)
    woken = []
    driver.shards[2].when_version(1, lambda: woken.append(pull(driver.shards[2])[0]))

    driver.execute(Instruction(Operation.MOVE, left="x"))
    assert np.array_equal(driver.parameters(), x)
    assert ([shard.version for shard in driver.shards.values()], woken) == ([1, 1, 1], [1])

    driver.execute(Instruction(Operation.MOVE, left="x", right="d", scalar=0.25))
    expected = (x.astype(np.float64) + 0.25 * d).astype(np.float32)
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
    with pytest.raises(BadRequest, match="forgets 's2', which is of the history"):
        driver.execute(Instruction(Operation.FREE, target="s2"))
    driver.execute(Instruction(Operation.DROP_OLDEST), Instruction(Operation.DROP_OLDEST))
    # Numbers go on growing where the history was emptied: a pair's name is never used twice.
    driver.make("a", np.zeros(SIZE))
    driver.make("b", np.zeros(SIZE))
    driver.execute(Instruction(Operation.PUSH_HISTORY, left="a", right="b"))
    assert driver.machine.names == ("s4", "y4")


def test_free_gives_the_bytes_back(driver):
    driver.make("a", np.zeros(SIZE))
    before = driver.machine.bytes
    driver.make("b", np.zeros(SIZE), F64)
    driver.execute(Instruction(Operation.BEGIN_PASS, count=99))
    assert driver.machine.bytes == 4 * SIZE + 8 * SIZE

    driver.execute(Instruction(Operation.FREE, target="b"))

    assert before == 4 * SIZE + 4 * SIZE  # with the stage that its values came by
    assert driver.machine.bytes == 4 * SIZE
    assert driver.machine.names == ("a",)


I = Instruction  # noqa: E741
O = Operation  # noqa: E741


def test_a_program_with_one_impossible_instruction_changes_nothing(driver):
    driver.make("x", np.ones(SIZE))
    before = driver.machine.bytes
    for bad, words in (
        (I(O.DOT, left="q", right="x"), "3 (DOT) names the vector 'q', which is not there; there are x, z"),
        (I(O.COPY, target="q", left="x"), "names the vector 'q'"),
        (I(O.COPY, target="parameters", left="x"), "(COPY) writes 'parameters'; MOVE alone does that"),
        (I(O.ALLOC, target="x"), "which is there already: FREE it first"),
        (I(O.ALLOC, target="parameters"), "choose another"),
        (I(O.ALLOC, target="s7"), "a pair of the history: choose another"),
        (I(O.ALLOC, target="a" * 17), "16 of them at most"),
        (I(O.ALLOC, target=""), "expected letters, digits and _"),
        (I(O.FREE, target="q"), "names the vector 'q'"),
        (I(O.SCALE, target="x", scalar=math.nan), "has the scalar nan; expected a finite number"),
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
        assert words in refusal(driver.execute, I(O.ALLOC, target="z"), I(O.FILL, target="x", scalar=9.0), bad)
        assert driver.machine.names == ("x",), bad
        assert (driver.held("x") == 1).all(), bad
        assert driver.machine.bytes == before, bad
    # The number of the refused program is free for the next.
    assert driver.execute(I(O.NORM1, left="x")) == [SIZE]


def test_a_program_sees_the_vectors_that_it_made_and_not_those_that_it_freed(driver):
    assert driver.execute(
        I(O.ALLOC, target="q", precision=F64), I(O.FILL, target="q", scalar=2.0), I(O.NORM1, left="q")
    ) == [2.0 * SIZE]
    with pytest.raises(BadRequest, match=r"instruction 2 \(NORM1\) names the vector 'q'"):
        driver.execute(I(O.FREE, target="q"), I(O.NORM1, left="q"))


def test_a_program_makes_no_more_than_there_is_room_for_also_of_what_it_frees():
    driver = make_machine(bytes_max=48 * SIZE)
    again = (I(O.ALLOC, target="q", precision=F64), I(O.FREE, target="q"))

    assert driver.execute(*again * 6) == []
    for program in (again * 7, [I(O.ALLOC, target=f"v{k}") for k in range(13)]):
        with pytest.raises(LimitExceeded, match="raise --max-vector-bytes"):
            driver.execute(*program)
        assert driver.machine.names == ()


def test_an_empty_program_and_a_state_without_a_commit_are_refused(driver):
    with pytest.raises(BadRequest, match="has no instruction"):
        driver.execute()
    with pytest.raises(BadRequest, match="commits no iteration"):
        driver.execute(I(O.ALLOC, target="a"), state="{}")
    with pytest.raises(BadRequest, match="the coordinator's state has 65537 bytes; expected 65536 at most"):
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
    driver.make("d", numbers(3), F64)
    scalars = driver.execute(
        I(O.AXPY, target="d", scalar=-1 / 3, left="g"),
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


# Bounds: a short message may not ask for very much.


def test_a_program_that_asks_for_very_much_is_refused_before_anything_is_made_of_it(driver):
    driver.execute(I(O.ALLOC, target="x"))
    for program, words in (
        ([I(O.GRAM, names=("x",) * 8000, others=("x",) * 8000)], "answers with 64000000 numbers; expected 65536"),
        ([I(O.GRAM, names=("x",) * 200, others=("x",) * 200)] * 2, "answers with 80000 numbers; expected 65536"),
        ([I(O.COMBINE, target="x", names=("x",) * 100_001, scalars=(0.5,) * 100_001)], "lists 200002 names"),
        ([I(O.FOLD, target="x", stage_ids=tuple(range(200_001)), count=1)], "lists 200001 names, stages and scalars"),
        ([I(O.FILL, target="x")] * 10_001, "has 10001 instructions; expected 10000 at most"),
    ):
        assert words in refusal(driver.execute, *program)
    driver.execute(I(O.FILL, target="x", scalar=1.0))
    # As of 150 pairs.
    answers = driver.execute(I(O.GRAM, names=("x",) * 301, others=("x",) * 151))

    assert answers == [float(SIZE)] * (301 * 151)
