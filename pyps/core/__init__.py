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
    published.py     the copy of the parameters that workers follow which pull in few bits
    recorder.py      the events of a shard, for an update log
    store.py         the interface of a shard to rounds, services, storage and the simulator
    arrays.py        float32 arrays for the kernels
    spec.py          settings as a line of text

For the whole server:

    membership.py    which workers live, are active, or delay others (replicas.py: workers of several processes)
    election.py      which worker initialises
    pacing.py        which worker may begin a step, and the calls that wait for it
    effects.py       the effects of an event
    bounds.py        limits of rates, momenta and pushes
    vectors/         vectors on the shards, and programs on them
"""
