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


class Expected:
    """What the protocol in force makes of L workers: an update of every c gradients, n updates a round."""

    def __init__(self, status: pb.Status):
        roster = Roster(tuple(status.roster), missing=status.workers_missing)
        # None for a protocol, and a policy, of a newer server.
        self.protocol: Aggregation | None = None
        self.policy: StalenessPolicy | None = None
        self.split, self.gradients_per_update = 1.0, 1
        # The mean staleness (L - 1)/c, of workers of equal speed; None where workers wait.
        self.law: float | None = None
        self.law_words = ""
        with suppress(InvalidArgument):
            self.policy = staleness.parse(status.staleness)
        with suppress(InvalidArgument):
            protocol = WarmUp.parse(status.warmup).stage if status.warming_up else protocols.parse(status.protocol)
            num_workers, self.protocol, self.split = roster.num_expected, protocol, protocol.split(roster)
            self.gradients_per_update = max(1, round(num_workers / self.split))
            if num_workers and not (protocol.barrier or protocol.coordinated or protocol.pacer()):
                self.law = (num_workers - 1) / self.gradients_per_update
                self.law_words = f"(L-1)/c = ({num_workers}-1)/{self.gradients_per_update}"

    def policies(self, buckets: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return what each policy takes of the steps of these gradients."""
        mine = self.policy.name if self.policy else ""
        return [
            {
                "name": name,
                "lost": self.lost(self.policy if name == mine else kind(), buckets),
                "in_force": name == mine,
            }
            for name, kind in staleness.POLICIES.items()
        ]

    def lost(self, policy: StalenessPolicy | None, buckets: Mapping[int, int]) -> float:
        """Return the share of the step that a policy takes of so many gradients by their staleness."""
        total = sum(buckets.values())
        if not total or policy is None:
            return 0.0
        mean = sum(stale * count for stale, count in buckets.items()) / total
        left = 0.0
        for stale, count in buckets.items():
            weighing = policy.weigh(stale, self.split)
            # Which gradients made an update together is not known: of several the mean stands for each.
            of_update = policy.update_scale([stale if self.gradients_per_update == 1 else round(mean)])
            left += count * weighing.rate_scale * of_update * weighing.accept
        return 1.0 - left / total
