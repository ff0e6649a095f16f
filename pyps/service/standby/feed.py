"""The events of a server's shards on their way to its standby, and the answers that wait until it has received them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pyps.core.membership import Membership
from pyps.core.recorder import Completed, Configured, Event, Pulled, Pushed, Updated
from pyps.core.roster import Roster
from pyps.core.store import ShardState, Store
from pyps.storage.plain import push_to_plain, quick_checksum_of
from pyps.storage.shard_file import pack
from pyps.work import WorkQueue
from pyps_wire import standby_pb2 as wire
from pyps_wire.errors import ServerUnavailable
from pyps_wire.framing import join

# After so many updates of a shard its checksum is compared.
CHECKED_VERSIONS = 64
# While a standby gets its first copy, events of more bytes let answers wait, until half of them are on their way.
BACKLOG_BYTES_MAX = 2**26
# Events of one message: as many as fit, or a longer one alone.
BATCH_BYTES = 2**18
BATCH_EVENTS = 256

Payload: TypeAlias = "bytes | memoryview"


class Line(NamedTuple):
    """An event that is none of a shard's own, ready to be sent."""

    plain: Mapping[str, Any]
    payload: Payload = b""


class Feed:
    """A queue of events; a `Follower` of shards. Every method may be called from any thread, but for `wait` and `take`.

    While it `guards`, an answer waits until the standby has received every event recorded before it. The queue is no
    longer than what callers have sent without an answer: the bounds of those are its own. Before that answers wait only
    where the queue is long, as over a link that is slower than the pushes.
    """

    # Whether the standby has all that was answered.
    guards = False
    # Read without the lock: no answer waits while it is False.
    holds = False

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set where there is something to send.
        self.filled = asyncio.Event()
        self._changed = threading.Condition()
        # Guarded by _changed. How many events were recorded, and received by the standby.
        self.recorded = self.received = 0
        self._queue: deque[Event | Line] = deque()
        self._queued_bytes = 0
        self._is_open = False
        self._rosters: dict[int, Roster] = {}
        # What was sent last of the workers.
        self._workers: tuple[Mapping[str, str], int] | None = None
        # Why nothing is answered any more; "" where it is.
        self._fence = ""
        # Answers that wait on the event loop, with the number of the last event before each.
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def open(self) -> None:
        """Take events from now on. For the event loop."""
        self._loop = asyncio.get_running_loop()
        with self._changed:
            self._clear()
            self._rosters.clear()
            self._workers = None
            self.received, self._is_open = self.recorded, True

    def close(self) -> None:
        """Take no more events. While it guards, no answer goes until `guard` or `fence` says what becomes of them."""
        with self._changed:
            self._clear()
            self._is_open = False
            # For what happens from here on, which nobody receives.
            self.recorded += 1

    def _clear(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0

    # What happens to shards.

    def begin(self, shard: Store, state: ShardState) -> None:
        buffers = pack(state)
        with self._changed:
            self._rosters.pop(shard.shard_id, None)
        about = {"event": "shard", "shard_id": shard.shard_id, "behaviour": shard.behaviour.texts}
        self.add(Line({**about, "pieces": len(buffers), "finished": shard.finished}))
        for buffer in buffers:
            self.add(Line({"event": "piece", "shard_id": shard.shard_id}, buffer))

    def record(self, event: Event) -> None:
        match event:
            case Pulled():
                return
            case Updated(shard_id, update, parameters):
                if update.version % CHECKED_VERSIONS == 0:
                    checked = {"version": update.version, "checksum": quick_checksum_of(parameters)}
                    self.add(Line({"event": "checksum", "shard_id": shard_id, **checked}))
                return
            case Pushed(_, gradient) if gradient.volatile:
                # It arrived before the standby, and lies in its worker's memory.
                event = event._replace(gradient=gradient.private())
        self.add(event)

    def note_position(
        self, worker_id: str, index: int | None, incarnation: int, sequence: int, position: bytes | None
    ) -> None:
        # One of no bytes is not kept.
        self.add(Line({"event": "position", "of": [worker_id, index, incarnation, sequence]}, position or b""))

    def note_workers(self, membership: Membership) -> None:
        """Send how the workers stand, and how many are expected, where that has changed."""
        with self._changed:
            workers = membership.states(), membership.expected_workers
            if workers != self._workers:
                self._workers = workers
                self.add(Line({"event": "workers", "workers": workers}))

    def add_work(self, work: WorkQueue) -> None:
        """Send the queue of portions as it is, if there is one."""
        if work.spec is not None:
            self.add(Line({"event": "work"}, json.dumps(work.state()).encode()))

    def add(self, event: Event | Line) -> int:
        """Send an event after those before it; return its number."""
        with self._changed:
            if not self._is_open:
                return self.recorded
            self._queue.append(event)
            self._queued_bytes += memoryview(_payload_of(event)).nbytes
            self.holds = self.holds or self._queued_bytes > BACKLOG_BYTES_MAX
            self.recorded += 1
            number, is_first = self.recorded, len(self._queue) == 1
        if is_first and self._loop is not None:
            self._loop.call_soon_threadsafe(self.filled.set)
        return number

    def take(self) -> bytes | None:
        """Return the next message for the standby; None where there is nothing to send."""
        reply, payloads, num_bytes = wire.FollowReply(), list[Payload](), 0
        while len(payloads) < BATCH_EVENTS:
            with self._changed:
                if not self._queue:
                    self.filled.clear()
                    break
                event = self._queue[0]
                payload = _payload_of(event)
                if payloads and num_bytes + memoryview(payload).nbytes > BATCH_BYTES:
                    break
                self._queue.popleft()
                self._queued_bytes -= memoryview(payload).nbytes
                self.holds = self.guards or (self.holds and self._queued_bytes > BACKLOG_BYTES_MAX // 2)
            line = event.plain if isinstance(event, Line) else self._line_of(event)
            size = memoryview(payload).nbytes
            reply.events.add(line=json.dumps(line), payload_bytes=size)
            payloads.append(payload)
            num_bytes += size
        if not payloads:
            return None
        return join(reply, payloads[0] if len(payloads) == 1 else b"".join(payloads))

    def _line_of(self, event: Event) -> Mapping[str, Any]:
        match event:
            case Pushed(_, gradient, receipt):
                line = {"event": "push", **push_to_plain(gradient, receipt)}
            case Completed(shard_id):
                line = {"event": "complete", "shard_id": shard_id}
            case Configured(shard_id, behaviour, learning_rate, _, _, finished):
                texts = None if behaviour is None else behaviour.texts
                line = {"event": "configure", "shard_id": shard_id, "behaviour": texts}
                line |= {"learning_rate": learning_rate, "finished": finished}
            case _:
                raise AssertionError(event)
        roster = event.roster
        if self._rosters.get(event.shard_id) != roster:
            self._rosters[event.shard_id] = roster
            line["roster"] = [roster.workers, roster.missing, roster.coming]
        return line

    # What waits.

    def note_received(self, number: int) -> None:
        """Let the answers go that came before that event."""
        with self._changed:
            self.received = max(self.received, min(number, self.recorded))
            self._changed.notify_all()
        while self._waiting and self._waiting[0][0] <= self.received:
            self._settle(self._waiting.popleft()[1])

    def wait(self) -> asyncio.Future[None] | None:
        """Return what an answer on the event loop waits for; None where it need not. Raises ServerUnavailable."""
        if self._fence:
            raise ServerUnavailable(self._fence)
        if self.received >= self.recorded:
            return None
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((self.recorded, future))
        return future

    def wait_here(self) -> None:
        """Wait in this thread, which is not the event loop's. Raises ServerUnavailable."""
        with self._changed:
            number = self.recorded
            self._changed.wait_for(lambda: self.received >= number or self._fence or not self.holds)
            if self._fence:
                raise ServerUnavailable(self._fence)

    def guard(self, on: bool) -> None:
        """Let answers wait from now on, or none, those that do included. For the event loop."""
        with self._changed:
            self.guards = self.holds = on
            self._changed.notify_all()
        while not on and self._waiting:
            self._settle(self._waiting.popleft()[1])

    def fence(self, reason: str) -> None:
        """Answer nothing any more, for that reason. For the event loop."""
        with self._changed:
            self.guards = self.holds = True
            self._fence = reason
            self._changed.notify_all()
        while self._waiting:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_exception(ServerUnavailable(reason))

    @staticmethod
    def _settle(future: asyncio.Future[None]) -> None:
        # Its call may have ended meanwhile.
        if not future.done():
            future.set_result(None)


def _payload_of(event: Event | Line) -> Payload:
    if isinstance(event, Line):
        return event.payload
    return event.gradient.payload if isinstance(event, Pushed) else b""


def roster_from(plain: Sequence[Any]) -> Roster:
    """Return the roster of an event's line."""
    workers, missing, coming = plain
    return Roster(tuple(workers), missing, tuple(coming))
