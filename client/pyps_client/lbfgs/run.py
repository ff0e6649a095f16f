"""Sandblaster L-BFGS's worker (Dean et al. 2012, section 4.2): a model, a loss and a data set; no loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pyps_client import leave
from pyps_client.launch import Launch
from pyps_client.lbfgs.gradient import MapDataset, PortionComputation, PortionLoader, checked_length, loss_function
from pyps_client.lbfgs.worker import CoordinatedWork, SandblasterResult
from pyps_client.log import logger
from pyps_client.replica.group import ALONE
from pyps_client.torch.embedding import require_no_tables
from pyps_client.torch.joining import Joining
from pyps_client.torch.layout import several, shareable_buffers, warn_of_float64
from pyps_client.torch.memory import TorchConverter
from pyps_client.torch.rules import ServersRule
from pyps_client.torch.schedule import Settings
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import DataSpec

if TYPE_CHECKING:
    from pyps_client.replica.processes import Replica


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
    replica: Replica | None = None,
    servers: str | Sequence[str] | None = None,
    launch: Launch | None = None,
) -> SandblasterResult:
    """Compute portions of the data set for a coordinator (`pyps sandblaster`), until it ends the work.

    Then the model gets the last parameters.

        pyps_client.sandblaster(model, torch.nn.functional.cross_entropy, dataset)

    `loss(outputs, *targets)`: the mean over a batch of the data set's (input, target) pairs. For batches of another
    shape, give `loss_of(model, batch)` and `loss=None`. `collate` makes batches, as in torch's DataLoader; they are
    moved to the model's device. `batch_size`: examples that are computed at once; the same for all workers.

    The loss of given parameters must always be the same: call `model.eval()` if there is dropout or batch norm.
    Parameters that need no gradient, and buffers, are not changed: they must be the same in all workers.

    `on_pass(number)` is called with the parameters of each new pass in the model, which it must not change.
    `threads`: the number of torch's threads, on which the last bits of a sum may depend; None does not set it. To use
    more processors, start more workers. `replica`, `servers` and `launch` are as for RemoteOptimizer; the processes of
    a replica give the same data set, and their losses are of the whole model, equal in all of them.

    An error of the loss ends this worker; others compute its portions. Raises a ConfigurationError for wrong arguments
    or servers that do not run Sandblaster, and a ConnectionFailed if servers do not answer in time.
    """
    leave.install_where_asked()
    launch = Launch.of(servers, launch)
    require_no_tables(model, user="sandblaster()")
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
    # The coordinator makes the steps, but a run needs a rule.
    rule = ServersRule([{"params": trained}], "sgd", {"learning_rate": 1.0})
    joined = Joining(model, rule, launch, Settings(), replica or ALONE)
    _warn(model)
    joined.join()
    warn_of_float64(joined.layout)
    with joined.session as session:
        if session.terms.protocol.partition(":")[0] != "sandblaster":
            raise InvalidArgument(
                f"The servers of run {session.run_id!r} run the protocol {session.terms.protocol!r}; portions for a "
                "coordinator need servers started with --protocol sandblaster, as `pyps sandblaster` starts them."
            )
        loader = PortionLoader(dataset, batch_size=batch_size, collate=collate)
        computation = PortionComputation(joined, compute_loss, loader)
        threads_before = torch.get_num_threads()
        torch.set_num_threads(threads or threads_before)
        try:
            work = CoordinatedWork(
                session,
                data=DataSpec(name="train", num_examples=num_examples, batch_size=batch_size, coordinated=True),
                computation=computation,
                converter=TorchConverter(),
                on_pass=on_pass,
                peers=joined.replica,
            )
            work.result.message = work.run()
            session.hurry()
            computation.pull()
        except KeyboardInterrupt:
            logger.info("interrupted: leaving run %s; its portions go to other workers", session.run_id)
            raise
        finally:
            torch.set_num_threads(threads_before)
            loader.close()
            computation.close()
        logger.info("the work of run %s is over: %s", session.run_id, work.result.message)
        return work.result


def _warn(model: torch.nn.Module) -> None:
    """Warn of modules that make the loss differ from call to call, and of values that workers do not share."""
    training = [(name, module) for name, module in model.named_modules() if module.training]
    changing = "in training mode that %s, and the line search would compare losses of different functions; call "
    changing += "model.eval() first"
    left_alone = "the %s are not trained and not shared: let all workers begin with the same values"
    for names, text in (
        ([name or type(module).__name__ for name, module in training if _draws(module)], changing % "draws at random"),
        (
            [name or type(module).__name__ for name, module in training if isinstance(module, _BatchNorm)],
            changing % "depends on the batch",
        ),
        (
            [name for name, value in model.named_parameters() if not value.requires_grad],
            left_alone % "parameters",
        ),
        (list(shareable_buffers(model)), left_alone % "buffers"),
    ):
        if names:
            logger.warning("%s: %s", several(names), text)


def _draws(module: torch.nn.Module) -> bool:
    """Return whether a module is or has a dropout."""
    chance = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0)
    return isinstance(chance, int | float) and chance > 0
