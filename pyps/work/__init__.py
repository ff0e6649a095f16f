"""Work on a data set: portions handed out to workers, pass after pass. No gRPC, clock, files or threads.

data_spec.py     what the data set is
portions.py      how it is cut, and which portions nobody has
work_pass.py     one pass: which portion is with whom
crew.py          the workers, where each is and how fast
waiting.py       who is woken when it is worth asking again
work_state.py    all of this together; answers.py, what comes of it
work_queue.py    the queue: one lock around it, and what may be asked
delivery_log.py  who delivered what
"""

from pyps.work.answers import (
    Claim,
    Delivered,
    Delivery,
    Ended,
    LeaseAnswer,
    Leased,
    NothingNow,
    PassDone,
    PassOutcome,
    Progress,
    WorkerProgress,
)
from pyps.work.data_spec import DataSpec
from pyps.work.portions import Portion
from pyps.work.work_queue import WorkQueue

__all__ = [
    "Claim",
    "DataSpec",
    "Delivered",
    "Delivery",
    "Ended",
    "LeaseAnswer",
    "Leased",
    "NothingNow",
    "PassDone",
    "PassOutcome",
    "Portion",
    "Progress",
    "WorkQueue",
    "WorkerProgress",
]
