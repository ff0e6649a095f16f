"""The protocols: one small class each, which decides how pushed gradients become updates.

    decision.py       what a protocol is asked and what it may answer
    base.py           what every protocol answers
    asynchronous.py   async, asgd
    softsync.py       softsync
    barrier.py        hardsync, backup, and what ssp's strict_bsp is
    paced.py          serial, ssp

`pyps.core.aggregation` names them all and finds them by their text.
"""
