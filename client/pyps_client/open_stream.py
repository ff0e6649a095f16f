"""A stream of requests and replies that stays open from one round to the next."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from pyps_client import fork
from pyps_client.log import logger
from pyps_client.watchdog import Watchdog

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    cygrpc = None

Metadata = tuple[tuple[str, str], ...]
# Takes a reply; True once it was the round's last.
Take = Callable[[bytes], bool]

# Up to this size a message that is alone is sent in one operation with the wait for its answer.
SMALL_BYTES = 1 << 16

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamEnded(Exception):
    """The stream ended before its round did. Never leaves this package."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = metadata


class OpenStream(Protocol):
    """One call of a method that takes a stream and answers with one. One round at a time."""

    def run(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        """Sends the frames, each made when the one before has left, and hands replies to `take` until it says so.

        Sending and reading go on at the same time. Raises StreamEnded; after any exception the stream is of no use.
        """

    def close(self) -> None:
        """Gives up the call; from any thread, also amid a round."""


def open_stream(channel: grpc.Channel, path: str, metadata: Metadata) -> OpenStream:
    """Starts the call in the best way that this grpcio has."""
    core = getattr(channel, "_channel", None)
    if cygrpc is not None and hasattr(core, "segregated_call"):
        try:
            return DirectStream(core, path, metadata)
        except Exception as error:
            if not _is_of_grpcio(error):
                raise
            # Or the channel was closed, of which the stable interface tells.
            logger.debug("grpcio %s has no direct stream: %r", grpc.__version__, error)
    return QueuedStream(channel, path, metadata)


class DirectStream:
    """A stream driven by the caller's own thread alone.

    grpcio's stable interface iterates requests on one thread and waits for events on another: four hand-overs in a
    round of one message, which cost more than the message. What it is built from, and its single-threaded calls
    use too, needs none; `QueuedStream` is there in case that changes.
    """

    def __init__(self, core: Any, path: str, metadata: Metadata) -> None:
        self._turn = threading.Lock()
        # Made for nothing but to know now, not amid a round, that they can be.
        _ = cygrpc.SendMessageOperation(b"", 0), cygrpc.ReceiveMessageOperation(0)
        begin = (
            ((cygrpc.SendInitialMetadataOperation(metadata, 0),), _OPENED),
            ((cygrpc.ReceiveStatusOnClientOperation(0),), _ENDED),
            ((cygrpc.ReceiveInitialMetadataOperation(0),), _GREETED),
        )
        self._call = core.segregated_call(0, path.encode(), None, None, metadata, None, begin, None)
        fork.keep_alive(self._call)
        # Operations begun whose ends have not been fetched: as long as there is one there is something to wait for.
        self._due = {_OPENED, _ENDED, _GREETED}
        self._end: StreamEnded | None = None
        self._watchdog = Watchdog(self._expire)

    def run(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        with self._turn:
            self._watchdog.begin(timeout_seconds)
            try:
                self._round(frames, take)
            except StreamEnded:
                raise
            except Exception as error:
                if not _is_of_grpcio(error):
                    raise
                raise _given_up(error) from None
            self._watchdog.rest()

    def close(self) -> None:
        self._watchdog.end()
        try:
            # gRPC does nothing where it has let go of the call itself.
            self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "the client gave up")
            # Amid a round its own thread fetches what is due; a signal's handler may run in that very thread.
            if self._turn.acquire(blocking=False):
                try:
                    self._drain()
                finally:
                    self._turn.release()
        except Exception as error:
            if not _is_of_grpcio(error):
                raise
            _given_up(error)
        fork.let_go(self._call)

    def _round(self, frames: Iterator[bytes], take: Take) -> None:
        upcoming = next(frames, None)
        if upcoming is not None and len(upcoming) <= SMALL_BYTES and not {_SENT, _RECEIVED} & self._due:
            first, upcoming = upcoming, next(frames, None)
            sending = cygrpc.SendMessageOperation(first, 0)
            if upcoming is None:
                # All there is, and short: sent in one operation with the wait for its answer.
                self._begin((sending, cygrpc.ReceiveMessageOperation(0)), _RECEIVED)
            else:
                self._begin((sending,), _SENT)
        while True:
            if upcoming is not None and _SENT not in self._due:
                self._begin((cygrpc.SendMessageOperation(upcoming, 0),), _SENT)
                # Made while the one before it leaves.
                upcoming = next(frames, None)
            if _RECEIVED not in self._due:
                self._begin((cygrpc.ReceiveMessageOperation(0),), _RECEIVED)
            message = self._next()
            if message is not None and take(message):
                return

    def _begin(self, operations: tuple[Any, ...], tag: int) -> None:
        begun = False
        try:
            # Noted before it is begun: a signal must not come between.
            self._due.add(tag)
            begun = self._call.operate(operations, tag)
        finally:
            if not begun:
                self._due.discard(tag)
        if not begun:
            # The call is over; its end says why.
            self._drain()
            raise self._ended()

    def _next(self) -> bytes | None:
        """Waits for the end of one operation; the message where that was one's arrival."""
        event = self._fetch()
        if event.tag == _ENDED:
            self._note_end(event)
        elif event.tag == _RECEIVED:
            message: bytes | None = event.batch_operations[-1].message()
            if message is not None:
                return message
        else:
            return None
        self._drain()
        raise self._ended()

    def _drain(self) -> None:
        """Fetches all that is due, so that nothing of the call is left; only once it has ended, or was given up."""
        while self._due:
            event = self._fetch()
            if event.tag == _ENDED:
                self._note_end(event)

    def _fetch(self) -> Any:
        """Waits for the end of one operation.

        An exception is a signal's: gRPC may have let go of the call and its queue, or of this event alone. Nothing can
        be told to be due then, and to wait for what is not would never end, or use memory that was freed.
        """
        try:
            event = self._call.next_event()
            self._due.discard(event.tag)
        except BaseException:
            self._due.clear()
            raise
        return event

    def _note_end(self, event: Any) -> None:
        end = event.batch_operations[0]
        code = _CODES.get(end.code(), grpc.StatusCode.UNKNOWN)
        self._end = StreamEnded(code, end.details() or "", end.trailing_metadata())

    def _ended(self) -> StreamEnded:
        return self._end or StreamEnded(grpc.StatusCode.CANCELLED, "the stream was closed", ())

    def _expire(self) -> None:
        self._call.cancel(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "no answer in time")


def _is_of_grpcio(error: Exception) -> bool:
    """Whether grpcio raised it, or our use of its private parts, as with another one than this was written for.

    Whoever makes frames or takes replies may raise the same, and so may a signal's handler, amid anything.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    return module == __name__ or module.partition(".")[0] == "grpc"


def _given_up(error: Exception) -> StreamEnded:
    """Has every stream go the public way, live ones by failing too; the end of this, whose round is tried again."""
    global cygrpc
    if cygrpc is not None:
        cygrpc = None
        logger.warning("grpcio %s: the direct stream failed (%r): the slower way from now on", grpc.__version__, error)
    return StreamEnded(grpc.StatusCode.UNAVAILABLE, "the direct stream failed", ())


class QueuedStream:
    """A stream by grpcio's stable interface, which iterates over the frames on a thread of its own."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        self._turn = threading.Lock()
        self._rounds: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        start: Any = channel.stream_stream(path)
        self._call = start(_frames_of(self._rounds), metadata=metadata)
        fork.keep_alive(self._call)
        self._expired = False
        self._watchdog = Watchdog(self._expire)

    def run(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        with self._turn:
            self._watchdog.begin(timeout_seconds)
            self._rounds.put(frames)
            try:
                while not take(next(self._call)):
                    continue
            except StopIteration:
                raise StreamEnded(grpc.StatusCode.OK, "", ()) from None
            except grpc.RpcError as error:
                raise self._ended(error) from None
            self._watchdog.rest()

    def close(self) -> None:
        self._watchdog.end()
        self._rounds.put(None)
        self._call.cancel()
        fork.let_go(self._call)

    def _ended(self, error: Any) -> StreamEnded:
        if self._expired:
            return StreamEnded(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time", ())
        return StreamEnded(error.code(), error.details() or "", error.trailing_metadata() or ())

    def _expire(self) -> None:
        self._expired = True
        self._call.cancel()


def _frames_of(rounds: queue.SimpleQueue[Iterator[bytes] | None]) -> Iterator[bytes]:
    while (frames := rounds.get()) is not None:
        yield from frames


_OPENED, _GREETED, _SENT, _RECEIVED, _ENDED = range(5)
