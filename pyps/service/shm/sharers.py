"""Who shares memory with this server, and whose former memory is still in use."""

from __future__ import annotations

import asyncio
from typing import Protocol

from pyps import logs
from pyps.run.run import Run
from pyps.service.shm.segment import Attachment, Memory
from pyps_wire.errors import ServerUnavailable

# More who shared memory once are compared with those that the run still lists.
SHARERS_KEPT = 256
# How long an earlier request may go on in a worker's memory until the worker is told to come again; it waits longer.
QUIET_SECONDS = 5.0

log = logs.get("pyps.service")


class Sharer(Protocol):
    """A way to one worker whose memory is attached."""

    attachment: Attachment | None

    def close(self) -> None:
        """Ends it; may be called again."""


class Sharers:
    """The workers whose memory is attached, one way each. For the event loop, `used_by` and `shared_bytes` apart."""

    def __init__(self, run: Run):
        self._run = run
        self._attached: dict[Sharer, Attachment] = {}
        # What ended ways have left, while threads are at work in it: the worker's name and its memory.
        self._leaving: list[tuple[str, Memory]] = []
        # Workers whose last way here was shared memory, with the incarnation that used it, though they may be gone.
        self._used: dict[str, int] = {}
        # Replaced as a whole: read from any thread.
        self.shared_bytes = 0

    async def take(self, sharer: Sharer) -> None:
        """Lets a worker in, once nothing touches memory of its former ways; raises as `quiet`, and it is out again."""
        attachment = sharer.attachment
        assert attachment is not None
        for other in self.of(attachment.worker_id):
            # A worker has one; its earlier one is lost, though the system has not said so yet.
            other.close()
        self._attached[sharer] = attachment
        try:
            await self.quiet(attachment.worker_id)
        except BaseException:
            self._attached.pop(sharer, None)
            raise
        self._count()
        self.came(attachment.worker_id, attachment.incarnation)
        log.info("worker shares its memory", worker=attachment.worker_id, segment_bytes=attachment.memory.num_bytes)

    def drop(self, sharer: Sharer) -> None:
        """Notes that a way has ended, and its memory is closed."""
        self._leaving = [(owner, memory) for owner, memory in self._leaving if not memory.unused.done()]
        attachment = self._attached.pop(sharer, None)
        if attachment is not None and not attachment.memory.unused.done():
            self._leaving.append((attachment.worker_id, attachment.memory))
        self._count()

    def of(self, worker_id: str) -> list[Sharer]:
        """The ways to a worker."""
        return [sharer for sharer, attachment in self._attached.items() if attachment.worker_id == worker_id]

    async def quiet(self, worker_id: str) -> None:
        """Returns once no request of a worker's former ways can touch its memory any more.

        ServerUnavailable where one goes on for too long: the worker has to come again.
        """
        memories = [memory for owner, memory in self._leaving if owner == worker_id and not memory.unused.done()]
        if not memories:
            return
        _, going_on = await asyncio.wait(
            [asyncio.wrap_future(memory.unused) for memory in memories], timeout=QUIET_SECONDS
        )
        if going_on:
            raise ServerUnavailable(
                f"a request of {worker_id!r} that was cut off has worked in its memory for {QUIET_SECONDS:g} s since: "
                "try again"
            )

    def greeted(self, worker_id: str) -> None:
        """Notes a Hello: whoever lost its memory goes on by another way, unless it attaches again."""
        if not self.of(worker_id):
            self._used.pop(worker_id, None)
        if len(self._used) > SHARERS_KEPT:
            listed = {member.worker_id for member in self._run.membership.all()}
            self._used = {worker: incarnation for worker, incarnation in self._used.items() if worker in listed}

    def came(self, worker_id: str, incarnation: int) -> None:
        """Notes that a worker takes this way, whether or not it attaches memory."""
        self._used[worker_id] = incarnation

    def close(self) -> None:
        """Ends all ways."""
        for sharer in list(self._attached):
            sharer.close()

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        """Whether that worker's gradients and parameters went through shared memory last."""
        return self._used.get(worker_id) == incarnation

    def _count(self) -> None:
        self.shared_bytes = sum(attachment.memory.num_bytes for attachment in self._attached.values())
