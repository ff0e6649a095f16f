"""One server of a run as a caller sees it: a channel that is made anew after each loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pyps_client.channel import Channel
from pyps_client.fork import ForkGuard
from pyps_client.launch import Launch
from pyps_client.lent import Lending
from pyps_client.outage import Outage
from pyps_client.retry import Busy, LinkLost, LocalLost, RetryPolicy, Wait
from pyps_client.transport import Link
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import NotInitialized, RunFinished, UnknownWorker
from pyps_wire.parameter_server_pb2 import LocalTransport

T = TypeVar("T")

# A call with tensors may take this long, and longer by its size. A slow link that still moves is not cut:
# what came through before the deadline counts, and the next call goes on from there.
CALL_SECONDS = 60.0
BYTES_PER_SECOND_MIN = 1_000_000

# An operation that loses a local link so often goes by gRPC.
LINKS_LOST_MAX = 3

ADVICE = "Check that `pyps serve` runs there, that this is its data port, and that no firewall stands between. "


class Connection:
    """The way to one server. `persist` carries an operation through lost connections and restarts."""

    def __init__(self, index: int, *, launch: Launch, outage: Outage | None = None) -> None:
        """`outage`: what is told of all of the caller's servers together."""
        self.index = index
        self.address = launch.servers[index]
        self.name = f"server {index} ({self.address})"
        # The server's epoch, as last heard.
        self.epoch = 0
        # Since when it has not answered, heartbeats included.
        self.outage = outage or Outage()
        # Whether it was ever left to the server to look through lent gradients, all before it applies any.
        self.left_to_look = False
        self._launch = launch
        self._guard = ForkGuard()
        self._cut_because = ""
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._channel: Channel | None = None
        self._link: Link | None = None
        self._closed = False
        # Whether a local link was lost so often that it is not tried again.
        self._link_is_given_up = False

    @property
    def channel(self) -> Channel:
        """The channel in use, made on first use. Raises ForkedClient in a forked child."""
        self._guard.check()
        with self._lock:
            if self._closed:
                raise RunFinished("The client was closed: make a new one to go on.")
            if self._channel is None:
                launch = self._launch
                self._channel = launch.way.channel(self.address, token=launch.token, use_proxy=launch.use_proxy)
            return self._channel

    def renew(self, failed: Channel) -> None:
        """Drops a channel that failed, unless another thread already did."""
        with self._lock:
            if self._channel is not failed:
                return
            self._channel = None
        failed.close()

    def cut(self, problem: str = "") -> None:
        """Makes fail what is under way, on whichever thread, because of that; what comes next connects anew."""
        self._cut_because = problem
        with self._lock:
            channel, self._channel = self._channel, None
        if self._link is not None:
            self._link.close()
        if channel is not None:
            channel.close()

    @property
    def link(self) -> Link | None:
        """The way through memory that this process and the server share, where it is open."""
        link = self._link
        return None if link is None or link.lost else link

    @property
    def is_local(self) -> bool:
        """Whether lent vectors go through shared memory: the link is open, or lost and to be opened anew."""
        return self._link is not None

    def link_to_use(self) -> Link | None:
        """The way of lent vectors: None for gRPC. Raises LocalLost where the link is to be opened anew first."""
        link = self._link
        if link is not None and link.lost:
            # A lost link is never passed over in silence: whoever rejoins opens it again, or detaches.
            raise LocalLost("the local connection was lost")
        return link

    def detach(self) -> None:
        """Gives up the local link: lent vectors go by gRPC."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def attach(self, offer: LocalTransport, lending: Lending, sender: Sender) -> None:
        """Opens the local link anew, if it is not open. Raises LinkLost or a PypsError that says why it cannot be."""
        if self.link is not None:
            return
        if self._link_is_given_up:
            raise LocalLost("it was lost again and again")
        link = self._launch.way.attach(offer, lending, sender, name=self.name)
        spare: Link | None = link
        with self._lock:
            if not self._closed and self.link is None:
                spare, self._link = self._link, link
        if spare is not None:
            spare.close()

    def close(self) -> None:
        """Ends the connection for good; in a forked child only forgets it."""
        if self._guard.in_child:
            return
        with self._lock:
            channel, self._channel, self._closed = self._channel, None, True
            link, self._link = self._link, None
        if link is not None:
            link.close()
        if channel is not None:
            channel.close()

    def persist(
        self,
        operation: Callable[[Channel, threading.Event], T],
        *,
        rejoin: Callable[[Connection, Channel, float], object],
        stop: threading.Event,
        policy: RetryPolicy,
    ) -> T:
        """Runs an operation until it ends with a verdict; after a loss `rejoin` introduces us again first.

        An operation that is run again goes on where it was: it remembers what was answered. It gets `stop`, and
        gives up a wait of its own when that is set; it is not run again then.
        """
        wait: Wait | None = None
        known = True
        num_links_lost = 0
        try:
            while True:
                channel = self.channel
                try:
                    if wait is not None and not known:
                        rejoin(self, channel, wait.call_seconds)
                        known = True
                        if stop.is_set():
                            raise RunFinished(f"The client was closed while it came back to {self.name}.")
                    self._cut_because = ""
                    result = operation(channel, stop)
                except Busy as busy:
                    problem, progress = str(busy), busy.answered > 0
                except LocalLost as lost:
                    # The gRPC connection may be sound: Hello tells, and how to attach anew.
                    problem, progress, known = str(lost), lost.answered > 0, False
                    num_links_lost += 1
                    self._link_is_given_up = num_links_lost >= LINKS_LOST_MAX
                except LinkLost as lost:
                    self.renew(channel)
                    problem, progress, known = str(lost), lost.answered > 0, False
                except (UnknownWorker, NotInitialized) as refused:
                    problem, progress, known = str(refused), False, False
                else:
                    if wait is None:
                        self.outage.heard(self.name)
                    else:
                        wait.end()
                    return result
                if wait is None:
                    wait = policy.begin(self.name, stop=stop, advice=ADVICE, outage=self.outage)
                if progress:
                    wait.restart()
                wait.pause(self._cut_because or problem)
        finally:
            if wait is not None:
                wait.give_up()


def call_seconds(num_bytes: int) -> float:
    """The deadline of one call that moves so many bytes."""
    return CALL_SECONDS + num_bytes / BYTES_PER_SECOND_MIN
