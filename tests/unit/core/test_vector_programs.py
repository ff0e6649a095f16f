"""Coordinators of a vector machine: lives, retries, commits, and what a checkpoint sees of them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from pyps.core.vectors.machine import MachineState, Program, VectorMachine
from pyps.core.vectors.program import Instruction, Operation
from pyps_wire.errors import InvalidArgument, LimitExceeded, Superseded
from sandblaster import BYTES_MAX, LENGTHS, PLAN, Driver, fill, make_machine, make_shards
from shards import refusal, run_together

SIZE = sum(LENGTHS)
ALLOC, COMBINE, MOVE, NORM1 = Operation.ALLOC, Operation.COMBINE, Operation.MOVE, Operation.NORM1


def scale(name: str, scalar: float) -> Instruction:
    return Instruction(COMBINE, target=name, names=(name,), scalars=(scalar,))


@pytest.fixture
def driver() -> Driver:
    driver = make_machine(np.ones(SIZE))
    driver.execute(Instruction(ALLOC, target="x"), Instruction(Operation.COPY, target="x", left="parameters"))
    return driver


def test_the_last_program_again_gets_the_last_answer_and_is_not_executed_again(driver):
    program = driver.program(scale("x", 2.0), Instruction(NORM1, left="x"), Instruction(MOVE, left="x"))

    first = driver.machine.execute(program)
    again = driver.machine.execute(program)

    assert again == first
    assert first.scalars == (2.0 * SIZE,) and first.version == 1
    assert (driver.held("x") == 2).all()


def test_two_threads_with_one_program_execute_it_once(driver):
    program = driver.program(scale("x", 2.0), Instruction(NORM1, left="x"))
    results = []

    run_together([lambda: results.append(driver.machine.execute(program))] * 4)

    assert len(set(results)) == 1
    assert (driver.held("x") == 2).all()


def test_a_program_out_of_turn_is_refused_with_the_number_expected(driver):
    driver.execute(Instruction(ALLOC, target="y"))

    for op_seq in (0, 1, 4):
        program = replace(driver.program(Instruction(NORM1, left="x")), op_seq=op_seq)
        words = f"op_seq {op_seq}, the last executed here had 2: expected 3, or 2 for a retry"
        assert words in refusal(driver.machine.execute, program)


def test_a_coordinator_that_was_replaced_is_refused_with_both_lives(driver):
    late = driver.program(scale("x", 9.0))

    attached = driver.machine.attach(PLAN)

    assert attached.coordinator_epoch == 2
    assert attached.vectors == ("x",)
    with pytest.raises(Superseded, match="coordinator life 1 was replaced by life 2"):
        driver.machine.execute(late)
    assert (driver.held("x") == 1).all()
    assert Driver(driver.machine, driver.shards).execute(Instruction(NORM1, left="x")) == [SIZE]


def test_other_servers_take_the_coordinator_life_that_server_0_gave():
    machine = VectorMachine(make_shards(np.zeros(SIZE)), bytes_max=BYTES_MAX)

    assert machine.attach(PLAN, coordinator_epoch=7).coordinator_epoch == 7
    assert machine.attach(PLAN, coordinator_epoch=7).coordinator_epoch == 7
    with pytest.raises(Superseded, match="life 6 was replaced by life 7"):
        machine.attach(PLAN, coordinator_epoch=6)
    with pytest.raises(InvalidArgument, match="attach first"):
        machine.execute(Program(8, 1, (Instruction(ALLOC, target="x"),)))


def test_pairs_that_an_earlier_coordinator_left_count_against_the_memory_of_the_next():
    # Three pairs, five further vectors and two stages.
    needed = SIZE * 4 * (2 * 3 + 5 + 2)
    driver = make_machine(bytes_max=needed)
    for _ in range(3):
        driver.execute(
            Instruction(ALLOC, target="s"),
            Instruction(ALLOC, target="y"),
            Instruction(Operation.PUSH_HISTORY, left="s", right="y"),
        )
    plan = replace(PLAN, history_pairs=1, stages=6)

    with pytest.raises(LimitExceeded, match=r"3 pairs of history .left by an earlier coordinator; 1 are kept once"):
        driver.machine.attach(plan)

    assert driver.machine.coordinator_epoch == driver.epoch
    assert driver.machine.attach(replace(plan, stages=2)).planned_bytes == needed


def test_a_server_that_logs_updates_takes_no_coordinator():
    machine = VectorMachine(make_shards(np.zeros(SIZE)), bytes_max=BYTES_MAX, logged=True)

    with pytest.raises(InvalidArgument, match="start it without --update-log"):
        machine.attach(PLAN)


def test_a_commit_is_executed_once_whichever_coordinator_sends_it(driver):
    commit = scale("x", 3.0)

    assert driver.execute(commit, Instruction(NORM1, left="x"), commits=1, state="one") == [3.0 * SIZE]
    successor = Driver(driver.machine, driver.shards)

    assert successor.machine.attach(PLAN).state == "one"
    successor.epoch += 1
    assert successor.execute(commit, Instruction(NORM1, left="x"), commits=1, state="one") == []
    assert (driver.held("x") == 3).all()
    assert driver.machine.iteration == 1
    assert successor.execute(commit, commits=2, state="two") == []
    assert (driver.machine.iteration, driver.machine.text) == (2, "two")
    assert (driver.held("x") == 9).all()


def test_a_commit_that_skips_an_iteration_or_cannot_be_executed_commits_nothing():
    driver = make_machine()

    with pytest.raises(InvalidArgument, match="commits iteration 5, and this server is at iteration 0"):
        driver.execute(Instruction(ALLOC, target="x"), commits=5)
    with pytest.raises(InvalidArgument, match="names the vector 'x'"):
        driver.execute(Instruction(NORM1, left="x"), commits=1, state="one")

    assert (driver.machine.iteration, driver.machine.text, driver.machine.names) == (0, "", ())


def iterate(driver: Driver, k: int) -> None:
    driver.execute(Instruction(ALLOC, target="s"), Instruction(ALLOC, target="y"))
    for trial in (100.0, 200.0):
        driver.execute(fill("t", trial + k), Instruction(MOVE, left="t"))
    driver.execute(
        fill("s", float(k)),
        fill("y", -float(k)),
        Instruction(Operation.PUSH_HISTORY, left="s", right="y"),
        *([Instruction(Operation.DROP_OLDEST)] if k > 2 else []),
        fill("x", float(k)),
        fill("g", -float(k)),
        commits=k,
        state=f"state {k}",
    )


def begun() -> Driver:
    driver = make_machine()
    driver.make("one", np.ones(SIZE))
    driver.execute(*(Instruction(ALLOC, target=name) for name in "xgt"))
    return driver


def copied(machine: VectorMachine) -> tuple[MachineState, dict[int, np.ndarray]]:
    """What a checkpoint keeps, shard after shard, as one that is written slowly does."""
    with machine.durable():
        vectors, points = {}, {}
        for shard_id in LENGTHS_BY_ID:
            points[shard_id] = machine.parameters_to_keep(shard_id).copy()
            vectors[shard_id] = {name: v.copy() for name, v in machine.vectors_to_keep(shard_id).items()}
        return replace(machine.state(), vectors=vectors), points


LENGTHS_BY_ID = {2 * i: length for i, length in enumerate(LENGTHS)}


def test_a_program_waits_for_a_copy_only_where_it_changes_what_is_kept():
    for program, waits in (
        ([fill("t", 5.0), Instruction(MOVE, left="t")], False),
        ([fill("x", 5.0)], True),
        ([Instruction(Operation.DROP_OLDEST)], True),
        ([scale("s1", 5.0)], True),
    ):
        driver = begun()
        iterate(driver, 1)
        with ThreadPoolExecutor(1) as thread:
            with driver.machine.durable():
                done = thread.submit(driver.execute, *program)
                if not waits:
                    done.result(60)
                vectors = driver.machine.vectors_to_keep(0)
                before = [float(array[0]) for array in (driver.held("x"), vectors["g"], vectors["s1"])]
            done.result(60)
        assert before == [1.0, -1.0, 1.0], program


def restored(state: MachineState, points: dict[int, np.ndarray]) -> Driver:
    shards = make_shards(np.concatenate(list(points.values())))
    machine = VectorMachine(shards, bytes_max=BYTES_MAX)
    machine.restore(state)
    return Driver(machine, shards)


def test_the_restored_point_is_not_the_shards_own_memory():
    driver = begun()
    again = restored(*copied(driver.machine))
    again.make("t", np.full(SIZE, 5.0))

    again.execute(Instruction(MOVE, left="t"))

    assert (again.held("x") == 0).all()


def test_a_life_counted_after_a_restore_is_later_than_any_that_the_machine_forgot():
    driver = begun()
    again = restored(*copied(driver.machine))

    assert again.machine.attach(PLAN, at_least=1001).coordinator_epoch == 1001
    assert again.machine.attach(PLAN, at_least=1001).coordinator_epoch == 1002
