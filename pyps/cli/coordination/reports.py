"""What server 0 tells of the run at its control port."""

from __future__ import annotations

import threading
from typing import Any

from pyps.cli.control import Control
from pyps.cli.coordination.link import Link
from pyps_client.retry import RetryPolicy, Wait
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import ServerUnavailable, WaitTimedOut
from pyps_wire.work_pb2 import GetWorkRequest, WorkProgress


class Reports:
    """Reads server 0, and waits for it where it is gone for a while.

    Raises ServerUnavailable once it was gone for the launch's `loss_wait_seconds`.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def work(self) -> WorkProgress:
        """Where the work stands."""
        work: WorkProgress = self._ask("GetWork", GetWorkRequest())
        return work

    def num_workers(self) -> int:
        """Workers that are alive."""
        status: pb.Status = self._ask("GetStatus", pb.GetStatusRequest())
        return status.workers_alive

    def _ask(self, method: str, request: Any) -> Any:
        launch = self._link.launch
        policy = RetryPolicy(launch.loss_wait_seconds, "loss_wait_seconds")
        wait: Wait | None = None
        while True:
            try:
                # Made anew for each try: a server that comes back may have another control port.
                with Control(launch.servers[0], token=launch.token) as control:
                    reply = control.call(method, request)
            except (ServerUnavailable, WaitTimedOut) as error:
                wait = wait or policy.begin(self._link.name(0), stop=threading.Event())
                wait.pause(str(error))
                continue
            if wait is not None:
                wait.end()
            return reply
