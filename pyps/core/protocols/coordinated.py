"""Parameters that no push moves: a coordinator does, by operations on vectors that lie on the servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyps.core.protocols.base import Aggregation
from pyps.core.protocols.decision import Arrival, Decision
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Sandblaster(Aggregation):
    """Sandblaster L-BFGS (Dean et al. 2012, section 4.2): workers stage sums of gradients, nobody pushes."""

    name: ClassVar[str] = "sandblaster"

    def decide(self, arrival: Arrival) -> Decision:
        raise BadRequest(
            f"worker {arrival.contribution.gradient.worker_id!r} pushed a gradient to a run under sandblaster, whose"
            " parameters its coordinator moves: let the script call pyps_client.sandblaster, or start the servers with"
            " another --protocol"
        )
