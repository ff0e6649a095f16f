"""A virtual clock around a real run: what a cluster would do, event by event, in one thread.

Only time is modelled. The run is that of a server, with its shards, membership, rounds, stalls and pace, called in the
order of virtual time. Workers do what the client does: ask to proceed under protocols that require it, pull, compute,
push.
"""
