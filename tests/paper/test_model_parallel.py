"""Model parallelism: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 3.

The invariants P1 to P3 of the algorithm notes, section 2.6, as experiments/model_parallel.py proves them of networks,
here of small ones. Between real processes they are in tests/integration.
"""

from experiments import model_parallel as experiment
from experiments.model_parallel_dense import Dense
from experiments.model_parallel_patches import Patches


def test_the_networks_of_the_experiment_prove_exact_on_a_few_machines():
    small = {
        "dense": Dense((20, 16, 12, 30), minibatch=4),
        "local": Patches(image=(12, 12), maps=2, num_layers=3, window=5, minibatch=4),
    }

    for name, net in small.items():
        proof = experiment.prove(name, net, 4)
        assert 0 < proof.deviation <= 1e-12, name
        assert proof.deviation < proof.deviation_float32 <= experiment.DEVIATION_MAX, name
        assert (proof.repeated, proof.own_shards) == (0, True), name
    assert experiment.stages_are_identical(small["dense"], 3)
