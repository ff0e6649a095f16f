"""Connections to the servers of a run, through losses and restarts."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from pyps_client import fork, local_server
from pyps_client.fork import ForkGuard
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.places import address_of
from pyps_client.retry import Busy, LinkLost, LocalLost, Outage, RetryPolicy, Wait
from pyps_client.transport import LINKS_LOST_MAX, Greeted, Parts, Route, Take, Transport
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.transport.threads import Threads
from pyps_client.version import SOFTWARE
from pyps_wire.common_pb2 import ROLE_OBSERVER, RUN_STATE_DRAINING, Sender
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.errors import InvalidArgument, NotInitialized, PypsError, RunFinished, ServerUnavailable, UnknownWorker
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest

T = TypeVar("T")
Operation = Callable[[GrpcChannel, threading.Event], T]


class Resend(Protocol):
    """Sends again what a server may lack that came back, before any other operation."""

    # The server's epoch up to which this is done.
    epoch: int

    def __call__(self, channel: GrpcChannel, stop: threading.Event) -> object: ...


# Says Hello again to a server that was lost, on a new channel, within so many seconds.
Rejoin = Callable[["Connection", GrpcChannel, float], object]

# A call with tensors may take this long, and longer by its size. What a slow link carried before the deadline is kept:
# the next call goes on from there.
CALL_SECONDS = 60.0
BYTES_PER_SECOND_MIN = 1_000_000

# How long a server behind a name of several may take to report its index.
FIND_SECONDS = 5.0

# The pause before another try where a standby is about to take over.
STANDBY_PAUSE_SECONDS = 0.25

# How long an interrupted caller waits until a server no longer uses its memory.
SETTLE_SECONDS = 3.0

ADVICE = "Check that `pyps serve` runs there, that this is its data port, and that no firewall stands between. "


class Connection:
    """One server, and the open transports to it. `persist` carries an operation through losses and restarts."""

    def __init__(
        self, index: int, *, launch: Launch, outage: Outage | None = None, beside: Connection | None = None
    ) -> None:
        """`outage`: shared by the connections whose losses are logged together.

        `beside`: the connection to the same server that finds it, where this is another one.
        """
        self.index = index
        self._beside = beside
        # Where the server may be besides its place, the likeliest first: its standby, then where it was last.
        self._elsewhere: list[str] = []
        # How often it was looked for since it last answered a Hello.
        self._tries = 0
        # The address that was looked up last.
        self.place = self.address = self._found = launch.servers[index]
        self.name = f"server {index} ({self.place})"
        self.route = Route(self.name)
        # The server's epoch, as last heard.
        self.epoch = 0
        # Its unanswered calls, heartbeats included.
        self.outage = outage or Outage()
        self.resend: Resend | None = None
        # Whether gradients may be unchecked, since this server checks them in shared memory.
        self.left_unchecked = False
        # The lane, if the newest Hello offered one; a lost lane stays here until the next Hello.
        self.lane: Transport | None = None
        self._launch = launch
        self._guard = ForkGuard()
        self._cancel_reason = ""
        # Whether there was a channel before, and whether the server answered on it.
        self._had_channel = self._was_heard = False
        # The transport when it was closed.
        self._transport = ""
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._channel: GrpcChannel | None = None
        self._link: Transport | None = None
        self._closed = False
        # Whether shared memory was lost so often that it is not tried again.
        self._link_is_given_up = False

    @property
    def channel(self) -> GrpcChannel:
        """The open channel, or a new one.

        Raises:
            ForkedClient: This is a forked child.
            LinkLost: The server's address cannot be found now; each new channel looks it up again. Or TLS files cannot
                be read any more: they may be replaced at this moment.
            InvalidArgument: TLS files cannot be read for the first channel.
        """
        self._guard.check()
        if self._channel is None and not self._closed:
            # Without the lock: this may make a call.
            self._find()
        with self._lock:
            if self._closed:
                raise RunFinished("The client was closed: make a new one to go on.")
            if self._channel is None:
                try:
                    self._channel = self._dial(self.address)
                except (InvalidArgument, OSError) as error:
                    if not self._had_channel:
                        raise
                    raise LinkLost(str(error)) from None
                self._channel.was_heard = self._was_heard
            return self._channel

    def _dial(self, address: str) -> GrpcChannel:
        return GrpcChannel(address, self._launch.credentials, use_proxy=self._launch.use_proxy)

    def _find(self) -> None:
        """Look the address up again."""
        local_server.check(self.place)
        tries, self._tries = self._tries, self._tries + self._had_channel
        if self._beside is not None:
            addresses = dict.fromkeys([self._beside.address, *self._beside._elsewhere])
            self.address = list(addresses)[tries % len(addresses)]
            return
        # After a loss its standby first, since a server that began again in the old place knows nothing of that.
        if self._had_channel and (place := tries % (len(self._elsewhere) + 1)) < len(self._elsewhere):
            self.address = self._elsewhere[place]
            return
        try:
            address = address_of(self.place, index_at=self._index_at)
        except (InvalidArgument, ServerUnavailable) as error:
            raise LinkLost(str(error)) from None
        if self._had_channel and address != self._found:
            logger.info("%s is at %s now", self.name, address)
        self.address = self._found = address

    def _index_at(self, address: str) -> int | None:
        """Return the index in the run of the server at an address; None if it has none yet."""
        channel = self._dial(address)
        request = HelloRequest(protocol_version=PROTOCOL_VERSION, software=SOFTWARE, role=ROLE_OBSERVER)
        try:
            reply = channel.call("Hello", request, HelloReply, timeout_seconds=FIND_SECONDS)
        except LinkLost as lost:
            raise ServerUnavailable(str(lost)) from None
        finally:
            channel.close()
        if reply.state == RUN_STATE_DRAINING:
            raise ServerUnavailable("the server is shutting down")
        return reply.server_index if reply.num_servers else None

    def note_standby(self, address: str) -> None:
        """Note where the server's standby is; "" for none that could take over."""
        if address and self._elsewhere[:1] != [address]:
            self._elsewhere = [each for each in dict.fromkeys([address, self.address]) if each != self.place]

    @property
    def has_standby(self) -> bool:
        return bool(self._elsewhere)

    def moved(self, beside: Connection, epoch: int) -> bool:
        """Return whether the answer on the connection beside is another server's, and end calls to one that is silent.

        `epoch`: of the answer. One that is larger is of the standby, which has taken over.
        """
        if beside.address == self.address:
            return False
        if epoch > self.epoch:
            self.cancel(f"{beside.address} has taken over")
        return True

    def answered(self, reply: HelloReply) -> None:
        """Note the answer to a Hello. Raises LinkLost where another server has gone on with the run since."""
        if self._elsewhere and reply.epoch < self.epoch:
            raise LinkLost(f"{self.address} serves an earlier life of the run, which goes on elsewhere")
        self.epoch, self._tries = reply.epoch, 0
        self.note_standby(reply.standby)

    def greeted(self, sender: Sender, reply: HelloReply) -> None:
        """Make the lane that the answer to a worker's Hello offers; its first round connects it."""
        greeted = Greeted(sender, reply, self.address, self._launch.credentials, self.route)
        self.lane = self._launch.dialer.lane(greeted, self.lane)

    def round(self, channel: GrpcChannel, method: str, parts: Parts, take: Take) -> None:
        """Do a round, as `Transport.round`, by the fastest transport that is free."""
        for transport in (self._link if parts.request is not None else None, self.lane, channel):
            if transport is not None and transport.round(method, parts, take):
                return

    def renew(self, failed: GrpcChannel | None) -> bool:
        """Drop a channel that failed; return False if there is none, or another thread dropped it already."""
        with self._lock:
            if failed is None or self._channel is not failed:
                return False
            self._dropped(failed)
        _close(self.lane, failed)
        return True

    def cancel(self, problem: str = "") -> None:
        """Let all calls under way fail, for this reason; on any thread. The next call connects again."""
        self._cancel_reason = problem
        with self._lock:
            channel = self._channel
            if channel is not None:
                self._dropped(channel)
        _close(self._link, self.lane, channel)

    def _dropped(self, channel: GrpcChannel) -> None:
        """Forget a channel. With _lock held."""
        self._had_channel, self._was_heard = True, channel.was_heard
        self._channel = None

    @property
    def link(self) -> Transport | None:
        """The open shared memory."""
        link = self._link
        return None if link is None or link.lost else link

    @property
    def transport(self) -> str:
        """The name of the transport of the session's vectors."""
        if self._transport:
            return self._transport
        lane = self.lane
        transport = self.link or (None if lane is None or lane.lost else lane)
        return GrpcChannel.name if transport is None else transport.name

    @property
    def is_local(self) -> bool:
        """Whether vectors go through shared memory: it is open, or lost and will be opened again.

        There the server checks all gradients of a push for NaN and infinity before it applies one of them.
        """
        return self._link is not None

    def detach(self) -> None:
        """Give up shared memory: messages serve."""
        with self._lock:
            link, self._link = self._link, None
        _close(link)

    def drop_lane(self) -> None:
        """Close the lane: with shared memory there are few messages."""
        lane, self.lane = self.lane, None
        _close(lane)

    def attach(self, attached: Callable[[], Transport]) -> None:
        """Open shared memory again. Raises LinkLost or a PypsError with the reason against it."""
        if self._link_is_given_up:
            raise LocalLost("it was lost again and again")
        link = attached()
        spare: Transport | None = link
        with self._lock:
            if not self._closed and self.link is None:
                spare, self._link = self._link, link
        _close(spare)

    def close(self) -> None:
        """End the connection for good; a forked child only forgets it."""
        if self._guard.in_child:
            return
        with self._lock:
            self._transport = self.transport
            channel, self._channel, self._closed = self._channel, None, True
            link, self._link = self._link, None
        _close(link, self.lane, channel)

    def persist(self, operation: Operation[T], stop: threading.Event, *, rejoin: Rejoin, policy: RetryPolicy) -> T:
        """Run an operation until the server answers it; after a loss call `rejoin` first.

        An operation remembers what was answered, and goes on from there. It ends its own waits when `stop` is set, and
        is not run again then.
        """
        wait: Wait | None = None
        known = True
        num_links_lost = 0
        try:
            while True:
                channel = self._channel
                try:
                    if channel is None or self._guard.generation != fork.generation:
                        channel = self.channel
                    if wait is not None and not known:
                        rejoin(self, channel, wait.call_seconds)
                        known = True
                        if stop.is_set():
                            raise RunFinished(f"The client was closed while it came back to {self.name}.")
                    self._cancel_reason = ""
                    if (resend := self.resend) is not None and resend.epoch < self.epoch:
                        resend(channel, stop)
                    result = operation(channel, stop)
                except Busy as busy:
                    problem, progress = str(busy), busy.answered > 0
                except LocalLost as lost:
                    # gRPC may go on; a Hello brings new offers of a lane or shared memory.
                    problem, progress, known = str(lost), lost.answered > 0, False
                    num_links_lost += 1
                    self._link_is_given_up = num_links_lost >= LINKS_LOST_MAX
                except LinkLost as lost:
                    self.renew(channel)
                    problem, progress, known = str(lost), lost.answered > 0, False
                except (UnknownWorker, NotInitialized) as refused:
                    problem, progress, known = str(refused), False, False
                else:
                    if wait is not None:
                        wait.end()
                    elif self.name in self.outage.lost:
                        self.outage.note_answer(self.name)
                    return result
                if wait is None:
                    wait = policy.begin(self.name, stop=stop, advice=ADVICE, outage=self.outage)
                if progress:
                    wait.restart()
                pause_max_seconds = STANDBY_PAUSE_SECONDS if self._elsewhere else math.inf
                wait.pause(self._cancel_reason or problem, pause_max_seconds=pause_max_seconds)
        finally:
            if wait is not None:
                wait.give_up()


