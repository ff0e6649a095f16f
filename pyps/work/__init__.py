"""Work on a data set: portions handed out to workers, pass after pass. No gRPC, clock, files or threads.

portions.py           what the data set is, how it is cut, and which portions nobody has
workers.py            where each worker is, what it holds, how fast it is, and which of their calls wait
pass_queue.py         a pass, and what both kinds of queue share
plain_queue.py        epochs without a coordinator
coordinated_queue.py  passes that a coordinator begins: claims, backup copies, stages
work_queue.py         the queue: one lock around it, and what may be asked; answers.py, what it answers
"""

from pyps.work.answers import Ended, LeaseAnswer, Leased, NothingNow, PassDone, PassOutcome, Progress, Verdict
from pyps.work.portions import DataSpec, Portion
from pyps.work.work_queue import WorkQueue

__all__ = [
    "DataSpec",
    "Ended",
    "LeaseAnswer",
    "Leased",
    "NothingNow",
    "PassDone",
    "PassOutcome",
    "Portion",
    "Progress",
    "Verdict",
    "WorkQueue",
]
