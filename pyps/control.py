"""Calls to the control ports of running servers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from pyps import __version__
from pyps.units import counted
from pyps_client.credentials import Credentials
from pyps_client.transport.grpc import metadata_of, open_channel
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import ROLE_OBSERVER, Sender
from pyps_wire.contract import INSPECTOR, PARAMETER_SERVER, PROTOCOL_VERSION, stub_of
from pyps_wire.errors import (
    METADATA_KEY,
    InvalidArgument,
    NotAuthenticated,
    ProtocolMismatch,
    PypsError,
    ServerUnavailable,
    from_status,
)
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest, LeaveRequest

TIMEOUT_SECONDS = 10.0
SAVE_TIMEOUT_SECONDS = 600.0


class Control:
    """A connection to a server's control port, which the server's data port leads to too."""

    def __init__(self, address: str, *, token: str, timeout_seconds: float = TIMEOUT_SECONDS):
        self.address = address
        self._timeout_seconds = timeout_seconds
        self._credentials = Credentials.from_environment(token)
        self._metadata = metadata_of(self._credentials)
        self._channel = open_to(address, self._credentials)

    def call(self, method: str, request: Any) -> Any:
        """Call the Inspector service; raise PypsError with the server's message."""
        try:
            return self._call(INSPECTOR, method, request)
        except ProtocolMismatch:
            self.address = _same_host(self.address, self.hello().control_address)
            self._channel.close()
            self._channel = open_to(self.address, self._credentials)
        return self._call(INSPECTOR, method, request)

    def hello(self) -> HelloReply:
        """Return an observer's Hello; raise ProtocolMismatch if the address is no data port."""
        request = HelloRequest(protocol_version=PROTOCOL_VERSION, software=f"pyps {__version__}", role=ROLE_OBSERVER)
        reply: HelloReply = self._call(PARAMETER_SERVER, "Hello", request)
        return reply

    def data_address(self) -> str:
        try:
            self.hello()
        except ProtocolMismatch:
            return _same_host(self.address, self.call("GetStatus", pb.GetStatusRequest()).data_address)
        return self.address

    def leave_for(self, worker: pb.WorkerInfo, run_id: str, *, key: str) -> None:
        """Send Leave for a worker with that key whose process has ended."""
        sender = Sender(run_id=run_id, worker_id=worker.worker_id, incarnation=worker.incarnation, secret=key.encode())
        request = LeaveRequest(sender=sender, cause=LeaveRequest.CAUSE_FAILED, message="its process has ended")
        channel = open_to(self.data_address(), self._credentials)
        try:
            stub_of(PARAMETER_SERVER, channel).Leave(request, timeout=self._timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._readable(error) from None
        finally:
            channel.close()

    def _call(self, service: str, method: str, request: Any) -> Any:
        call = getattr(stub_of(service, self._channel), method)
        timeout = SAVE_TIMEOUT_SECONDS if method == "SaveCheckpoint" else self._timeout_seconds
        try:
            return call(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._readable(error) from None

    def _readable(self, error: Any) -> PypsError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            if refusal := self._credentials.refusal(self.address, details):
                return NotAuthenticated(refusal)
            return ServerUnavailable(f"no server answers on {self.address}: check the address and that the server runs")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(f"{self.address} speaks gRPC but is no port of a pyps server: check the address")
        names = [value for key, value in error.trailing_metadata() or () if key == METADATA_KEY]
        known = from_status(code.name, details, names[0] if names else None)
        return type(known)(f"{self.address}: {details or code.name}")

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()


def configure_all(
    addresses: Sequence[str], token: str, request: pb.ConfigureRequest, *, partial: bool = False
) -> list[str]:
    """Configure all servers of a run, or none; return what each says. A request that only validates changes nothing.

    PypsError where a server does not answer, refuses, or, unless `partial` is set, is not named.
    """
    replies, refusals = call_all(addresses, token, "GetStatus", pb.GetStatusRequest())
    statuses = [status for _, status in replies]
    if not (partial or refusals) and (missing := not_named(statuses)):
        total = max(status.num_servers for status in statuses)
        refusals = [InvalidArgument(f"the run has {total} servers: {missing}")]
    made: list[tuple[str, Any]] = []
    if not refusals:
        made, refusals = (call_all if request.validate_only else change_all)(addresses, token, "Configure", request)
    if refusals:
        only = [address for address, _ in made if not request.validate_only]
        where = f"set on {', '.join(only)} only" if only else "nothing was set"
        found = [str(error).partition(": ") for error in refusals]
        why = {what for address, _, what in found if address in addresses}
        # Once where all refuse alike.
        alike = why if len(why) == 1 and len(found) == len(addresses) else map(str, refusals)
        raise PypsError(f"{where}, as {'; '.join(alike)}")
    if request.validate_only:
        return [f"{address} would take it; in force is {in_force(reply)}." for address, reply in made]
    expected = request.expected_workers or "no"
    expecting = f", {expected} workers expected" if request.HasField("expected_workers") else ""
    lines = [f"{address}: {in_force(reply)}{expecting}{settled(reply)}." for address, reply in made]
    return lines + [f"{address} warns: {warning}" for address, reply in made for warning in reply.warnings]


def change_all(
    addresses: Sequence[str], token: str, method: str, request: Any
) -> tuple[list[tuple[str, Any]], list[PypsError]]:
    """Make a change on every server, unless one refuses to validate it; return replies and refusals."""
    check = type(request)()
    check.CopyFrom(request)
    check.validate_only = True
    _, refusals = call_all(addresses, token, method, check)
    if refusals:
        return [], refusals
    return call_all(addresses, token, method, request)


def call_all(
    addresses: Sequence[str], token: str, method: str, request: Any
) -> tuple[list[tuple[str, Any]], list[PypsError]]:
    """Make the same call on every server, at once; return the replies by control address, and the refusals."""

    def answer(address: str) -> tuple[str, Any]:
        with Control(address, token=token) as control:
            try:
                return control.address, control.call(method, request)
            except PypsError as error:
                return control.address, error

    with ThreadPoolExecutor(max(1, len(addresses))) as threads:
        answers = list(threads.map(answer, addresses))
    refusals = [reply for _, reply in answers if isinstance(reply, PypsError)]
    return [each for each in answers if not isinstance(each[1], PypsError)], refusals


def in_force(reply: Any) -> str:
    """Return what is in force, as "hardsync, staleness none, learning rate 0.01"."""
    words = [reply.protocol, f"staleness {reply.staleness}"]
    if rates := dict.fromkeys(f"{rate.base:g}" for rate in reply.learning_rates):
        words.append(f"learning rate {' and '.join(rates)}")
    if reply.schedule != "constant":
        words.append(f"schedule {reply.schedule}")
    return ", ".join(words)


def settled(reply: Any) -> str:
    """Return what became of waiting gradients; "" if there were none."""
    gradients, updates = counted(reply.gradients_settled, "gradient"), counted(reply.updates_made, "update")
    return f"; {gradients} that waited became {updates}" if reply.gradients_settled else ""


def not_named(statuses: Sequence[pb.Status]) -> str:
    """Return a line about the run's servers that are missing here; "" if none is."""
    total = max((status.num_servers for status in statuses), default=0)
    named = {status.server_index for status in statuses if status.server_index < status.num_servers}
    if not (missing := total - len(named)):
        return ""
    first = next(index for index in range(total) if index not in named)
    subject = f"server {first} of {total} was" if missing == 1 else f"{missing} of {total} servers were"
    return f"{subject} not named: name all with --servers"


def open_to(address: str, shown: Credentials) -> grpc.Channel:
    return open_channel(address, shown, [("grpc.enable_http_proxy", 0)])


def _same_host(address: str, bound: str) -> str:
    """Return the bound port at the host of an address."""
    return f"{address.rpartition(':')[0]}:{bound.rpartition(':')[2]}"
