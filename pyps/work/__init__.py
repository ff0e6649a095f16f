"""Work on a data set: portions given to workers, pass after pass. No gRPC, clock, files or threads.

portions.py    the data set, its division into portions, and those that no worker has
waiting.py     calls that wait
passes.py      a pass: its portions, their leases, and their workers
work_queue.py  the queue of a run: passes one after the other, leases and deliveries
"""

from pyps.work.portions import DataSpec, Portion
from pyps.work.work_queue import WorkQueue, lease_reply

__all__ = ["DataSpec", "Portion", "WorkQueue", "lease_reply"]
