"""The threads that ask a run's servers: one silent server delays no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from pyps.control import Control
from pyps.watch.answer import ACTIVITY_MAX, Answer, activity_of
from pyps.watch.history import History
from pyps_client.credentials import read_token
from pyps_client.places import address_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire.contract import CONTROL_PORT
from pyps_wire.errors import PypsError

# A round of calls takes a server 3 ms of a core, with 256 workers up to 25 ms on a busy machine: this pace keeps it
# below 1 %.
INTERVAL_SECONDS = 1.0
WORKERS_A_SECOND = 128
CALL_SECONDS = 5.0
EVENTS_MAX = 1000


class Watch:
    """Asks each server again and again, and feeds a history."""

    def __init__(
        self, addresses: Sequence[str], token_file: Path | None = None, *, interval_seconds: float = INTERVAL_SECONDS
    ):
        self.history = History(addresses)
        self._token_file, self._interval_seconds = token_file, interval_seconds
        self._closed = Event()
        self._addresses = addresses

    def start(self) -> None:
        for address in self._addresses:
            Thread(target=self._ask, args=(address,), daemon=True).start()
        Thread(target=self._tick, daemon=True).start()

    def close(self) -> None:
        """Stop asking. A call under way may last for seconds; nobody waits for it."""
        self._closed.set()

    def _tick(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            self.history.tick()

    def _ask(self, address: str) -> None:
        asked = Asked()
        while not self._closed.is_set():
            try:
                # A new connection after each failure: gRPC would wait ever longer, and the server may have moved.
                place, token = address_of(address, port=CONTROL_PORT), read_token(self._token_file)
                with Control(place, token=token, timeout_seconds=CALL_SECONDS) as control:
                    while not self._closed.is_set():
                        answer = asked.answer(control, address)
                        self.history.take(address, answer)
                        self._closed.wait(self._interval_seconds + len(answer.workers) / WORKERS_A_SECOND)
            except PypsError as error:
                self.history.take(address, str(error))
                self._closed.wait(self._interval_seconds)


class Asked:
    """What was asked of one server so far, so that it tells nothing twice."""

    def __init__(self) -> None:
        self._places, self._uptime_seconds = ("", ""), 0.0
        self._event, self._activity = 0, 0
        self._lags = False

    def answer(self, control: Control, address: str) -> Answer:
        """Return the server's answers without shards, and what is new of events, steps and waits. Raises PypsError."""
        status = control.call("GetStatus", pb.GetStatusRequest())
        places = control.address, status.control_address
        if status.uptime_seconds < self._uptime_seconds or places != self._places:
            # A restarted server numbers from 1, and another one has numbers of its own.
            self._event, self._activity = 0, 0
        self._places, self._uptime_seconds = places, status.uptime_seconds
        events = control.call("ListEvents", pb.ListEventsRequest(after=self._event, limit=EVENTS_MAX))
        self._event = events.newest
        # Of more than a reply holds the oldest are skipped: who shows them has to keep up.
        reply = activity_of(control, after=0 if self._lags else self._activity)
        # A server whose run was reset numbers from 1 too.
        known = self._activity if reply.newest >= self._activity else 0
        activity = [each for each in reply.activities if each.number > known]
        skipped = activity[0].number - known - 1 if known and activity else 0
        self._lags = len(reply.activities) >= ACTIVITY_MAX
        self._activity = reply.newest
        return Answer(
            address,
            status,
            control.call("ListWorkers", pb.ListWorkersRequest()).workers,
            events=events.events,
            staleness=control.call("GetStaleness", pb.GetStalenessRequest()),
            memory=control.call("GetMemory", pb.GetMemoryRequest()),
            activity=activity,
            skipped=skipped,
        )
