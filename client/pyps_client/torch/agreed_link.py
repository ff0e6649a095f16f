"""Pushes and pulls beside the computation in a replica: for all processes they begin and end beside one minibatch.

A push or a pull is over once the processes have found, between two minibatches, that it is over on all of them. So all
push sums of the same minibatches, and the parameters that each brings into its part come from pulls that began and
ended beside the same ones. As with one process, shards of one pull may be of different versions.

Collective calls are made by the threads that train and by no other, or those of two threads would mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyps_client.learning_rates import GroupRate
from pyps_client.push import Description, Plan
from pyps_client.session import Session
from pyps_client.torch.gradient_buffer import GradientBuffer
from pyps_client.torch.overlap import Lane, ThreadedLink
from pyps_client.torch.parameter_buffer import ParameterBuffer


class AgreedLink(ThreadedLink):
    """overlap="step" in a replica. All processes call the same methods in the same order."""

    def __init__(self, session: Session, parameters: ParameterBuffer, spare: GradientBuffer) -> None:
        super().__init__(session, parameters, spare)
        self._session: Session = session
        # Those whose jobs were not found to be over on all processes.
        self._under_way: set[Lane[Any]] = set()

    @property
    def busy(self) -> list[float]:
        """Whether a push goes on in this process, and whether a pull does, as numbers that can be summed."""
        return [float(self._pushing.busy), float(self._pulling.busy)]

    def agree(self, busy: Sequence[float]) -> None:
        """Takes over the processes' sum of `busy`."""
        lanes: tuple[Lane[Any], ...] = (self._pushing, self._pulling)
        self._under_way = {lane for lane, count in zip(lanes, busy, strict=True) if count}

    def push(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> GradientBuffer:
        self._under_way.add(self._pushing)
        return super().push(gradients, learning_rates)

    def pull(self) -> None:
        self._under_way.add(self._pulling)
        super().pull()

    def wait_for_push(self) -> None:
        if self._pushing in self._under_way:
            self._pushing.wait()
            self._under_way.remove(self._pushing)
            # Who waits for a push goes by what was answered to it.
            self._session.meet()
        self._collect()

    def wait_for_pull(self) -> None:
        self._pulling.wait()
        self._under_way.discard(self._pulling)
        self._collect()

    def _describe(self, gradients: GradientBuffer, learning_rates: Mapping[int, GroupRate]) -> Description:
        described = super()._describe(gradients, learning_rates)
        described["gradient_norm"] = 0.0
        if self._session.clips:
            gradients.ready()
            described["gradient_norm"] = self._session.norm(Plan(gradients.vectors, **described))
        return described

    def _is_over(self, lane: Lane[Any]) -> bool:
        return lane not in self._under_way
