"""ASGD: Zhang, Zhang, You, Zheng, Xu (ICASSP 2013): a mutex around handing out and updating the model.

The invariants A1, A2, A5 and A6 of the algorithm notes, section 2.2, under one mutex for the whole model. That of a
shard is in test_universal_invariants.py.
"""

import itertools
import threading

import numpy as np
import pytest

from pyps.core.gradient import PushPlan
from pyps.core.receipt import Outcome
from pyps.core.shard import Shard
from pyps.run.run import Run
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Step, fixed
from pyps_wire.partition import Model, Tensor
from shards import digest, gradient, make_shard, pull, push, run_together, serving
from simulated import cluster, worker_plans

# Long enough for threads to meet inside a kernel, which runs without the interpreter's lock.
LENGTHS = (60_000, 3_001, 40_000)
CLIENTS, ROUNDS = 4, 40


class Ownership:
    """Counts how often the mutex was taken, and how often while another thread held it."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.breaches = 0
        self.taken = 0

    def __call__(self, locked: bool) -> None:
        me = threading.get_ident()
        expected = None if locked else me
        self.breaches += self.owner != expected
        self.owner = me if locked else None
        self.taken += locked


def new_model() -> dict[int, Shard]:
    return {
        shard_id: make_shard(np.zeros(length), protocol="asgd", shard_id=shard_id)
        for shard_id, length in enumerate(LENGTHS)
    }


def new_run(ownership: Ownership) -> Run:
    class Watched:
        def __enter__(self) -> None:
            mutex.acquire()
            ownership(True)

        def __exit__(self, *error: object) -> None:
            ownership(False)
            mutex.release()

    model = Model(tuple(Tensor(f"{index}", (length,), group=index) for index, length in enumerate(LENGTHS)))
    run = serving(*map(str, range(CLIENTS)), model=model, protocol="asgd")
    content = run.rounds._content
    mutex = content.mutex
    vars(content)["mutex"] = Watched()
    return run


def read_all(run: Run, worker_id: str) -> list[tuple[int, str]]:
    assert run.mutex is not None
    with run.mutex:
        pulled = [pull(shard, worker_id) for shard in run.content.shards.values()]
    return [(version, digest(parameters)) for version, parameters in pulled]


def values_of(client: int, sequence: int, length: int) -> np.ndarray:
    # Sums of small whole numbers are exact, whatever their order.
    return np.full(length, client * ROUNDS + sequence + 1, np.float32)


def test_a1_a2_no_get_overlaps_a_push_and_every_get_is_one_version_of_the_whole_model():
    ownership = Ownership()
    run = new_run(ownership)
    pushed: list[tuple[int, int, int]] = []
    seen: list[list[tuple[int, str]]] = []

    def client(index: int) -> None:
        for sequence in range(ROUNDS):
            got = read_all(run, str(index))
            seen.append(got)
            parts = [
                PushPlan(
                    shard_id,
                    gradient(
                        values_of(index, sequence, length),
                        worker_id=str(index),
                        sequence=sequence,
                        base_version=got[shard_id][0],
                    ),
                )
                for shard_id, length in enumerate(LENGTHS)
            ]
            receipts = [each.receipt for each in run.push_whole(parts)]
            assert {receipt.outcome for receipt in receipts} == {Outcome.APPLIED}
            # A push moves all shards to one version.
            [version] = {receipt.version_after for receipt in receipts}
            pushed.append((version, index, sequence))

    run_together([lambda index=index: client(index) for index in range(CLIENTS)])  # type: ignore[misc]
    assert ownership.breaches == 0
    assert ownership.taken == 2 * CLIENTS * ROUNDS
    # A2: replay the pushes in the order of the mutex; every GET is one state of that history, all shards alike.
    history = [[(0, digest(pull(shard)[1])) for shard in new_model().values()]]
    replayed = new_model()
    for version, index, sequence in sorted(pushed):
        for shard_id, shard in replayed.items():
            push(shard, values_of(index, sequence, LENGTHS[shard_id]), worker_id=str(index), sequence=sequence)
        history.append([(version, digest(pull(shard)[1])) for shard in replayed.values()])
    torn = [got for got in seen if got != history[got[0][0]]]
    assert torn == []


def test_a5_k_minibatches_make_one_update():
    def four_minibatches(step: Step) -> Computed:
        return Computed({0: 4 * np.ones(1, np.float32)}, examples=4 * 16, minibatches=4)

    plans = worker_plans(4, fixed(4.0), steps=5)
    run = cluster("asgd:accumulate=4", workers=plans, compute=four_minibatches).run()
    assert run.shards[0].version == 4 * 5
    # The rate meets their sum, once.
    assert run.parameters().tolist() == [-4.0 * 20]
    assert run.shards[0].examples == 4 * 5 * 64


def test_a6_throughput_is_bound_by_the_clients_or_by_the_mutex():
    """X(G) <= min(G / (t_c + t_s + t_x), 1 / t_s)."""
    holding, transfer, seconds = 0.1, 0.05, 100.0
    reached = 0
    for clients, computing in itertools.product((1, 2, 8), (0.05, 0.2, 4.0)):
        server = ServerPlan(expected_workers=clients, service_seconds=holding, transfer_seconds=transfer)
        run = cluster("asgd", workers=worker_plans(clients, fixed(computing)), server=server).run(seconds=seconds)
        bound = min(clients / (computing + holding + transfer), 1 / holding)
        measured = run.simulation.num_taken / seconds
        assert measured <= bound * (1 + 1e-9), (clients, computing)
        if clients == 1 or clients * holding > 2 * (computing + holding + transfer):
            # Alone, or crowded so that the mutex is never free, they reach it; else they lose time in the queue.
            assert measured == pytest.approx(bound, rel=0.05), (clients, computing)
            reached += 1
    assert reached == 3 + 2
