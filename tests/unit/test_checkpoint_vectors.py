"""Checkpoints of a run with a coordinator: its vectors, of one iteration on all shards, and the queue of portions."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pyps.core.rule_settings import RuleSettings
from pyps.core.vectors.machine import VectorMachine
from pyps.core.vectors.program import Instruction, Operation
from pyps.run_header import RestoredRun, Snapshot
from pyps.storage.checkpoint import Checkpoint
from pyps.storage.folder import CheckpointFolder
from pyps_wire.partition import Model, Partition, Tensor
from sandblaster import BYTES_MAX, Driver, fill, make_machine, make_shards
from shards import HEADER, run_together

LENGTHS = (16, 16)
SIZE = sum(LENGTHS)
# The shards of these machines are 0 and 2, and have no slots.
PLAN = Partition.of_tables(Model((Tensor("w", (48,)),)), (16, 16, 16), servers=(0, 1, 0), num_servers=2)
HEAD = dataclasses.replace(HEADER, partition=PLAN, optimizer=RuleSettings.make("sgd", ({"learning_rate": 1.0},)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    opened = CheckpointFolder(tmp_path / "server-0", keep=1000)
    yield opened
    opened.close()


def begun() -> Driver:
    driver = make_machine(lengths=LENGTHS)
    driver.make("one", np.ones(SIZE))
    for name in "xgt":
        driver.execute(Instruction(Operation.ALLOC, target=name))
    return driver


def iterate(driver: Driver, k: int) -> None:
    """All of iteration k: trials that move the parameters, then x = k, g = -k, and the k-th pair 1/k, k."""
    driver.execute(*(Instruction(Operation.ALLOC, target=name) for name in "sy"))
    for trial in (1000.0, 2000.0):
        driver.execute(fill("t", trial + k), Instruction(Operation.MOVE, left="t"))
    values = {"s": 1 / k, "y": 1 / k, "x": k, "g": -k}
    driver.execute(
        *(fill(name, float(value)) for name, value in values.items()),
        Instruction(Operation.PUSH_HISTORY, left="s", right="y"),
        *([Instruction(Operation.DROP_OLDEST)] if k > 2 else []),
        commits=k,
        state=f"state {k}",
    )


def save(folder: CheckpointFolder, driver: Driver, **others: Any) -> Path:
    return folder.save(lambda: Snapshot(HEAD, driver.shards, driver.machine, **others)).path


def restored_driver(restored: RestoredRun) -> Driver:
    parameters = np.concatenate([restored.shards[shard_id].parameters for shard_id in (0, 2)])
    shards = make_shards(parameters, LENGTHS)
    machine = VectorMachine(shards, bytes_max=BYTES_MAX)
    machine.restore(restored.machine)
    return Driver(machine, shards)


def test_the_parameters_kept_are_the_accepted_point_and_not_a_trial(folder):
    driver = begun()
    iterate(driver, 1)
    driver.execute(fill("t", 77.0), Instruction(Operation.MOVE, left="t"))

    path = save(folder, driver)
    assert (driver.parameters() == 77).all()
    assert all((shard.parameters == 1).all() for shard in folder.resume().shards.values())
    assert folder.resume().shards[0].version == driver.shards[0].version
    for entry in Checkpoint(path).shards.values():
        arrays = load_file(folder.path / "shards" / entry.file)
        assert (arrays["parameters"] == 1).all()
        assert {"vector.g", "vector.s1", "vector.y1"} < set(arrays)


def test_checkpoints_written_amid_programs_each_hold_one_iteration(folder):
    driver = begun()
    over = threading.Event()

    def coordinate() -> None:
        for k in range(1, 41):
            iterate(driver, k)
        over.set()

    def write() -> None:
        while not over.is_set():
            save(folder, driver)

    run_together([coordinate, write])
    save(folder, driver)

    found = set()
    for path in sorted(folder.path.glob("checkpoint-*")):
        restored = Checkpoint(path).load()
        machine = restored.machine
        k = machine.iteration
        found.add(k)
        assert machine.text == (f"state {k}" if k else "")
        assert machine.table.newest == k
        for shard_id, state in restored.shards.items():
            vectors = machine.vectors[shard_id]
            assert (state.parameters == k).all() and (vectors["g"] == -k).all()
            pairs = [j for j in (k - 1, k) if j > 0]
            assert set(vectors) == {"g", *(f"{letter}{j}" for j in pairs for letter in "sy")}
            assert all((vectors[f"y{j}"] == np.float32(1 / j)).all() for j in pairs)
    assert 40 in found


def test_a_machine_to_which_nobody_came_leaves_no_trace(folder):
    driver = make_machine(lengths=LENGTHS, attach=False)

    path = save(folder, driver)

    assert "vector_machine" not in json.loads(path.read_text(encoding="utf-8"))
    assert folder.resume().machine is None and folder.resume().work is None


def test_a_coordinator_that_has_made_no_vector_yet_is_kept(folder):
    driver = make_machine(np.arange(SIZE), lengths=LENGTHS)
    save(folder, driver)

    again = restored_driver(folder.resume())

    assert again.machine.names == () and again.epoch == 2
    assert (again.parameters() == np.arange(SIZE)).all()


def test_the_queue_s_state_comes_back_as_it_was(folder):
    work = {"pass": 3, "pending": [[0, 5], [7, 9]], "loss": float("inf"), "by_portion": {4: "w1", 11: "w0"}}

    save(folder, make_machine(lengths=LENGTHS), work=work)

    assert folder.resume().work == {**work, "by_portion": {"4": "w1", "11": "w0"}}
