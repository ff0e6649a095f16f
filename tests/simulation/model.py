"""Which histories are allowed, told in sequence: pushes, states of shards, and lives of servers.

Each push adds 1, or its share of 1 where a round averages, to a number of each shard that is its own.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, OUTCOME_REJECTED, Receipt

State = tuple[float, ...]
Lines = dict[tuple[int, int], dict[int, float]]
# The shares of a push in a round of one, two or three.
SHARES = {float(Fraction(1, n)) for n in (1, 2, 3)}


def near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-3


class Model:
    """What was seen of a run. Shards are numbers, and a life of a server is an epoch of its shards."""

    def __init__(self) -> None:
        # Of each shard by epoch and version.
        self.states: dict[int, dict[tuple[int, int], State]] = defaultdict(dict)
        # Of each push and shard; and the durable versions that receipts told, by server and epoch.
        self.receipts: list[tuple[int, Receipt]] = []
        self.durable: dict[tuple[int, int], int] = defaultdict(int)
        # Of each shard's later lives, by epoch: the epoch and the version that it goes on from. And all lives.
        self.parents: dict[tuple[int, int], tuple[int, int]] = {}
        self.lives: dict[int, list[int]] = defaultdict(lambda: [0])
        # The lives of shards that began with all that the life before had answered.
        self.takeovers: set[tuple[int, int]] = set()
        self.problems: list[str] = []

    def see(self, who: str, shard: int, epoch: int, version: int, state: State) -> None:
        """Note that somebody saw a shard."""
        known = self.states[shard].setdefault((epoch, version), state)
        if known is not state:
            if known != state:
                self._wrong(f"{who} saw another version {version} of shard {shard} in epoch {epoch} than others: torn")
            return
        if not near(sum(state), version):
            self._wrong(f"{who} saw version {version} of shard {shard} with {sum(state):.3f} pushes: {_in(state)}")
        if not all(any(near(value, share) for share in SHARES) for value in state if value):
            self._wrong(f"{who} saw a push with an impossible share in shard {shard}, version {version}: {_in(state)}")

    def note(self, push: int, receipt: Receipt) -> None:
        self.receipts.append((push, receipt))
        if receipt.durable_version:
            told = receipt.shard_id, receipt.epoch
            self.durable[told] = max(self.durable[told], receipt.durable_version)

    def saved(self, shard: int, epoch: int) -> None:
        """Note that a server ended in order: all that it acknowledged is durable."""
        told = [r.version_after for _, r in self.receipts if (r.shard_id, r.epoch) == (shard, epoch)]
        self.durable[shard, epoch] = max(self.durable[shard, epoch], *told, 0)

    def restored(self, shard: int, epoch: int, version: int, parent: int) -> None:
        """Note where a later life of a server begins: at a version that a checkpoint holds of the parent."""
        last = self.lives[shard][-1]
        if epoch <= last:
            self._wrong(f"shard {shard} is served under epoch {epoch}, and was under {last} before")
            return
        told, first = self.durable[shard, last], self.parents.get((shard, last), (0, 0))[1]
        if version < told or (told > first and parent != last):
            self._wrong(f"shard {shard} came back at version {version} of epoch {parent}; told was {told} of {last}")
        self.parents[shard, epoch] = parent, version
        self.lives[shard].append(epoch)

    def check(self) -> list[str]:
        """Return what is wrong with all that was seen."""
        for shard, states in self.states.items():
            self._check_growth(shard, states)
        lines = {(shard, e): self._line(shard, e) for shard, states in self.states.items() for e, _ in states}
        for push, receipt in self.receipts:
            self._check_receipt(push, receipt, lines)
        return self.problems

    def _check_growth(self, shard: int, states: dict[tuple[int, int], State]) -> None:
        """Once a push is in, it stays as it is."""
        for epoch in {epoch for epoch, _ in states}:
            line = self._line(shard, epoch)
            seen = sorted((v, e) for e, v in states if e in line and v <= line[e])
            for (v1, e1), (v2, e2) in pairwise(seen):
                before, after = states[e1, v1], states[e2, v2]
                changed = [i for i, value in enumerate(before) if value and not near(value, after[i])]
                if changed:
                    where = f"between version {v1} (epoch {e1}) and {v2} (epoch {e2}) of shard {shard}"
                    self._wrong(f"push {changed[0]} was applied again, or lost, {where}: {_in(before)}, {_in(after)}")

    def _line(self, shard: int, epoch: int) -> dict[int, float]:
        """Return the lives that an epoch goes on from, each with the last version of it that counts."""
        line, last = {epoch: float("inf")}, float("inf")
        while (shard, epoch) in self.parents:
            epoch, version = self.parents[shard, epoch]
            line[epoch] = last = min(last, version)
        return line

    def _check_receipt(self, push: int, receipt: Receipt, lines: Lines) -> None:
        shard, epoch = receipt.shard_id, receipt.epoch
        what = f"push {push} to shard {shard} in epoch {epoch}"
        for (seen_in, version), state in self.states[shard].items():
            is_in, line = state[push] > 0, lines[shard, seen_in]
            where = f"version {version} of epoch {seen_in}"
            if receipt.outcome == OUTCOME_REJECTED:
                if is_in and seen_in >= epoch:
                    self._wrong(f"{what} was refused, and is in {where}")
            elif epoch in line and version <= line[epoch]:
                taken = receipt.version_after if receipt.outcome == OUTCOME_APPLIED else receipt.min_version
                counts = receipt.outcome == OUTCOME_APPLIED or (receipt.outcome == OUTCOME_PENDING and taken)
                # What a later life does again counts there; what a standby took over counts as it was.
                counts = counts and (taken <= line[epoch] or self._is_promised(shard, seen_in, epoch))
                if counts and is_in != (version >= taken):
                    self._wrong(f"{what} made version {taken}, and is {'' if is_in else 'not '}in {where}")

    def _is_promised(self, shard: int, epoch: int, former: int) -> bool:
        """Return whether an epoch holds all that was answered in a former one, by takeovers alone."""
        while epoch > former and (shard, epoch) in self.takeovers:
            epoch, _ = self.parents[shard, epoch]
        return epoch == former

    def _wrong(self, what: str) -> None:
        self.problems.append(what)


def _in(state: State) -> str:
    return "{" + ", ".join(f"{i}: {value:.3g}" for i, value in enumerate(state) if value) + "}"
