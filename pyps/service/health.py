"""The health service: the only one without a token, so its calls are bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps.service.calls import Context
from pyps_wire.errors import LimitExceeded

# How many watches may be open, and how long each lasts: orchestrators check, and other clients watch again.
WATCHES_MAX = 64
WATCH_SECONDS = 600.0


class Health(health_pb2_grpc.HealthServicer):
    """The standard service. For the event loop.

    grpcio's own servicer keeps a watch for ever, also of an unknown service, and a watcher that takes no message delays
    all others and the server's end.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        # Replaced after each change.
        self._changed = asyncio.Event()
        self._watches_left = WATCHES_MAX

    def set(self, status: int, *services: str) -> None:
        self._statuses |= dict.fromkeys(services, status)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    # The type stubs do not know this call yet.
    async def List(self, request: Any, context: Context) -> Any:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send a service's status and each change of it, for a while."""
        if not self._watches_left:
            raise LimitExceeded(f"{WATCHES_MAX} watches of this server's health are open: check it, or try again later")
        self._watches_left -= 1
        sent = None
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                while True:
                    changed = self._changed
                    status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                    if status != sent:
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                    if request.service not in self._statuses:
                        # No service is added later.
                        return
                    await changed.wait()
        except TimeoutError:
            return
        finally:
            self._watches_left += 1
