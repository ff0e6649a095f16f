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

    @property
    def coordinated(self) -> bool:
        return True

    def check_worker(self, worker_id: str, parts: tuple[int, ...], replica: str) -> None:
        if replica or parts:
            raise BadRequest(
                f"worker {worker_id!r} is a process of a replica or holds a part of the model, and under {self.text} "
                "workers of one process compute with the whole of it: start the servers with another --protocol"
            )

    def check_change(self, before: Aggregation) -> None:
        if not before.coordinated:
            raise BadRequest(
                f"the run trains by {before.text}, and {self.text} would end each of its workers at its next push: a "
                "coordinator moves the parameters then. Keep the run's protocol, or begin another run under "
                f"{self.name}"
            )
