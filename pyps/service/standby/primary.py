"""A server's side of its standby: it sends the events, waits for what was received, and gives way where it must."""

from __future__ import annotations

import asyncio
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine

import grpc.aio

from pyps.config import STANDBY_LEASE_SECONDS, is_address
from pyps.run.content import ReadyContent
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Call, log_bug
from pyps.service.standby.feed import Feed, Line
from pyps.service.standby.follower import Follower
from pyps.service.standby.link import Found, Link, is_loopback, is_unspecified, look
from pyps.storage.folder import StandbyNote
from pyps_wire import standby_pb2 as wire
from pyps_wire.errors import InvalidArgument, NotAllowed, PypsError, ServerUnavailable, WaitTimedOut

# A standby hears from its server so often in its lease.
BEATS_A_LEASE = 4
POLL_SECONDS = 0.1
WAIT_SECONDS = 0.001
# How often a server whose standby is silent asks it, and says so in the log.
ASK_SECONDS = 1.0
SAY_SECONDS = 10.0
UNTIL_KNOWN = (
    "until it says whether it has taken over, or follows again; if it has ended without that, `pyps promote` on this "
    "server lets it go on alone, else on the standby makes that take over"
)


class Primary:
    """The standby of this server, if it has one. For the event loop."""

    def __init__(self, run: Run, feed: Feed, link: Callable[[str], Link]):
        self._run = run
        self._feed = feed
        self._link = link
        run.on_finished = self.note_finished
        run.about_standby = lambda: self.words
        # Ends this server, with the reason.
        self.on_fenced: Callable[[str], None] = lambda reason: None
        # The standby asks for its turn.
        self.on_request: Callable[[], None] = lambda: None
        # Notes the standby and its run for later lives of this server, on a thread; returns whether that is done.
        self.on_guard: Callable[[StandbyNote | None], bool] = lambda note: True
        # What a former life noted, and the epoch of the checkpoint that this one has resumed.
        self._noted: StandbyNote | None = None
        self._served_epoch = 0
        # A random name of this life.
        self._life = secrets.token_hex(8)
        # Where the standby is found; "" for none.
        self.address = ""
        self._lease_seconds = 0.0
        # The call by which it follows.
        self._following: asyncio.Task[None] | None = None
        # Ends what belonged to the call before.
        self._ending: asyncio.Task[None] | None = None
        # Finds out what became of a standby that was lost while answers waited for it.
        self._finding: asyncio.Task[None] | None = None
        # Whether this server has just begun again, and serves nobody until that is found out.
        self.is_withheld = False
        # Whether the standby has taken over, or is about to by this server's own word.
        self.handed_over = False
        self.fenced = ""

    @property
    def words(self) -> str:
        """What the standby is to this server, for people; "" without one. From any thread."""
        feed = self._feed
        if self.fenced or not self.address:
            return self.fenced
        if not (feed.guards or self.is_withheld):
            return f"{self.address} is receiving the shards"
        if self._following is None:
            return f"no word from {self.address}: nothing is answered {UNTIL_KNOWN}"
        return f"{self.address} follows, {feed.recorded - feed.received} events behind"

    @property
    def is_guarded(self) -> bool:
        """Whether the standby could take over now."""
        return self._following is not None and self._feed.guards

    async def follow(self, call: Call) -> None:
        """Serve a standby's call until it ends."""
        first = convert.parse(wire.FollowRequest, await call.receive(under_way=True) or b"")
        address, (shortest, longest) = _found_at(first.address, call), STANDBY_LEASE_SECONDS
        if not shortest <= first.lease_seconds <= longest:
            raise InvalidArgument(
                f"the lease of a standby is {first.lease_seconds:g} s, but must be from {shortest:g} to {longest:g}"
            )
        self._refuse_second(address)
        await call.write(wire.FollowReply(life=self._life).SerializeToString())
        self._refuse_while_giving_way(address)
        begin = convert.parse(wire.FollowRequest, await call.receive(under_way=True) or b"")
        if not begin.begin:
            return
        while True:
            # Another may have begun meanwhile, or while this one waits.
            self._refuse_second(address)
            if (former := self._following) is not None:
                # It has lost this connection, and begins again.
                former.cancel()
            elif (former := self._ending) is None:
                break
            await asyncio.wait([former])
        self._refuse_while_giving_way(address)
        self._stop_finding()
        # The standby has said that it does not take over with what it had.
        self._feed.guard(False)
        self.address, self._lease_seconds = address, first.lease_seconds
        # It refuses workers until it has all shards and its server has ended.
        self._run.standby, self._run.told = address, set()
        self._following = asyncio.current_task()
        left = ""
        try:
            await self._serve(call)
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            if isinstance(error, _Left):
                left = str(error)
            elif not isinstance(error, TimeoutError | grpc.aio.BaseError | WaitTimedOut):
                left = "it does not follow this run" if isinstance(error, NotAllowed) else ""
                raise error from None
        finally:
            self._following = None
            self._feed.close()
            # A task of its own, since gRPC cancels the call's whenever it likes.
            self._ending = _heard(self._after(left))

    def _refuse_second(self, address: str) -> None:
        if self._following is not None and self.address != address:
            raise NotAllowed(f"this server has a standby, {self.address}: it takes one")

    def _refuse_while_giving_way(self, address: str) -> None:
        if self.fenced or self.handed_over:
            raise ServerUnavailable(self.fenced or "this server hands over to its standby")
        if self._finding is not None and self.address != address:
            raise ServerUnavailable(f"this server waits for word from its standby, {self.address}: it takes one")

    async def _after(self, left: str) -> None:
        """Go on after a standby has gone; `left`: the reason, where it is known not to take over."""
        try:
            await asyncio.to_thread(self._unfollow)
        finally:
            self._ending = None
        if left or not self._feed.guards:
            self._go_on(left or "its standby was lost before it had all shards")
        elif not (self.handed_over or self.fenced):
            self._finding = _heard(self._find())

    def _unfollow(self) -> None:
        self._run.rounds.positions.follow(None)
        for shard in self._run.content.shards.values():
            shard.follow(None)

    async def _serve(self, call: Call) -> None:
        feed, run = self._feed, self._run
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(call))
            while not isinstance(content := run.content, ReadyContent):
                await asyncio.sleep(POLL_SECONDS)
            if run.rounds.behaviour.aggregation.coordinated:
                raise NotAllowed(
                    "this server's run is coordinated by Sandblaster, whose vectors a standby does not follow: "
                    "use checkpoints for it (--checkpoint-dir)"
                )
            feed.open()
            run.rounds.followed = True
            base = feed.received
            tasks.create_task(self._receive(call, base))
            feed.add(Line({"event": "run", "header": run.header_of(content).to_json()}))
            run.rounds.positions.follow(feed.note_position)
            is_slow = False
            for shard in content.shards.values():
                # One at a time: memory grows by one shard.
                await asyncio.to_thread(shard.follow, feed)
                number = feed.recorded
                while feed.received < number:
                    if feed.holds and not is_slow:
                        is_slow = True
                        what = "pushes come faster than the link to the standby takes them: answers wait for it"
                        run.events.add("standby", what, warning=True, address=self.address)
                    await asyncio.sleep(WAIT_SECONDS)
            await self._tell()
            feed.add_work(run.work)
            feed.note_workers(run.membership)
            note = StandbyNote(self.address, content.run_id, content.epoch)
            is_noted = await asyncio.to_thread(self.on_guard, note)
            feed.guard(True)
            feed.add(Line({"event": "synced"}))
            run.events.add("standby", "a standby follows: answers wait until it has received", address=self.address)
            if not is_noted:
                what = (
                    "the folder of checkpoints cannot be written: a later life of this server would not ask its standby"
                )
                run.events.add("standby", what, warning=True, address=self.address)
            while run.content is content:
                await asyncio.sleep(POLL_SECONDS if is_noted else ASK_SECONDS)
                feed.note_workers(run.membership)
                is_noted = is_noted or await asyncio.to_thread(self.on_guard, note)
            number = feed.add(Line({"event": "reset"}))
            while feed.received < number:
                await asyncio.sleep(WAIT_SECONDS)
            raise _Left("the run was reset")

    async def _tell(self) -> None:
        """Wait until each live worker has heard of the standby: it would not find that after a takeover."""
        run, loop = self._run, asyncio.get_running_loop()
        # A worker that sends no heartbeats is not waited for.
        until = loop.time() + run.membership.lease_seconds
        while loop.time() < until and any(one.worker_id not in run.told for one in run.membership.alive()):
            await asyncio.sleep(POLL_SECONDS)

    async def _send(self, call: Call) -> None:
        beat, feed = wire.FollowReply().SerializeToString(), self._feed
        while True:
            try:
                async with asyncio.timeout(self._lease_seconds / BEATS_A_LEASE):
                    await feed.filled.wait()
            except TimeoutError:
                await call.write(beat)
            while (message := feed.take()) is not None:
                await call.write(message)

    async def _receive(self, call: Call, base: int) -> None:
        feed, run, loop = self._feed, self._run, asyncio.get_running_loop()
        progress_at = loop.time()
        while True:
            async with asyncio.timeout(self._lease_seconds):
                message = await call.read()
            if message is grpc.aio.EOF:
                raise TimeoutError
            request, before = convert.parse(wire.FollowRequest, message), feed.received
            feed.note_received(base + request.received)
            if feed.received > before or feed.received == feed.recorded:
                progress_at = loop.time()
            elif loop.time() - progress_at > self._lease_seconds:
                run.events.add("standby", "the standby takes in nothing any more", warning=True, address=self.address)
                raise TimeoutError
            if unknown := set(request.again) - run.content.shards.keys():
                raise InvalidArgument(f"shard {min(unknown)} is none of this server's: it cannot be sent again")
            for shard_id in request.again:
                what = "a shard of the standby differed and is sent again"
                run.events.add("standby", what, warning=True, shard=shard_id)
                await asyncio.to_thread(run.content.shards[shard_id].follow, feed)
            if request.take_over:
                self.on_request()
            if request.leaves:
                raise _Left("its standby has left")

    # When the standby is lost.

    @property
    def served_epoch(self) -> int:
        """The epoch of what this server has: none that it claimed and has not served under."""
        return self._served_epoch if self.is_withheld else self._run.content.epoch

    def resume(self, noted: StandbyNote, *, served_epoch: int) -> None:
        """Serve nobody until it is known whether the standby of a former life of this server has taken over."""
        self.address, self._noted, self._served_epoch, self.is_withheld = noted.address, noted, served_epoch, True
        self._run.refuse(
            f"this server has begun again, and asks its standby, {noted.address}, whether that has taken over"
        )
        self._finding = _heard(self._find())

    async def _find(self) -> None:
        """Find out whether the standby has ended, has taken over, or neither; answers wait until that is known."""
        run, address, said_at = self._run, self.address, 0.0
        loop = asyncio.get_running_loop()
        while True:
            # Elsewhere a firewall or a proxy would refuse in the place of a standby that has taken over.
            if is_loopback(address) and await look(address) is Found.REFUSED:
                self._go_on("its standby has ended")
                return
            content = run.content
            run_id = content.run_id if run.is_ready else ""
            request = wire.MeetRequest(run_id=run_id, epoch=content.epoch, followed_epoch=content.epoch)
            if (noted := self._noted) is not None and self.is_withheld:
                request.noted_run_id, request.followed_epoch = noted.run_id, noted.epoch
            try:
                reply = await self._link(address).meet(request)
            except (PypsError, OSError):
                pass
            else:
                if reply.has_taken_over:
                    self.fence(address, reply.epoch)
                else:
                    self._go_on("what is at its standby's address has not taken over this run, and will not")
                return
            if loop.time() - said_at >= SAY_SECONDS:
                said_at = loop.time()
                what = f"no word from the standby: nothing is answered {UNTIL_KNOWN}"
                run.events.add("standby", what, warning=True, address=address)
            await asyncio.sleep(ASK_SECONDS)

    def _stop_finding(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None
        if self.is_withheld:
            self.is_withheld = False
            self._run.refuse("")

    def _go_on(self, why: str) -> None:
        """Serve without a standby."""
        self._stop_finding()
        self._run.rounds.followed = False
        self._feed.guard(False)
        self._run.events.add("standby", f"the server goes on alone: {why}", warning=True, address=self.address)
        asyncio.get_running_loop().run_in_executor(None, self.on_guard, None)
        self.address = self._run.standby = ""

    def fence(self, address: str, epoch: int) -> None:
        """Give way to the server that has taken over, for good."""
        self.is_withheld = False
        self._stop_finding()
        run_id = self._run.content.run_id
        run = f"run {run_id!r}" if run_id else "this server's run"
        self.fenced = f"{address} has taken over {run} under epoch {epoch}: this server serves it no more"
        self._feed.fence(self.fenced)
        self._run.elsewhere = address
        self._run.refuse(self.fenced)
        self._run.events.add("standby", self.fenced, warning=True)
        self.on_fenced(self.fenced)

    def promote(self, *, validate_only: bool = False) -> None:
        """Be the one that serves, by an operator's word. Raises NotAllowed where it is already."""
        if self._finding is None:
            raise NotAllowed("this server serves already, and waits for no standby")
        if not validate_only:
            self._go_on("an operator says so")

    async def hand_over(self, *, ends: bool, reason: str) -> bool:
        """Make the standby take over or, if the job `ends`, end too; return whether it has heard."""
        if not self.is_guarded:
            return False
        self.handed_over = True
        number = self._feed.add(Line({"event": "end" if ends else "take over", "reason": reason}))
        while self._feed.received < number and self._following is not None:
            await asyncio.sleep(WAIT_SECONDS)
        return self._feed.received >= number

    def note_finished(self) -> None:
        self._feed.add(Line({"event": "finished"}))


def _heard(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Begin work whose failure is logged."""

    def look_at(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log_bug(error, "Standby")

    task = asyncio.create_task(work)
    task.add_done_callback(look_at)
    return task


def _found_at(address: str, call: Call) -> str:
    """Return where the caller is found that says this address of itself. Raises InvalidArgument."""
    host, _, port = address.rpartition(":")
    if is_unspecified(host):
        # "ipv4:127.0.0.1:51234"
        host = urllib.parse.unquote(call.peer()).partition(":")[2].rpartition(":")[0]
    if not is_address(found := f"{host}:{port}"):
        raise InvalidArgument(f"the caller is found at {address[:100]!r}, it says: expected host:port")
    return found


class _Left(Exception):
    """Nothing is sent to the standby any more, for this reason, and it will not take over."""


class StandbyService:
    """The calls of pyps.v1.Standby."""

    def __init__(self, run: Run, primary: Primary, standby: Follower | None):
        """`standby`: of a server that was started as one."""
        self._run = run
        self._primary = primary
        self._standby = standby

    def Follow(self, _: object, call: Call) -> Awaitable[None]:
        return self._primary.follow(call)

    async def Meet(self, message: bytes, call: Call) -> bytes:
        request = convert.parse(wire.MeetRequest, message)
        if request.has_taken_over:
            request.address = _found_at(request.address, call)
        content, standby = self._run.content, self._standby
        reply = wire.MeetReply(epoch=content.epoch, has_taken_over=standby is not None and standby.has_taken_over)
        # The address may have become that of another run's server.
        named = request.run_id or request.noted_run_id
        is_own = named in ("", content.run_id, "" if standby is None else standby.run_id)
        if not request.has_taken_over:
            if standby is not None and not standby.has_taken_over:
                reply.has_taken_over = is_own and standby.takes_over(request.run_id, request.epoch)
                reply.epoch = request.epoch
            elif not is_own:
                reply.has_taken_over = False
            elif self._run.is_ready and request.run_id in ("", content.run_id):
                # It may have begun again itself since it took over.
                reply.has_taken_over |= self._primary.served_epoch > request.followed_epoch
        # Of two under one epoch, the one that was started again from a checkpoint gives way.
        elif (
            (standby is None or standby.has_taken_over)
            and content.run_id in ("", request.run_id)
            and content.epoch < request.epoch + (not reply.has_taken_over)
        ):
            self._primary.fence(request.address, request.epoch)
        return reply.SerializeToString()
