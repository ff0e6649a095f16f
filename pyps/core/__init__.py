"""The algorithm: how pushed gradients become updates. No gRPC, clock or files; time is an argument.

Read `shard.py` first; it uses the others in this order:

    gradient.py      what a worker pushes, whether it can be used, and where the reply goes
    roster.py        which workers are active now
    ledger.py        receipts of earlier pushes (exactly-once)
    behaviour.py     the settings of the following: protocol, policy, schedule, clipping
    staleness.py     how the age of a gradient reduces its effect
    protocols/       how pushed gradients become updates
    warmup.py        one protocol for the first updates, then another
    schedule.py      how the learning rate changes, and how the minibatch grows
    verdict.py       receipts of decisions and refusals (receipt.py)
    update.py        one update of the parameters
    rules.py         the rule of an update: SGD, momentum, Adagrad, Adam and their kin
    recorder.py      the events of a shard, for an update log
    store.py         what rounds, services and storage know of a shard, so that there may be other kinds of stores
    arrays.py        float32 arrays as the kernels like them
    spec.py          behaviours picked by a line of text

For the whole server: `membership.py` (who lives, is active and holds others up; `replicas.py`: the lives of workers of
several processes), `election.py` (who initialises), `pacing.py` (who may begin a step, and the calls that wait for it),
`effects.py` (what a change requires), `bounds.py` (how far workers may set what moves the parameters), `vectors/`
(vectors on the shards, and programs on them).
"""
