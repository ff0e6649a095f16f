"""A shard's log, done again in its order, gives the same receipts and the same bits (algorithm notes 1.4, U4)."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.recorder import Completed, Configured
from pyps.core.roster import Roster
from pyps.core.rules import RULES
from pyps.core.schedule import BatchGrowth
from pyps.core.shard import Shard
from pyps_wire.codecs import FLOAT16
from shards import Log, everything, gradient, make_behaviour, make_shard, nothing, replay, roster_of, run_together
from support import DEADLINE_SECONDS

LENGTH = 40
WORKERS = 5
BEHAVIOURS = {
    "plain": make_behaviour("async", "divide"),
    "rounds": make_behaviour("hardsync", rate_schedule="exponential:decay=0.9,every=3"),
    "few": make_behaviour("softsync:n=2", "per_update", clip_norm=4.0),
    "backup": make_behaviour(
        "backup:b=1",
        "constant",
        batch_growth=BatchGrowth.parse("start=8,maximum=64,lr_scaling=sqrt", epoch_examples=50),
    ),
    "staged": Behaviour.parse(protocol="softsync:n=1", warmup="updates=6,protocol=hardsync", staleness="drop:spread=3"),
    "sums": make_behaviour("ssp:s=0,strict_bsp=true"),
}


class Scenario:
    """Push of all kinds, with rosters, behaviours and rates that change, drawn from a seed."""

    def __init__(self, shard: Shard, seed: int) -> None:
        self.shard = shard
        self.random = np.random.default_rng(seed)
        self.roster = roster_of(WORKERS)
        self.sequences = dict.fromkeys(self.roster.workers, 0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice(
                np.array([self.push, self.change_roster, self.change_behaviour, self.change_rate], dtype=object),
                p=[0.85, 0.07, 0.05, 0.03],
            )()

    def push(self) -> None:
        worker_id = str(self.random.choice(list(self.sequences)))
        sequence = self.sequences[worker_id]
        self.sequences[worker_id] += 1
        base_version = max(0, self.shard.version - int(self.random.choice([0, 0, 0, 1, 4])))
        fields = {
            "worker_id": worker_id,
            "sequence": sequence,
            "base_version": base_version,
            "example_count": int(self.random.integers(0, 20)),
            "norm": float(self.random.uniform(0, 9)),
            "learning_rate": float(self.random.uniform(0.05, 0.2)) if self.random.random() < 0.1 else None,
        }
        if self.shard.rule.momentum_name and fields["learning_rate"] is not None:
            fields["momentum"] = float(self.random.choice([0.0, 0.5, 0.95]))
        self.shard.push(self._payload()(**fields), roster=self.roster)

    def _payload(self) -> Callable[..., Gradient]:
        values = self.random.standard_normal(LENGTH).astype(np.float32)
        kind = self.random.random()
        if kind < 0.1:
            return nothing
        if kind < 0.2:
            half = values.astype(np.float16).tobytes()
            return lambda **fields: gradient([], payload=half, codec=FLOAT16, **fields)
        return lambda **fields: gradient(values, **fields)

    def change_roster(self) -> None:
        present = self.random.random(WORKERS) < 0.7
        names = [worker_id for worker_id, here in zip(self.sequences, present, strict=True) if here]
        self.roster = Roster(tuple(names))
        self.shard.complete(self.roster)

    def change_behaviour(self) -> None:
        behaviour = BEHAVIOURS[str(self.random.choice(list(BEHAVIOURS)))]
        if behaviour is not BEHAVIOURS["backup"] or self.roster.num_workers > 1:
            self.shard.configure(behaviour=behaviour, roster=self.roster)

    def change_rate(self) -> None:
        self.shard.configure(learning_rate=float(self.random.uniform(0.05, 0.2)), roster=self.roster)


def fresh(rule: str, first: str = "plain", recorder: Log | None = None) -> Shard:
    parameters = np.random.default_rng(0).standard_normal(LENGTH)
    return make_shard(
        parameters, rule=rule, settings={"learning_rate": 0.1}, behaviour=BEHAVIOURS[first], recorder=recorder
    )


def test_a_mixed_log_of_all_that_can_happen_gives_the_same_bits():
    kinds: set[type] = set()
    outcomes: set[tuple[str, str]] = set()
    for rule in sorted(RULES):
        log = Log()
        shard = fresh(rule, recorder=log)
        Scenario(shard, seed=len(rule)).run(300)
        again = fresh(rule)
        replay(log, again)
        assert everything(again) == everything(shard), rule
        kinds |= {type(event) for event in log.events[0]}
        outcomes |= {(event.receipt.outcome.name, event.receipt.reason.name) for event in log.pushes(0)}
    # Else the replays would show less than they say.
    assert {Completed, Configured} <= kinds
    assert outcomes == {
        ("APPLIED", "UNSPECIFIED"),
        ("PENDING", "UNSPECIFIED"),
        ("REJECTED", "STALE"),
        ("REJECTED", "DROPPED"),
        ("REJECTED", "REPEATED"),
    }


def test_the_log_of_racing_threads_gives_the_same_bits():
    """Pushes, rosters, behaviours and rates come from several threads at once: the log's order is that of the lock."""
    kinds: set[type] = set()
    for first in sorted(BEHAVIOURS):
        log = Log()
        shard = fresh("momentum", first, recorder=log)
        # Each begins its next few calls when all do.
        barrier = threading.Barrier(5)

        def push_from(worker_id: str, seed: int, shard: Shard = shard, barrier: threading.Barrier = barrier) -> None:
            random = np.random.default_rng(seed)
            for sequence in range(60):
                if sequence % 5 == 0:
                    barrier.wait(DEADLINE_SECONDS)
                values = random.standard_normal(LENGTH).astype(np.float32)
                sent = gradient(values, worker_id=worker_id, sequence=sequence, base_version=shard.version)
                shard.push(sent, roster=roster_of(4))

        def change(shard: Shard = shard, barrier: threading.Barrier = barrier) -> None:
            for behaviour in [*BEHAVIOURS.values()] * 2:
                barrier.wait(DEADLINE_SECONDS)
                for num_workers in (3, 1, 2):
                    shard.complete(roster_of(num_workers))
                shard.configure(behaviour=behaviour, learning_rate=0.1 / (1 + shard.version), roster=roster_of(4))

        run_together([*(partial(push_from, f"w{index:02d}", index) for index in range(4)), change])
        again = fresh("momentum", first)
        replay(log, again)
        assert everything(again) == everything(shard), first
        kinds |= {type(event) for event in log.events[0]}
    assert {Completed, Configured} <= kinds
