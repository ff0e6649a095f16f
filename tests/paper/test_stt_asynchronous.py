"""The asynchronous mode of the STT (DeepSpeech) documentation, chapter "Parallel Optimization"."""

from __future__ import annotations

import numpy as np

from shards import make_shard, pull, push

W = np.array([0.5, -1.25, 3.0], np.float32)
# Exact in float32 at learning rate 1, so that the order of two additions cannot show.
GRADIENT_N = np.array([0.25, 0.5, -1.0], np.float32)
GRADIENT_N_PLUS_1 = np.array([-0.125, 1.0, 0.5], np.float32)


def test_two_workers_that_pulled_the_same_parameters_both_move_them() -> None:
    """The result is W + D_{n+1}(W) + D_n(W): the second is evaluated "at the wrong location"."""
    shard = make_shard(W)
    push(shard, GRADIENT_N, worker_id="gpu-n", base_version=0)
    late = push(shard, GRADIENT_N_PLUS_1, worker_id="gpu-n+1", base_version=0)
    assert late.staleness == 1
    d_n, d_n_plus_1 = -GRADIENT_N, -GRADIENT_N_PLUS_1
    assert pull(shard)[1].tolist() == (W + d_n_plus_1 + d_n).tolist()
