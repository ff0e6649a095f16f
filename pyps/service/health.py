"""Whether the server serves: the one service that needs no token, so that nothing anybody asks of it may add up."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps.service.calls import Context
from pyps_wire.errors import LimitExceeded

# Watches at once, and how long each lasts: orchestrators check, and who watches for longer asks again.
WATCHES_MAX = 64
WATCH_SECONDS = 600.0


class Health(health_pb2_grpc.HealthServicer):
    """The standard service. For the event loop.

    grpcio's own keeps a watch for ever, also of a service that nobody has; and one watcher who takes no message holds
    up all others, and the server's end.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        # Another after each change.
        self._changed = asyncio.Event()
        self._watches_left = WATCHES_MAX

    def set(self, status: int, *services: str) -> None:
        """Tells of these services that they have that status."""
        self._statuses |= dict.fromkeys(services, status)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Tells a service's status."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    # The type stubs do not know this call yet.
    async def List(self, request: Any, context: Context) -> Any:
        """Tells every service's status."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Tells a service's status and each change of it, for a while."""
        if not self._watches_left:
            raise LimitExceeded(f"{WATCHES_MAX} watches of this server's health are open: check it, or try again later")
        self._watches_left -= 1
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                await self._tell_each(request.service, context)
        except TimeoutError:
            return
        finally:
            self._watches_left += 1

    async def _tell_each(self, service: str, context: Context) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
            told = status
            if service not in self._statuses:
                # No service comes here later.
                return
            await changed.wait()
