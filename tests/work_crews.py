"""Work queues that are open, and what they have counted."""

from __future__ import annotations

import json
from typing import Any

from pyps.work import DataSpec, WorkQueue


def spec(num_examples: int = 10, portion_examples: int = 3, **fields: Any) -> DataSpec:
    """A data set."""
    return DataSpec("train", num_examples, portion_examples, **fields)


def plain(num_examples: int = 10, portion_examples: int = 3, *, stall_seconds: float = 60.0, **more: Any) -> WorkQueue:
    """A queue of plain work that is open."""
    queue = WorkQueue(stall_seconds=stall_seconds, **more)
    queue.open(spec(num_examples, portion_examples), worker_id="opener")
    return queue


def coordinated(num_examples: int = 10, *, stall_seconds: float = 60.0, **more: Any) -> WorkQueue:
    """A queue of coordinated work that is open; no pass has begun."""
    queue = WorkQueue(stall_seconds=stall_seconds, **more)
    queue.open(spec(num_examples, 0, coordinated=True), worker_id="opener")
    return queue


def begin(queue: WorkQueue, pass_: int = 1, *, num_portions: int = 5, epoch: int = 1, **more: Any) -> None:
    """Begins a pass."""
    settings = {"copies_max": 2, "portions_per_stage": 1, "now": 0.0} | more
    queue.begin_pass(pass_, coordinator_epoch=epoch, num_portions=num_portions, **settings)


def restored(queue: WorkQueue, **more) -> WorkQueue:
    """A queue that goes on from the other's state, which went through JSON."""
    other = WorkQueue(stall_seconds=60, **more)
    other.restore(json.loads(json.dumps(queue.state())))
    return other


def counted(queue: WorkQueue, pass_: int) -> list[int]:
    """The examples of a pass in the delivery log, in order: each once where all is well."""
    log = queue.progress(0.0, deliveries=True).deliveries
    return sorted(example for d in log if d.pass_ == pass_ for example in range(d.portion.start, d.portion.stop))
