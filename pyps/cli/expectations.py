"""What the servers of a job are told of a worker of its own that has ended for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pyps.cli.control import Control, inherited_token
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import PypsError

# A server that does not answer is about to end, or to be noticed.
SECONDS = 5.0


class Expectations:
    """What the servers were told, one number for each."""

    def __init__(self, expected_workers: int):
        self._expected_workers = expected_workers
        self._token = inherited_token()
        # Workers that each server never saw, by its control address.
        self._never_came: Counter[str] = Counter()

    def lower(self, worker_id: str, addresses: Sequence[str]) -> bool:
        """Tells the servers that never saw the worker to expect one fewer; True where it never came to any of them.

        A server that did see it, and takes it for alive, is told that it is gone: it would wait for its lease. A worker
        under another name than the job gave it looks as if it never came; then a first round may begin without one that
        is slow to come. A replica was seen with any of its processes, and counts as one worker.
        """
        told = {self._lower(worker_id, address) for address in addresses}
        # One that came to some servers did join; what the others expect is not for people to know.
        return True in told and False not in told

    def _lower(self, worker_id: str, address: str) -> bool | None:
        """True where the server was told, False where it had seen the worker, None where it does not answer."""
        try:
            with Control(address, token=self._token) as control:
                known = control.call("ListWorkers", pb.ListWorkersRequest(), timeout_seconds=SECONDS)
                if own := [worker for worker in known.workers if worker_id == (worker.replica or worker.worker_id)]:
                    run_id = control.call("GetStatus", pb.GetStatusRequest(), timeout_seconds=SECONDS).run_id
                    for worker in own:
                        if worker.state == "alive":
                            control.take_off(worker, run_id, timeout_seconds=SECONDS)
                    return False
                self._never_came[address] += 1
                expected = max(0, self._expected_workers - self._never_came[address])
                request = pb.ConfigureRequest(expected_workers=expected)
                control.call("Configure", request, timeout_seconds=SECONDS)
        except PypsError:
            return None
        return True