class Servers:
    """A connection a server. Lists of operations and of results are in the order of `connections`."""

    def __init__(self, launch: Launch, *, rejoin: Rejoin) -> None:
        outage = Outage()
        self.connections = [Connection(index, launch=launch, outage=outage) for index in range(len(launch.servers))]
        self._rejoin = rejoin
        self._loss = RetryPolicy(launch.loss_wait_seconds, "loss_wait_seconds")
        self._threads = Threads()

    def keep(self, contacts: Sequence[int]) -> None:
        """Close the connections to servers with other indices."""
        for connection in self.connections:
            if connection.index not in contacts:
                connection.close()
        self.connections = [connection for connection in self.connections if connection.index in contacts]

    def on_all(self, operations: Sequence[Operation[T]]) -> list[T]:
        """Run one operation a server, all at once, each through losses of its connection; raise the first failure."""
        try:
            if len(operations) == 1:
                # On this thread: no other operation's failure could end it.
                [operation], stop = operations, self._threads.closed
                return [self.connections[0].persist(operation, stop, rejoin=self._rejoin, policy=self._loss)]
            tasks = [
                partial(connection.persist, operation, rejoin=self._rejoin, policy=self._loss)
                for connection, operation in zip(self.connections, operations, strict=True)
            ]
            return self._threads.run(tasks, cancel=self._cancel)
        except Exception:
            raise
        except BaseException:
            # Ctrl-C. No thread may write into the caller's vectors after the return.
            self._cancel()
            self._settle()
            raise

    def on_first(self, operation: Operation[T]) -> T:
        return self.on_all([operation])[0]

    def hurry(self, seconds: float) -> None:
        """End waits for lost servers, those under way too, so long after the loss."""
        self._loss.hurry(seconds)

    def give_up(self) -> None:
        """End the waits under way; the connections stay open."""
        self._threads.close()

    def close(self) -> None:
        self._threads.close()
        for connection in self.connections:
            connection.close()

    def _cancel(self) -> None:
        for connection in self.connections:
            connection.cancel()

    def _settle(self) -> None:
        """Wait, for SETTLE_SECONDS, until no server uses shared memory, and open it again.

        A server answers Hello when no earlier request of the caller works in its memory any more.
        """

        def greet(connection: Connection, _: threading.Event) -> None:
            with contextlib.suppress(LinkLost, PypsError):
                self._rejoin(connection, connection.channel, SETTLE_SECONDS)

        local = [connection for connection in self.connections if connection.is_local]
        self._threads.run([partial(greet, connection) for connection in local], cancel=self._cancel)


def _close(*transports: Transport | None) -> None:
    for transport in transports:
        if transport is not None:
            transport.close()


def call_seconds(num_bytes: int) -> float:
    """Return the deadline of one call that moves so many bytes."""
    return CALL_SECONDS + num_bytes / BYTES_PER_SECOND_MIN
