"""Sandblaster L-BFGS's worker (Dean et al. 2012, section 4.2): a model, a loss and a data set; no loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pyps_client import leave
from pyps_client.launch import Launch
from pyps_client.lbfgs.gradient import MapDataset, PortionComputation, PortionLoader, checked_length, loss_function
from pyps_client.lbfgs.worker import CoordinatedWork, SandblasterResult, joined
from pyps_client.log import logger
from pyps_client.torch.layout import Layout, plan, several, shareable_buffers, tell_narrowed
from pyps_client.torch.memory import TorchConverter
from pyps_client.torch.parameters import initial_values
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import DataSpec

# Steps are the coordinator's; servers want to know a rule all the same.
_SETTINGS = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})])


def sandblaster(
    model: torch.nn.Module,
    loss: Callable[..., Any] | None,
    dataset: MapDataset,
    *,
    batch_size: int = 256,
    loss_of: Callable[[Any, Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    on_pass: Callable[[int], object] | None = None,
    threads: int | None = 1,
    servers: str | Sequence[str] | None = None,
    launch: Launch | None = None,
) -> SandblasterResult:
    """Compute portions of the data set for a coordinator (`pyps sandblaster`), until it ends the work.

    The model gets the last parameters then.

        pyps_client.sandblaster(model, torch.nn.functional.cross_entropy, dataset)

    `loss(outputs, *targets)` is the mean over a batch of the data set's (input, target) pairs; `loss_of(model, batch)`
    instead of it, with `loss=None`, serves batches of any other shape. Batches are made by `collate`, as in torch's
    DataLoader, and moved to the model's device. `batch_size`: examples of a portion that are computed at once; the
    same for all workers.

    The loss of given parameters must always be the same: call `model.eval()` where there is dropout or batch norm.
    Parameters that need no gradient, and buffers, are left alone: let all workers have the same.

    `on_pass(number)` is called with the parameters of each new pass in the model; it must leave them as they are.
    `threads`: torch's threads, on which the last bits of a sum may depend; None leaves them as they are. More workers
    use more processors.
    `servers` and `launch` are as for RemoteOptimizer. What the loss raises ends this worker; others compute its
    portions. Raises a ConfigurationError for a call that is wrong, or servers that run no Sandblaster, and a
    ConnectionFailed where servers did not answer in time.
    """
    leave.install_where_asked()
    launch = Launch.of(servers, launch)
    compute_loss = loss_function(model, loss, loss_of)
    num_examples = checked_length(dataset)
    if batch_size < 1:
        raise InvalidArgument(f"batch_size is {batch_size}; expected 1 or more.")
    if threads is not None and threads < 1:
        raise InvalidArgument(f"threads is {threads}; expected 1 or more, or None.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgument(
            f"The model ({type(model).__name__}) has no parameters that require a gradient: there is nothing to train."
        )
    layout = plan(model, [{"params": trained}], shard_size=launch.shard_size)
    _warn_of_modes(model)
    _tell_left_alone(model, layout)
    tell_narrowed(layout)
    launch.require_one_process("sandblaster()")
    session = Worker(
        layout.model, _SETTINGS, launch=launch, initial=lambda: initial_values(layout), device=layout.devices
    )
    with joined(session), _threads(threads):
        loader = PortionLoader(dataset, batch_size=batch_size, collate=collate)
        computation = PortionComputation(session, layout, compute_loss, loader)
        try:
            work = CoordinatedWork(
                session,
                data=DataSpec(name="train", num_examples=num_examples, batch_size=batch_size, coordinated=True),
                computation=computation,
                converter=TorchConverter(),
                on_pass=on_pass,
            )
            work.result.message = work.run()
            session.hurry()
            computation.pull()
        finally:
            loader.close()
            computation.close()
        logger.info("the work of run %s is over: %s", session.run_id, work.result.message)
        return work.result


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warn_of_modes(model: torch.nn.Module) -> None:
    """Warn of modules by which the same parameters would not give the same loss."""
    for is_so, why in ((_draws, "draws at random"), (_mixes, "depends on the batch")):
        names = [name or type(module).__name__ for name, module in model.named_modules() if is_so(module)]
        if names:
            logger.warning(
                "%s: in training mode that %s, and the line search would compare losses of different functions; call "
                "model.eval() first",
                *(several(names), why),
            )


def _draws(module: torch.nn.Module) -> bool:
    """Return whether it is a dropout, or has one."""
    chance = module.p if isinstance(module, torch.nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0)
    return module.training and isinstance(chance, int | float) and chance > 0


def _mixes(module: torch.nn.Module) -> bool:
    """Return whether one example's output depends on the batch's others."""
    return module.training and isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def _tell_left_alone(model: torch.nn.Module, layout: Layout) -> None:
    frozen = [name for name, value in model.named_parameters() if id(value) not in layout.names]
    for names, kind in ((frozen, "parameters"), (list(shareable_buffers(model)), "buffers")):
        if names:
            logger.warning(
                "%s (%s) are not trained and not shared: let all workers begin with the same values",
                *(kind, several(names)),
            )
