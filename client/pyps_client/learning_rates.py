"""Learning rates, and momenta beside them, that a worker's scheduler sets, until the servers have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyps_wire.common_pb2 import OUTCOME_REJECTED, Receipt
from pyps_wire.errors import BadRequest


class GroupRate(NamedTuple):
    """What is set of a parameter group; without a momentum the servers' stays."""

    learning_rate: float
    momentum: float | None = None
    # From a worker that does not own the schedule: it holds only while nobody does.
    provisional: bool = False


class LearningRates:
    """What this worker set, by parameter group, and which server has taken it. Used by the thread that pushes.

    A push that was refused, or a server that was restored, may have left the old rate in force: the new one goes
    with the next push again.
    """

    def __init__(self, num_servers: int, *, num_groups: int) -> None:
        self._num_groups = num_groups
        self._rates: dict[int, GroupRate] = {}
        # For each server the epoch and the rates that it took last.
        self._taken: list[tuple[int, dict[int, GroupRate]]] = [(-1, {})] * num_servers

    def change(self, rates: Mapping[int, GroupRate] | None) -> None:
        """Sets the learning rates of some groups."""
        for group, (rate, momentum, provisional) in (rates or {}).items():
            if not 0 <= group < self._num_groups:
                raise BadRequest(f"learning_rates names parameter group {group}; expected 0 to {self._num_groups - 1}.")
            if not 0 <= rate < float("inf"):
                raise BadRequest(f"The learning rate of group {group} is {rate!r}; expected a number, 0 or more.")
            self._rates[group] = GroupRate(float(rate), momentum, provisional)

    def owed(self, server_index: int, *, epoch: int) -> dict[int, GroupRate]:
        """What the server's next push has to carry; nothing when it has it all.

        A provisional rate goes with each push: between two of them other workers' may have been in force.
        """
        if self._taken[server_index] != (epoch, self._rates):
            return self._rates.copy()
        return {group: rate for group, rate in self._rates.items() if rate.provisional}

    def answered(self, server_index: int, *, epoch: int, receipts: Sequence[Receipt]) -> None:
        """Notes what a push of that epoch, which carried all that was owed, came to."""
        if all(receipt.outcome != OUTCOME_REJECTED for receipt in receipts):
            self._taken[server_index] = (epoch, self._rates.copy())
