"""One server of a run as a caller sees it: a channel that is made anew after each loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pyps_client.channel import Channel
from pyps_client.fork import ForkGuard
from pyps_client.launch import Launch
from pyps_client.retry import Busy, LinkLost, RetryPolicy, Wait
from pyps_wire.errors import NotInitialized, RunFinished, UnknownWorker

T = TypeVar("T")

# A call with tensors may take this long, and longer by its size. A slow link that still moves is not cut:
# what came through before the deadline counts, and the next call goes on from there.
CALL_SECONDS = 60.0
BYTES_PER_SECOND_MIN = 1_000_000

ADVICE = "Check that `pyps serve` runs there, that this is its data port, and that no firewall stands between. "


class Connection:
    """The way to one server. `persist` carries an operation through lost connections and restarts."""

    def __init__(self, index: int, *, launch: Launch) -> None:
        self.index = index
        self.address = launch.servers[index]
        self.name = f"server {index} ({self.address})"
        # The server's epoch, as last heard.
        self.epoch = 0
        self._launch = launch
        self._guard = ForkGuard()
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._channel: Channel | None = None
        self._closed = False

    @property
    def channel(self) -> Channel:
        """The channel in use, made on first use. Raises ForkedClient in a forked child."""
        self._guard.check()
        with self._lock:
            if self._closed:
                raise RunFinished("The client was closed: make a new one to go on.")
            if self._channel is None:
                launch = self._launch
                self._channel = Channel(self.address, token=launch.token, use_proxy=launch.use_proxy)
            return self._channel

    def renew(self, failed: Channel) -> None:
        """Drops a channel that failed, unless another thread already did."""
        with self._lock:
            if self._channel is not failed:
                return
            self._channel = None
        failed.close()

    def close(self) -> None:
        """Ends the connection for good; in a forked child only forgets it."""
        if self._guard.in_child:
            return
        with self._lock:
            channel, self._channel, self._closed = self._channel, None, True
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
        gives up a wait of its own when that is set.
        """
        wait: Wait | None = None
        known = True
        while True:
            channel = self.channel
            try:
                if wait is not None and not known:
                    rejoin(self, channel, wait.call_seconds)
                    known = True
                result = operation(channel, stop)
            except Busy as busy:
                problem, progress = str(busy), busy.answered > 0
            except LinkLost as lost:
                self.renew(channel)
                problem, progress, known = str(lost), lost.answered > 0, False
            except (UnknownWorker, NotInitialized) as refused:
                problem, progress, known = str(refused), False, False
            else:
                if wait is not None:
                    wait.end()
                return result
            if wait is None:
                wait = policy.begin(self.name, stop=stop, advice=ADVICE)
            if progress:
                wait.restart()
            wait.pause(problem)


def call_seconds(num_bytes: int) -> float:
    """The deadline of one call that moves so many bytes."""
    return CALL_SECONDS + num_bytes / BYTES_PER_SECOND_MIN
