"""Plain work (Downpour, ASGD): a pass is an epoch, and a portion is with one worker at a time.

The next epoch opens when every portion is delivered and somebody asks for it, or earlier for a worker that finds
nothing left. Epochs are complete one after the other, each when its last portion is delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyps.work.answers import LeaseAnswer, NothingNow, PassDone
from pyps.work.pass_queue import PassQueue, WorkPass
from pyps.work.portions import Cut, DataSpec
from pyps.work.workers import Lease, WaitingCalls, WorkerProgress
from pyps_wire.errors import BadRequest


class PlainQueue(PassQueue[WorkPass]):
    """Epochs without a coordinator. Guarded by its queue's lock."""

    def __init__(
        self,
        spec: DataSpec,
        calls: WaitingCalls,
        *,
        first_lease: int,
        batch_size_of: Callable[[int], int],
        accumulate: Callable[[], int],
        epochs_ahead: Callable[[], int],
    ) -> None:
        super().__init__(calls, first_lease=first_lease)
        self.spec: DataSpec = spec
        self._batch_size_of = batch_size_of
        self._accumulate = accumulate
        self._epochs_ahead = epochs_ahead

    def begin_epoch(self, number: int) -> None:
        """Begins an epoch, cut as the server's settings are now; BadRequest where portions have no size."""
        spec = self.spec
        batch_size = self._batch_size_of(number) or spec.batch_size
        portion_examples = spec.portion_examples or batch_size * max(1, self._accumulate())
        if not portion_examples:
            raise BadRequest(
                f"how large portions of the data set {spec.name!r} are is not known: name portion_examples or"
                " batch_size, or start the servers with --batch-growth"
            )
        work_pass = WorkPass(number, Cut.by_size(spec.num_examples, portion_examples), batch_size=batch_size)
        if self.passes and not self.passes[0].done:
            self.passes.append(work_pass)
        else:
            self.begin(work_pass)

    def answer(self, worker: WorkerProgress, number: int | None, *, passes: int, now: float) -> LeaseAnswer:
        present = self.passes[0]
        if number is not None and number < present.number + present.done:
            return PassDone(number)
        if present.done:
            self.begin_epoch(present.number + 1)
        # Who asks for a later pass gets what is left of an earlier one, too: nobody else may come for it.
        last = max(self.number, min(self.number + self._epochs_ahead(), passes - 1))
        for number in range(self.number, last + 1):
            if number - self.number == len(self.passes):
                self.begin_epoch(number)
            work_pass = self.passes[number - self.number]
            portion_id = self.choose(work_pass, worker)
            if portion_id is not None:
                return self.give(work_pass, worker, portion_id, now=now)
            if any(lease.pass_ == number for lease in worker.leases.values()):
                # It can end the pass, or its part of it, by itself: alone, a worker never mixes two.
                break
        return NothingNow(self.number)

    def take_in(
        self, worker: WorkerProgress, leases: Sequence[Lease], *, stage_id: int, loss_sum: float, now: float
    ) -> None:
        worker.computed(leases, now=now)
        # Who waited beside portions of its own may be free for the next pass now.
        self._calls.wake(worker.worker_id)
        super().take_in(worker, leases, stage_id=stage_id, loss_sum=loss_sum, now=now)

    def to_json(self) -> dict[str, Any]:
        kept = [
            {
                "portion_examples": work_pass.cut.portion_examples,
                "batch_size": work_pass.batch_size,
                "unfinished": [list(run) for run in work_pass.unfinished()],
            }
            for work_pass in self.passes
        ]
        return super().to_json() | {"plain": kept}

    def restore(self, plain: Mapping[str, Any]) -> None:
        super().restore(plain)
        for number, kept in enumerate(plain["plain"], start=self.number):
            cut = Cut.by_size(self.spec.num_examples, int(kept["portion_examples"]))
            pending = [(int(start), int(stop)) for start, stop in kept["unfinished"]]
            self.passes.append(WorkPass(number, cut, batch_size=int(kept["batch_size"]), pending=pending))
        if not self.passes:
            raise ValueError("there is no pass in it")
