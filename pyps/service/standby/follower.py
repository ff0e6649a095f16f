"""A standby: it follows its server, takes over when that is gone, and tells it so if it comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc.aio

from pyps import logs
from pyps.run.run import Run
from pyps.run_header import RestoredRun, RunHeader
from pyps.service.executor import look_at_error
from pyps.service.standby.link import Found, Link, is_loopback, look
from pyps.service.standby.shards import FollowedShards
from pyps_wire import inspector_pb2 as pb
from pyps_wire import standby_pb2 as wire
from pyps_wire.errors import ConfigurationError, NotAllowed, PypsError, ServerUnavailable
from pyps_wire.framing import split

RETRY_SECONDS = 0.2
# How often the server whose place was taken is told so, in case that it comes back.
TELL_SECONDS = 1.0
# A loop that is late by more has stood still itself: what it has not heard meanwhile says nothing.
LATE_SECONDS = 0.5
# A timer of the lease may end so much before the lease: another try, of seconds where a machine is gone, would follow.
EARLY_SECONDS = 0.01
# Bytes that were received and not applied; with more, nothing is read for a while.
BACKLOG_BYTES_MAX = 2**28

log = logs.get("pyps.standby")


class Follower:
    """A server that follows another and holds no run of its own yet. For the event loop."""

    def __init__(
        self,
        run: Run,
        link: Link,
        *,
        own_address: Callable[[], str],
        lease_seconds: float,
        threads: int,
        on_end: Callable[[str, int], None],
        claim: Callable[[RestoredRun], RestoredRun],
    ):
        """`on_end` ends this server, with the reason and the exit status.

        `own_address` returns where others find it, or raises PypsError. `claim` takes the next epoch in its folder of
        checkpoints.
        """
        self._run = run
        self._link = link
        self._own_address, self._found_at = own_address, ""
        self._lease_seconds = lease_seconds
        self._on_end = on_end
        self._claim = claim
        run.about_standby = lambda: self.words
        # Each shard's events are applied by one thread, in their order.
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="standby") for _ in range(threads)]
        self._shards: FollowedShards | None = None
        # The life of the server whose events the shards hold.
        self._life = ""
        # Whether the shards hold all that their server has answered.
        self._is_whole = False
        self.has_taken_over = False
        # Why it takes over; "" as long as it does not.
        self._reason = ""
        # Whether an operator asks for that, and the server, which lives, is to hand over first.
        self._wants = False
        self._heard_at = time.monotonic()
        # Events of this connection that were received; shards that differ.
        self._received = 0
        self._again: list[int] = []
        # Whether this standby ends, and has said so.
        self._leaves = False
        self._said_last = asyncio.Event()
        self._took_over = asyncio.Event()
        self._news = asyncio.Event()
        self._backlog_bytes = 0
        self._drained = asyncio.Event()
        run.elsewhere = link.address
        run.refuse(f"this server is a standby of {link.address} and serves only once that has ended")

    @property
    def words(self) -> str:
        """What this server is, for people. From any thread."""
        if self.has_taken_over:
            return f"took over from {self._link.address}: {self._reason}"
        state = "follows" if self._is_whole else "has not all shards of"
        return f"{state} {self._link.address}, which it heard {time.monotonic() - self._heard_at:.1f} s ago"

    def describe(self, status: pb.Status) -> None:
        """Say what this standby has of its server's run. From any thread."""
        if (shards := self._shards) is None:
            return
        versions, header = shards.versions, shards.header
        status.run_id, status.epoch, status.num_shards = header.run_id, header.epoch, len(versions)
        status.version_min, status.version_max = min(versions, default=0), max(versions, default=0)

    @property
    def run_id(self) -> str:
        """The run that it follows, or took over; "" where that is not known yet."""
        return "" if self._shards is None else self._shards.header.run_id

    async def keep(self) -> None:
        """Follow until the server is gone, take its place, and go on telling it so."""
        said: set[str] = set()
        while not self._reason:
            problem = ""
            try:
                await self._follow()
            except (NotAllowed, ConfigurationError) as error:
                if not self._is_whole:
                    self._on_end(f"{self._link.address} takes this server for no standby: {error}", 1)
                    return
                problem = str(error)
            except (PypsError, OSError, TimeoutError, grpc.aio.BaseError) as error:
                problem = str(error) or "no answer"
            if not self._reason:
                if problem and problem not in said:
                    log.warning("the server is not followed", server=self._link.address, reason=problem)
                said = said | {problem} if problem else set()
                await self._look(problem)
        await self._take_over()
        await self._keep_telling()

    def takes_over(self, run_id: str, epoch: int) -> bool:
        """Answer the server, which has lost sight of this standby, whether that takes its place.

        A server in the epoch that is followed lives, and goes on alone: then this standby takes over only after having
        followed again. One in another epoch, or without a run, has begun again, and lacks what is here.
        """
        if not self._reason and self._is_whole and self._shards is not None:
            if not run_id or epoch != self._shards.header.epoch:
                self._reason = "it has begun again without what it had answered"
            else:
                log.warning("the server lives and goes on alone: this standby begins again", server=self._link.address)
                self._is_whole = False
        return bool(self._reason)

    def promote(self, *, validate_only: bool = False) -> None:
        """Take over by an operator's word; a server that lives hands over first. Raises PypsError where it cannot."""
        if not self._is_whole:
            raise ServerUnavailable(f"this standby has not all shards of {self._link.address}: it cannot take over")
        self._wants = not validate_only
        self._news.set()

    async def leave(self) -> None:
        """Say that this standby ends; one that takes over does that first, since its server saves nothing then."""
        if self._reason:
            await self._took_over.wait()
        elif self._is_whole:
            self._is_whole, self._leaves = False, True
            self._news.set()
            await self._said_last.wait()

    # Following.

    async def _follow(self) -> None:
        """Follow the server over one connection, as long as it lasts. Raises what ends it, or returns."""
        async with self._link.follow() as call:
            self._found_at = await asyncio.to_thread(self._own_address)
            first = wire.FollowRequest(address=self._found_at, lease_seconds=self._lease_seconds)
            await call.write(first.SerializeToString())
            reply = wire.FollowReply.FromString(await self._read(call))
            if self._is_whole and reply.life != self._life:
                self._reason = "another server has begun in its place"
                return
            # From here on the server may answer without this standby.
            self._is_whole, self._life, self._shards = False, reply.life, None
            self._received = 0
            self._again.clear()
            await call.write(wire.FollowRequest(begin=True).SerializeToString())
            saying = asyncio.create_task(self._say(call))
            # A failure to write is one to read too.
            saying.add_done_callback(look_at_error)
            try:
                while not self._reason:
                    await self._take(await self._read(call))
                    self._news.set()
                # The server hears that the last events are here.
                await saying
            finally:
                saying.cancel()

    async def _read(self, call: Any) -> bytes:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._lease_seconds):
                message = await call.read()
        except TimeoutError:
            now = time.monotonic()
            if now - began > self._lease_seconds + LATE_SECONDS:
                # This process was suspended: the server may have spoken all the while.
                self._heard_at = now
            raise
        if message is grpc.aio.EOF:
            # With the reason, where the server gave one.
            await call.code()
            raise TimeoutError("the server ended the connection")
        self._heard_at = time.monotonic()
        return message  # type: ignore[no-any-return]

    async def _say(self, call: Any) -> None:
        while not (self._reason or self._leaves):
            await self._news.wait()
            self._news.clear()
            again, self._again = self._again, []
            wants, self._wants = self._wants, False
            request = wire.FollowRequest(received=self._received, again=again, take_over=wants, leaves=self._leaves)
            await call.write(request.SerializeToString())
        self._said_last.set()

    async def _take(self, message: bytes) -> None:
        if self._leaves:
            # Also not that it is to take over: its server hears that nobody does.
            return
        header, payload = split(message)
        reply, at = wire.FollowReply.FromString(header), 0
        alone = len(reply.events) == 1
        for event in reply.events:
            part = payload[at : at + event.payload_bytes]
            at += event.payload_bytes
            # A gradient that waits for others must not keep the whole message.
            self._begin(json.loads(event.line), part if alone else bytes(part))
            self._received += 1
        while self._backlog_bytes > BACKLOG_BYTES_MAX:
            self._drained.clear()
            await self._drained.wait()

    def _begin(self, line: dict[str, Any], payload: bytes | memoryview) -> None:
        match line["event"]:
            case "run":
                self._shards = FollowedShards(RunHeader.from_json(line["header"]))
            case "synced":
                self._is_whole = True
                log.info("all shards are here: this standby can take over", server=self._link.address)
            case "work" if self._shards is not None:
                self._shards.work = json.loads(bytes(payload))
            case "workers" if self._shards is not None:
                self._shards.workers = line["workers"]
            case "position" if self._shards is not None:
                worker_id, index, incarnation, sequence = line["of"]
                if payload:
                    self._shards.positions.note(worker_id, index, incarnation, sequence, bytes(payload))
                else:
                    self._shards.positions.withdraw(worker_id, incarnation, sequence)
            case "reset":
                self._is_whole = False
            case "finished" if self._shards is not None:
                self._shards.finished = True
            case "take over":
                self._reason = line["reason"]
            case "end":
                self._is_whole = False
                self._on_end(f"the server it stood by for has ended: {line['reason']}", 0)
            case _:
                assert self._shards is not None
                size = len(payload)
                self._backlog_bytes += size
                work = partial(self._shards.apply, line, payload)
                thread = self._threads[line["shard_id"] % len(self._threads)]
                done = asyncio.get_running_loop().run_in_executor(thread, work)
                done.add_done_callback(partial(self._applied, line["shard_id"], size))

    def _applied(self, shard_id: int, size: int, done: asyncio.Future[bool]) -> None:
        self._backlog_bytes -= size
        self._drained.set()
        if not done.cancelled() and not done.result():
            log.warning("a shard differs from the server's: it comes again", shard=shard_id)
            self._again.append(shard_id)
            self._news.set()

    # Taking over.

    async def _look(self, problem: str) -> None:
        """Decide after a connection has failed whether the server is gone, or pause before the next try."""
        address, silent_seconds = self._link.address, time.monotonic() - self._heard_at
        # A proxy would refuse in the place of a server that it has lost sight of: there the lease decides.
        has_ended = self._life and is_loopback(address) and await look(address) is Found.REFUSED
        if has_ended and not self._is_whole:
            self._on_end(f"{address} ended before all shards were here: this standby cannot take over", 1)
        if self._is_whole:
            if has_ended:
                self._reason = "its process has ended"
            elif silent_seconds + EARLY_SECONDS >= self._lease_seconds:
                self._reason = f"it was silent for {silent_seconds:.1f} s ({problem})"
            elif self._wants:
                self._reason = "an operator says so"
        if not self._reason:
            await asyncio.sleep(RETRY_SECONDS)

    async def _take_over(self) -> None:
        began, shards = time.monotonic(), self._shards
        assert shards is not None
        for thread in self._threads:
            # Behind the events that it has yet to apply.
            await asyncio.to_thread(thread.shutdown)
        await asyncio.to_thread(lambda: self._run.restore(self._claim(shards.given_up())))
        if shards.finished:
            self._run.finish("it had finished before")
        self._run.elsewhere = ""
        self._run.refuse("")
        self.has_taken_over = True
        self._took_over.set()
        self._run.events.add(
            "standby",
            "this standby has taken over",
            warning=True,
            server=self._link.address,
            why=self._reason,
            epoch=self._run.content.epoch,
            seconds=round(time.monotonic() - began, 2),
        )

    async def _keep_telling(self) -> None:
        while True:
            content = self._run.content
            request = wire.MeetRequest(
                run_id=content.run_id, epoch=content.epoch, has_taken_over=True, address=self._found_at
            )
            try:
                if await look(self._link.address) is Found.OPEN:
                    await self._link.meet(request)
            except (PypsError, OSError):
                pass
            await asyncio.sleep(TELL_SECONDS)
