"""Work on a data set: portions given to workers, pass after pass. No gRPC, clock, files or threads."""

from pyps.work.portions import DataSpec, Portion
from pyps.work.work_queue import WorkQueue, lease_reply

__all__ = ["DataSpec", "Portion", "WorkQueue", "lease_reply"]
