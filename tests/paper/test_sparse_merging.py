"""experiments/sparse_merging.py: why rounds divide each number of a sparse gradient by the workers that sent it."""

from experiments import sparse_merging as experiment
from experiments.digits_network import load


def test_after_a_few_rounds_the_loss_is_less_where_each_number_is_divided_by_its_senders(monkeypatch):
    monkeypatch.setattr(experiment, "ROUNDS", 6)
    digits = load()
    losses = {
        merge: experiment.final_loss(digits, codec="topk:ratio=0.01", merge=merge, rate=1.0, seed=0)
        for merge in ("senders", "all")
    }
    assert losses["senders"] < 0.7 * losses["all"]
