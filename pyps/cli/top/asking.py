"""Asking running servers again and again, each on a thread of its own: one that does not answer holds up no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from pyps.cli import status
from pyps.cli.control import Control, change_all, in_force, settled
from pyps_client.credentials import read_token
from pyps_client.places import address_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work_wire
from pyps_wire.contract import CONTROL_PORT
from pyps_wire.errors import BadRequest, NotAllowed, NotAuthenticated, PypsError

# A round of questions costs a server about 3 ms of a core with few workers and 7 ms with 256: asked at this pace it
# stays below 1 %.
INTERVAL_SECONDS = 1.0
WORKERS_A_SECOND = 256
# Of a server that is stopped, or whose machine has gone.
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Answer(status.Answer):
    """What one server said in one round: of events those since the round before, of shards, which are dear, none."""

    staleness: pb.StalenessHistogram
    memory: pb.Memory
    # Why the caller may not change the server; empty where it may.
    refusal: str


def ask_on(
    address: str,
    token_file: Path | None,
    tell: Callable[[str, Answer | str], None],
    *,
    interval_seconds: float,
    go_on: Event,
    closed: Event,
) -> None:
    """Asks one server, found anew after each failure, until it is closed; tells each answer, or why there is none."""
    newest, uptime_seconds = 0, 0.0

    def rest(num_workers: int) -> None:
        closed.wait(interval_seconds + num_workers / WORKERS_A_SECOND)
        go_on.wait()

    while not closed.is_set():
        try:
            # Anew after each failure: gRPC would wait ever longer before it tries a connection again.
            with Control(address_of(address, port=CONTROL_PORT), token=read_token(token_file)) as control:
                refusal = _refusal_of(control)
                while not closed.is_set():
                    answer = _ask(control, address, refusal, after=newest)
                    newest = max([newest, *(event.number for event in answer.events)])
                    if answer.status.uptime_seconds < uptime_seconds:
                        # Another life of the server, which counts its events anew.
                        newest = 0
                    uptime_seconds = answer.status.uptime_seconds
                    tell(address, answer)
                    rest(len(answer.workers))
        except PypsError as error:
            tell(address, str(error))
            rest(0)


def configure(addresses: Sequence[str], token_file: Path | None, request: pb.ConfigureRequest) -> str:
    """Change every server once all would accept it; return a line for each reply and each refusal."""
    try:
        found = [address_of(address, port=CONTROL_PORT) for address in addresses]
        replies, refusals = change_all(found, read_token(token_file), "Configure", request)
    except PypsError as error:
        replies, refusals = [], [error]
    lines = [f"not changed: {refusal}" for refusal in refusals]
    for address, reply in replies:
        warnings = "".join(f" It warns: {warning}." for warning in reply.warnings)
        lines.append(f"{address}: {in_force(reply)}{settled(reply)}.{warnings}")
    return "\n".join(lines)


def _ask(control: Control, address: str, refusal: str, *, after: int) -> Answer:
    def call(method: str, request: Any) -> Any:
        return control.call(method, request, timeout_seconds=ANSWER_SECONDS)

    return Answer(
        address,
        call("GetStatus", pb.GetStatusRequest()),
        call("ListWorkers", pb.ListWorkersRequest()).workers,
        (),
        call("ListEvents", pb.ListEventsRequest(after=after)).events,
        call("GetWork", work_wire.GetWorkRequest()),
        call("GetStaleness", pb.GetStalenessRequest()),
        call("GetMemory", pb.GetMemoryRequest()),
        refusal,
    )


def _refusal_of(control: Control) -> str:
    """Why this caller is no operator there: an operator who names nothing to change is told just that."""
    try:
        control.call("Configure", pb.ConfigureRequest(), timeout_seconds=ANSWER_SECONDS)
    except (NotAllowed, NotAuthenticated) as error:
        return str(error)
    except BadRequest:
        return ""
    return ""
