"""Stands in for the `_common` that the peers' scripts share: hands theirs through, and wraps what is timed.

`peers.py` copies the scripts into a folder in which their own `_common` is called `_common_original` and this file
`_common`. Under it a peer's worker rewrites its whole gradient in each round and ends with the new parameters in
torch parameters of its own, as a worker of ours does; and the peer's processes keep to the cores, and to the ends of
the link, that the environment names. It runs under the peer's own Python: no package of ours, no numpy unless theirs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import _common_original as original
import network
from _common_original import *  # noqa: F403 - the peers' scripts take everything from here.
from measure import pin, pinned_cores

_make_grads, _timed, _cpu_s = original.make_grads, original.timed, original.cpu_s
_run_server, _run_worker = original._server, original._worker
_gradients: list[Any] = []
_pinned: list[int] = []


def make_grads(n: int, k: int) -> list[Any]:
    """Their gradients, remembered, to be rewritten in place."""
    _gradients.extend(_make_grads(n, k))
    return _gradients


def timed(step: Callable[[], Any], *rest: Any) -> Any:
    """Their timing, of a round that is ours."""
    if "PYPS_BENCH_PINNED" in os.environ:
        pin(os.getpid(), pinned_cores()[1])
    whole_step = _tensorflow_step(step) if "tensorflow" in sys.modules else _torch_step(step)
    return _timed(whole_step, *rest)


def cpu_s(pid: int) -> float:
    """Their reading of the server's CPU time, which comes just before the rounds: by now all its threads are there."""
    if "PYPS_BENCH_PINNED" in os.environ and not _pinned:
        pin(pid, pinned_cores()[0])
        _pinned.append(pid)
    return float(_cpu_s(pid))


def server_process(*arguments: Any) -> None:
    """Their server's process, at its end of the link."""
    _enter("PYPS_BENCH_SERVER_NAMESPACE")
    _run_server(*arguments)


def worker_process(*arguments: Any) -> None:
    """Their worker's process, at its end of the link."""
    _enter("PYPS_BENCH_WORKER_NAMESPACE")
    _run_worker(*arguments)


def _enter(variable: str) -> None:
    if namespace := os.environ.get(variable):
        network.enter(namespace)


def _torch_step(step: Callable[[], Any]) -> Callable[[], Any]:
    import numpy as np
    import torch

    sources = [gradient.copy() for gradient in _gradients]
    parameters = [torch.nn.Parameter(torch.zeros(len(gradient))) for gradient in _gradients]

    def whole_step() -> Any:
        for gradient, source in zip(_gradients, sources, strict=True):
            np.copyto(gradient, source)
        pulled = step()
        with torch.no_grad():
            for parameter, values in zip(parameters, pulled, strict=True):
                if not isinstance(values, torch.Tensor):
                    values = torch.frombuffer(values, dtype=torch.float32)
                parameter.copy_(values)
        return pulled

    return whole_step


def _tensorflow_step(step: Callable[[], Any]) -> Callable[[], Any]:
    """TensorFlow keeps gradient and parameters in variables of its own on the worker, and so does its round here.

    Feeding and fetching them would send everything through gRPC once more. So its gradient is rewritten by an op of its
    graph, within the same call, and its parameters end in its own variables: less than what the others do.
    """
    import tensorflow as tf

    theirs = inspect.getclosurevars(step).nonlocals
    session, both, count = theirs["sess"], theirs["both"], theirs["n"]
    with session.graph.as_default():
        nothing = tf.compat.v1.placeholder(tf.float32, [])
        gradients = [v for v in tf.compat.v1.global_variables() if v.name.startswith("g")]
        rewrites = []
        for gradient in gradients:
            with tf.device(gradient.device):
                rewrites.append(gradient.assign(gradient.read_value() + nothing))
        rewrite = tf.group(*rewrites)

    def whole_step() -> None:
        session.run([both, rewrite], {nothing: 0.0})
        count[0] += 1

    return whole_step


original.make_grads, original.timed, original.cpu_s = make_grads, timed, cpu_s
original._server, original._worker = server_process, worker_process
