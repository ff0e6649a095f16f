"""The protocols: one small class each, which decides how pushed gradients become updates.

    base.py           what a protocol is asked, what it may answer, and what every protocol is
    asynchronous.py   async, asgd
    softsync.py       softsync
    barrier.py        hardsync, backup, and what ssp's strict_bsp is
    paced.py          serial, ssp, sandblaster

`pyps.core.aggregation` names them all and finds them by their text.
"""
