"""The staleness that theory expects, and what each policy takes of gradients that old."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

from pyps.core import protocols, staleness
from pyps.core.protocols.base import Aggregation
from pyps.core.roster import Roster
from pyps.core.staleness import StalenessPolicy
from pyps.core.warmup import WarmUp
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import InvalidArgument

UPDATES_DRAWN = 250


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

    def policies(self, buckets: Mapping[int, int], measured: float | None = None) -> list[dict[str, Any]]:
        """Return what each policy takes of the steps of these gradients; `measured`: what the one in force took."""
        mine = self.policy.name if self.policy else ""
        return [
            {
                "name": name,
                "lost": measured
                if name == mine and measured is not None
                else self.lost(self.policy if name == mine else kind(), buckets),
                "in_force": name == mine,
            }
            for name, kind in staleness.POLICIES.items()
        ]

    def lost(self, policy: StalenessPolicy | None, buckets: Mapping[int, int]) -> float:
        """Return the share of the step that a policy takes of so many gradients by their staleness."""
        total = sum(buckets.values())
        if not total or policy is None:
            return 0.0
        weighed = {stale: policy.weigh(stale, self.split) for stale in buckets}
        own = {stale: weighing.rate_scale * weighing.accept for stale, weighing in weighed.items()}
        if self.gradients_per_update == 1 or not policy.scales_updates:
            left = sum(own[stale] * count * policy.update_scale([stale]) for stale, count in buckets.items()) / total
            return 1.0 - left
        # Which gradients made an update together is not known: some are drawn, always the same ones.
        drawn = Random(0).choices([*buckets], [*buckets.values()], k=self.gradients_per_update * UPDATES_DRAWN)
        updates = [drawn[at::UPDATES_DRAWN] for at in range(UPDATES_DRAWN)]
        return 1.0 - sum(policy.update_scale(each) * sum(map(own.get, each)) for each in updates) / len(drawn)  # type: ignore[arg-type]
