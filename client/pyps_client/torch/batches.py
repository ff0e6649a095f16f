"""A batch's way through a model to its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pyps_wire.errors import BadRequest


def loss_function(
    model: torch.nn.Module,
    loss: Callable[..., Any] | None,
    loss_of: Callable[[Any, Any], Any] | None,
) -> Callable[[Any], Any]:
    """What computes a batch's loss, from either of the two that a user may give."""
    if (loss is None) == (loss_of is None):
        given = "neither" if loss is None else "both"
        raise BadRequest(
            f"{given.capitalize()} of loss and loss_of were given; expected one: loss(outputs, targets), or "
            "loss_of(model, batch) with loss=None."
        )
    if not callable(loss or loss_of):
        raise BadRequest(f"The loss is a {type(loss or loss_of).__name__}; expected a function.")
    if loss_of is not None:
        return lambda batch: loss_of(model, to_device(batch, device_of(model)))
    assert loss is not None

    def of_pair(batch: Any) -> Any:
        if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or len(batch) < 2:
            raise BadRequest(
                f"The data set gives batches that are a {type(batch).__name__}; expected (input, target) pairs: give "
                "loss_of=, a function of the model and the batch, for any other."
            )
        inputs, *targets = batch
        outputs = model(to_device(inputs, device_of(model)))
        # The last layer may lie on another device than the first.
        device = outputs.device if isinstance(outputs, torch.Tensor) else device_of(model)
        return loss(outputs, *to_device(targets, device))

    return of_pair


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model takes its input: the device of its first parameter."""
    return next(model.parameters()).device


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
