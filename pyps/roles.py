"""The roles of callers, and the least role that each call at each port of a server requires."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum

from pyps_wire.contract import INSPECTOR, PARAMETER_SERVER, VECTOR_MACHINE, WORK_QUEUE


class Role(IntEnum):
    """The role of a caller. Each includes the roles before it."""

    ANYBODY = 0
    OBSERVER = 1
    WORKER = 2
    OPERATOR = 3

    @property
    def word(self) -> str:
        """The name in settings, messages and certificates."""
        return self.name.lower()


# The required role of these calls depends on their messages.
HELLO_AS_WORKER = "Hello as a worker"
PULL_AS_WORKER = "Pull as a worker"
METRICS = "the page of metrics"

_OF_ALL_PORTS = {
    # Orchestrators probe health without a token, and learn only that the server is alive.
    "/grpc.health.v1.Health/Check": Role.ANYBODY,
    "/grpc.health.v1.Health/List": Role.ANYBODY,
    "/grpc.health.v1.Health/Watch": Role.ANYBODY,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Role.OBSERVER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.OBSERVER,
}
# By the names of ports in a server's start block.
PORTS: Mapping[str, Mapping[str, Role]] = {
    "data": {
        **_OF_ALL_PORTS,
        f"/{PARAMETER_SERVER}/Hello": Role.OBSERVER,
        HELLO_AS_WORKER: Role.WORKER,
        f"/{PARAMETER_SERVER}/Initialize": Role.WORKER,
        f"/{PARAMETER_SERVER}/Push": Role.WORKER,
        f"/{PARAMETER_SERVER}/Pull": Role.OBSERVER,
        PULL_AS_WORKER: Role.WORKER,
        f"/{PARAMETER_SERVER}/Exchange": Role.WORKER,
        f"/{PARAMETER_SERVER}/Proceed": Role.WORKER,
        f"/{PARAMETER_SERVER}/Heartbeat": Role.WORKER,
        f"/{PARAMETER_SERVER}/Leave": Role.WORKER,
        f"/{WORK_QUEUE}/Open": Role.WORKER,
        f"/{WORK_QUEUE}/Lease": Role.WORKER,
        f"/{WORK_QUEUE}/Claim": Role.WORKER,
        f"/{WORK_QUEUE}/Deliver": Role.WORKER,
        f"/{WORK_QUEUE}/BeginPass": Role.WORKER,
        f"/{WORK_QUEUE}/AwaitPass": Role.WORKER,
        f"/{WORK_QUEUE}/EndWork": Role.WORKER,
        f"/{VECTOR_MACHINE}/Attach": Role.WORKER,
        f"/{VECTOR_MACHINE}/Execute": Role.WORKER,
        f"/{VECTOR_MACHINE}/Stage": Role.WORKER,
    },
    "control": {
        **_OF_ALL_PORTS,
        f"/{INSPECTOR}/GetStatus": Role.OBSERVER,
        f"/{INSPECTOR}/ListShards": Role.OBSERVER,
        f"/{INSPECTOR}/ListWorkers": Role.OBSERVER,
        f"/{INSPECTOR}/ListTensors": Role.OBSERVER,
        f"/{INSPECTOR}/GetStaleness": Role.OBSERVER,
        f"/{INSPECTOR}/ListReceipts": Role.OBSERVER,
        f"/{INSPECTOR}/ListEvents": Role.OBSERVER,
        f"/{INSPECTOR}/GetWork": Role.OBSERVER,
        f"/{INSPECTOR}/GetMemory": Role.OBSERVER,
        f"/{INSPECTOR}/Configure": Role.OPERATOR,
        f"/{INSPECTOR}/SaveCheckpoint": Role.OPERATOR,
        f"/{INSPECTOR}/Reset": Role.OPERATOR,
        f"/{INSPECTOR}/Stop": Role.OPERATOR,
        "/grpc.channelz.v1.Channelz/GetTopChannels": Role.OBSERVER,
        "/grpc.channelz.v1.Channelz/GetServers": Role.OBSERVER,
        "/grpc.channelz.v1.Channelz/GetServer": Role.OBSERVER,
        "/grpc.channelz.v1.Channelz/GetServerSockets": Role.OBSERVER,
        "/grpc.channelz.v1.Channelz/GetChannel": Role.OBSERVER,
        "/grpc.channelz.v1.Channelz/GetSubchannel": Role.OBSERVER,
        "/grpc.channelz.v1.Channelz/GetSocket": Role.OBSERVER,
    },
    "metrics": {METRICS: Role.OBSERVER},
    # By a ticket, which only Hello as a worker returns: the row of that call holds for both.
    "lane": {},
    "shared memory": {},
}
_NEEDED: Mapping[str, Role] = {call: role for calls in PORTS.values() for call, role in calls.items()}


def needed_for(call: str) -> Role:
    """Return the least role that may make a call; the highest for a call that the table does not list."""
    return _NEEDED.get(call, Role.OPERATOR)


def role_in(subject: str) -> Role:
    """Return the role that a certificate's subject, in the text form of RFC 2253, names as a unit (OU).

    Without one it is the worker's; of several the least.
    """
    # A comma in a value is escaped, and must not end the value.
    units = re.findall(r"(?:^|[,+])OU=(\w+)(?=[,+]|$)", re.sub(r"\\.", "?", subject))
    return min((role for role in Role if role and role.word in units), default=Role.WORKER)
