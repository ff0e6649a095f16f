"""A virtual clock around a real run: what a cluster would do, event by event, in one thread.

Only time is modelled: the run is a server's. Workers do what the client does: they ask to proceed under protocols that
require it, pull, compute, and push.
"""
