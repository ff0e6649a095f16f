"""What of a model's state dict the servers hold, and what stays with each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pyps_client.log import logger
from pyps_client.torch.layout import Layout, plain_name, shareable_buffers


def whole_state(module: torch.nn.Module, layout: Layout, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's state dict with the servers' values where they hold one, and this worker's own elsewhere.

    By the model's original names, without what torch.compile adds; a tied tensor stands under each of its
    names. What servers hold is float32, whatever the model's type; all is on the CPU.
    """
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        shared = layout.names.get(id(value))
        if shared is not None:
            state[plain_name(name)] = held[shared]
        elif isinstance(value, torch.Tensor):
            state[plain_name(name)] = value.detach().to("cpu", copy=True)
    # After the model's own, what other processes of a replica hold.
    return state | {name: values for name, values in held.items() if name not in state}


def tell_unshared(module: torch.nn.Module, layout: Layout) -> None:
    """Says what a model saves that is not the run's: parameters that are not the optimizer's, buffers."""
    parameters = [name for name, value in module.named_parameters() if id(value) not in layout.names]
    if layout.kinds is None:
        _tell(list(shareable_buffers(module)), "buffer", "buffers='average' shares them")
    _tell(parameters, "parameter", "give the optimizer all parameters, frozen ones too, to share them")


def tell_narrowed(layout: Layout) -> None:
    """Says where the model's precision is more than the servers'."""
    tensors = zip(layout.model.tensors, layout.parameters, strict=True)
    wide = [tensor.name for tensor, parameter in tensors if parameter.dtype == torch.float64]
    if wide:
        logger.warning(
            "%s%s float64, but servers hold and update float32: the model's numbers are float32's after each pull.",
            *(wide[0], f" and {len(wide) - 1} more are" if len(wide) > 1 else " is"),
        )


def _tell(names: Sequence[str], kind: str, remedy: str) -> None:
    if not names:
        return
    others = len(names) - 1
    if others:
        subject = f"{plain_name(names[0])} and {others} other {kind}{'s' if others > 1 else ''} are"
    else:
        subject = f"The {kind} {plain_name(names[0])} is"
    logger.warning(
        "%s not shared: each worker keeps its own, and pyps export does not contain %s (%s).",
        *(subject, "them" if others else "it", remedy if others else remedy.replace("them", "it")),
    )
