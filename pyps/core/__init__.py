"""The algorithm: what becomes of a pushed gradient. No gRPC, clock or files; time comes in as an argument.

Read `shard.py` first; it uses the others in this order:

    gradient.py      what a worker pushes, and whether it can be used
    plan.py          a push as every transport describes it: where its parameters go
    roster.py        which workers count now
    ledger.py        which pushes were answered already (exactly-once)
    behaviour.py     what was picked of the following: protocol, policy, schedule, clipping
    staleness.py     what a gradient's age costs it
    protocols/       how pushed gradients become updates
    warmup.py        one protocol for the first updates, then another
    schedule.py      how the learning rate changes, and how the minibatch grows
    verdict.py       what was decided, as a receipt (receipt.py)
    update.py        one update of the parameters
    rules.py         the rule of an update: SGD, momentum, Adagrad, Adam and their kin
    recorder.py      what happens to a shard, and who is told of it
    store.py         what rounds, services and storage know of a shard: another kind of store may stand beside it
    arrays.py        float32 arrays as the kernels like them
    spec.py          behaviours picked by a line of text

For the whole server: `membership.py` (who lives, is active and holds others up; `replicas.py`: the lives of workers of
several processes), `election.py` (who initialises), `pacing.py` (who may begin a step, and the calls that wait for it),
`effects.py` (what a change asks for), `bounds.py` (how far workers may set what moves the parameters), `vectors/`
(vectors on the shards, and programs on them).
"""
