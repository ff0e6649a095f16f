"""The algorithm: what becomes of a pushed gradient. No gRPC, clock or files; time comes in as an argument.

Read `shard.py` first; it uses the others in this order:

    gradient.py      what a worker pushes
    ledger.py        which pushes were answered already (exactly-once)
    receipt.py       what a push is answered with
    staleness.py     what a gradient's age costs it
    aggregation.py   how pushed gradients become updates
    update.py        one update of the parameters
    update_rules.py  the arithmetic of an update: SGD, Adagrad
    recorder.py      who is told of every push and pull of a shard
    arrays.py        float32 arrays as the kernels like them

Beside the shards, for the whole server: `membership.py` (which workers live), `election.py` (who
initialises).
"""
