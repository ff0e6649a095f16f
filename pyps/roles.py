"""The roles of callers, and the least role that each call at each port of a server requires."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum

from pyps_wire.contract import INSPECTOR, PARAMETER_SERVER, STANDBY, VECTOR_MACHINE, WORK_QUEUE


class Role(IntEnum):
    """The role of a caller. Each role includes the earlier ones."""

    ANYBODY = 0
    OBSERVER = 1
    WORKER = 2
    OPERATOR = 3

    @property
    def word(self) -> str:
        """The role's name in settings, messages and certificates."""
        return self.name.lower()


# The required role of these calls depends on their messages.
HELLO_AS_WORKER = "Hello as a worker"
PULL_AS_WORKER = "Pull as a worker"
METRICS = "the page of metrics"


def _calls(service: str, role: Role, *methods: str) -> dict[str, Role]:
    return {f"/{service}/{method}": role for method in methods}


_OF_ALL_PORTS = {
    # Orchestrators probe health without a token, and learn only that the server is alive.
    **_calls("grpc.health.v1.Health", Role.ANYBODY, "Check", "List", "Watch"),
    **_calls("grpc.reflection.v1.ServerReflection", Role.OBSERVER, "ServerReflectionInfo"),
    **_calls("grpc.reflection.v1alpha.ServerReflection", Role.OBSERVER, "ServerReflectionInfo"),
}
_SOCKETS = ("GetTopChannels", "GetServers", "GetServer", "GetServerSockets", "GetChannel", "GetSubchannel", "GetSocket")
# By the names of ports in a server's start block.
PORTS: Mapping[str, Mapping[str, Role]] = {
    "data": {
        **_OF_ALL_PORTS,
        **_calls(PARAMETER_SERVER, Role.OBSERVER, "Hello", "Pull"),
        **_calls(PARAMETER_SERVER, Role.WORKER, "Initialize", "Push", "Exchange", "Proceed", "Heartbeat", "Leave"),
        HELLO_AS_WORKER: Role.WORKER,
        PULL_AS_WORKER: Role.WORKER,
        **_calls(WORK_QUEUE, Role.WORKER, "Open", "Lease", "Claim", "Deliver"),
        **_calls(WORK_QUEUE, Role.WORKER, "BeginPass", "AwaitPass", "EndWork"),
        **_calls(VECTOR_MACHINE, Role.WORKER, "Attach", "Execute", "Stage"),
        **_calls(STANDBY, Role.OPERATOR, "Follow", "Meet"),
    },
    "control": {
        **_OF_ALL_PORTS,
        **_calls(INSPECTOR, Role.OBSERVER, "GetStatus", "GetStaleness", "GetWork", "GetMemory"),
        **_calls(INSPECTOR, Role.OBSERVER, "ListShards", "ListWorkers", "ListTensors", "ListReceipts", "ListEvents"),
        **_calls(INSPECTOR, Role.OBSERVER, "ListActivity"),
        **_calls(INSPECTOR, Role.OPERATOR, "Configure", "SaveCheckpoint", "Reset", "Stop", "Promote", "Drain"),
        **_calls("grpc.channelz.v1.Channelz", Role.OBSERVER, *_SOCKETS),
    },
    "metrics": {METRICS: Role.OBSERVER},
    # Both need a ticket, which only Hello as a worker returns.
    "lane": {},
    "shared memory": {},
}
_NEEDED: Mapping[str, Role] = {call: role for calls in PORTS.values() for call, role in calls.items()}


def needed_for(call: str) -> Role:
    """Return the least role that may make a call; the highest for a call that the table does not list."""
    return _NEEDED.get(call, Role.OPERATOR)


def role_in(subject: str) -> Role:
    """Return the role that a certificate's subject, in the text form of RFC 2253, names as a unit (OU).

    Without a unit the role is the worker's; with several it is the least of them.
    """
    # A comma in a value is escaped, and does not end the value.
    units = re.findall(r"(?:^|[,+])OU=(\w+)(?=[,+]|$)", re.sub(r"\\.", "?", subject))
    return min((role for role in Role if role and role.word in units), default=Role.WORKER)
