"""Work on a data set: portions given to workers, pass after pass. No gRPC, clock, files or threads.

portions.py    the data set, its division into portions, and those that no worker has
waiting.py     calls that wait
work_queue.py  the queue: passes, leases and deliveries; answers.py, its answers
"""

from pyps.work.answers import Ended, LeaseAnswer, Leased, NothingNow, PassDone, Verdict
from pyps.work.portions import DataSpec, Portion
from pyps.work.work_queue import WorkQueue

__all__ = [
    "DataSpec",
    "Ended",
    "LeaseAnswer",
    "Leased",
    "NothingNow",
    "PassDone",
    "Portion",
    "Verdict",
    "WorkQueue",
]
