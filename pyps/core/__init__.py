"""The algorithm: what becomes of a pushed gradient. No gRPC, clock or files; time comes in as an argument.

Read `shard.py` first; it uses the others in this order:

    gradient.py      what a worker pushes, and whether it can be used
    plan.py          a push as every transport describes it: where its parameters go
    roster.py        which workers count now
    ledger.py        which pushes were answered already (exactly-once)
    behaviour.py     what was picked of the following: protocol, policy, schedule, clipping
    staleness.py     what a gradient's age costs it
    clipping.py      what its norm costs it
    aggregation.py   how pushed gradients become updates: the protocols, which are in protocols/
    warmup.py        one protocol for the first updates, then another
    schedule.py      how the learning rate changes, and how the minibatch grows
    verdict.py       what was decided, as a receipt (receipt.py)
    update.py        one update of the parameters
    rules.py         the rule of an update: SGD, momentum, Adagrad, Adam and their kin
    recorder.py      what happens to a shard, and who is told of it
    shard_state.py   all that a shard is, for checkpoints; what waits in it, and who is called when a version is reached
    arrays.py        float32 arrays as the kernels like them
    spec.py          behaviours picked by a line of text

Beside the shards, for the whole server: `membership.py` (which workers live; `member.py` is one of them and
keeps the processes of a replica together), `registry.py` (what their coming and going asks for), `election.py` (who
initialises), `gate.py` (which calls for a step wait) and `pacing.py` (who may begin one), `effects.py` (what any of
them asks for), `bounds.py` (how far workers may set what moves the parameters), `whole_model.py` (one mutex around
all shards), `vectors/` (vectors beside the parameters, and programs on them).
"""
