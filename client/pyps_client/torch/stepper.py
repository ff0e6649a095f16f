"""RemoteOptimizer's steps as portions of data see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyps_client.data.queue import LeaseCall
from pyps_client.torch.steps import Steps
from pyps_client.worker import Worker
from pyps_wire.work_pb2 import LeaseReply

if TYPE_CHECKING:
    from pyps_client.torch.remote_optimizer import RemoteOptimizer


class TorchStepper:
    """The `Stepper` of an optimizer."""

    def __init__(self, optimizer: RemoteOptimizer, session: Worker, downpour: Steps) -> None:
        self.session = session
        self._optimizer = optimizer
        self._downpour = downpour

    @property
    def steps(self) -> int:
        return self._downpour.steps

    @property
    def steps_answered(self) -> int:
        return self._downpour.steps_answered

    @property
    def finished(self) -> bool:
        return self._downpour.finished

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        # It looks for written parameters, as DistributedDataParallel writes them: what wrote them is the better word.
        self._optimizer.check_model()
        return self._downpour.lease(ask)

    def tell_examples(self, count: int) -> None:
        self._optimizer.examples_in_batch = count

    def end_portion_after(self, step: int) -> None:
        self._downpour.end_portion_after(step)

    def flush(self) -> None:
        self._downpour.flush()

    def idle(self) -> None:
        self._downpour.idle()

    def finish(self) -> None:
        self._downpour.finish()

    def tell_over(self) -> None:
        self._optimizer.tell_over()
