"""The staleness that theory expects, and what each policy takes of gradients that old."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pyps.core import protocols, staleness
from pyps.core.protocols.base import Aggregation
from pyps.core.roster import Roster
from pyps.core.staleness import StalenessPolicy
from pyps.core.warmup import WarmUp
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import InvalidArgument

STALENESS_MAX = 10**9


class Expected:
    """What the protocol in force makes of L workers: an update of every c gradients, n updates a round."""

    def __init__(self, status: pb.Status):
        roster = Roster(tuple(status.roster), missing=status.workers_missing)
        self.num_workers = roster.num_expected
        # None for a protocol, and a policy, of a newer server.
        self.protocol: Aggregation | None = None
        self.policy: StalenessPolicy | None = None
        self.split, self.gradients_per_update = 1.0, 1
        with suppress(InvalidArgument):
            self.policy = staleness.parse(status.staleness)
        with suppress(InvalidArgument):
            in_force = WarmUp.parse(status.warmup).stage if status.warming_up else protocols.parse(status.protocol)
            self.protocol, self.split = in_force, in_force.split(roster)
            self.gradients_per_update = max(1, round(self.num_workers / self.split))

    @property
    def law(self) -> float | None:
        """The mean staleness (L - 1)/c, of workers of equal speed; None where workers wait."""
        protocol = self.protocol
        if protocol is None or protocol.barrier or protocol.coordinated or protocol.pacer() or not self.num_workers:
            return None
        return (self.num_workers - 1) / self.gradients_per_update

    @property
    def law_words(self) -> str:
        return f"(L-1)/c = ({self.num_workers}-1)/{self.gradients_per_update}" if self.law is not None else ""

    def policies(self, buckets: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return what each policy takes of the steps of these gradients."""
        mine = self.policy.name if self.policy else ""
        return [
            {
                "name": name,
                "lost": self.lost((name == mine and self.policy) or kind(), buckets),
                "in_force": name == mine,
            }
            for name, kind in staleness.POLICIES.items()
        ]

    def lost(self, policy: StalenessPolicy, buckets: Mapping[int, int]) -> float:
        """Return the share of the step that a policy takes of so many gradients by their staleness."""
        total = sum(buckets.values())
        if not total:
            return 0.0
        mean = sum(stale * count for stale, count in buckets.items()) / total
        left = 0.0
        for stale, count in buckets.items():
            # What no server counts is no number for a policy.
            stale = min(stale, STALENESS_MAX)
            weighing = policy.weigh(stale, self.split)
            # Which gradients made an update together is not known: of several the mean stands for each.
            of_update = policy.update_scale([stale if self.gradients_per_update == 1 else round(mean)])
            left += count * weighing.rate_scale * of_update * weighing.accept
        return 1.0 - left / total
