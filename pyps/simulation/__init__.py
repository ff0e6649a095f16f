"""A virtual clock around the real core: what a cluster would do, event by event, in one thread.

Only time is modelled. Shards, protocols, pacers, membership and kernels are those of a server, called in the
order of virtual time; workers do what the client does: ask to proceed where told to, pull, compute, push.
"""
