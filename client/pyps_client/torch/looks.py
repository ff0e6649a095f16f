"""Looks through gradients for what must not be sent: NaN, infinity, and what the wire's type cannot hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pyps_wire.errors import BadRequest
from pyps_wire.partition import Model


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """True when no element is NaN or infinite; one pass over memory, on the tensors' own devices."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if len(on_host) == len(tensors):
        # A finite sum has finite terms only. One that is not may have overflowed, so then every term is looked at.
        return all(math.isfinite(_total(tensor)) or bool(tensor.isfinite().all()) for tensor in tensors)
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            elsewhere.setdefault(tensor.device, []).append(tensor.sum().float())
    if all_finite(on_host) and all(bool(torch.stack(sums).sum().isfinite()) for sums in elsewhere.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def surely_fit(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """True when one pass showed that all elements are finite, and still so in `dtype`; False leaves it open.

    Only float32 on the host is looked at so.
    """
    # The square of an element that is too large exceeds this by itself, however the sum is rounded: all terms are
    # positive. Float32 squares of what bfloat16 or float32 cannot hold are infinite.
    bound = torch.finfo(dtype).max ** 2 if dtype == torch.float16 else math.inf
    return all(_has_squares(tensor) and _total(tensor) < bound for tensor in tensors)


def all_fit(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """True when all elements are finite, and still so in `dtype`, which only the extremes can tell."""
    return all(
        bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all()) for tensor in tensors if tensor.numel()
    )


def first_non_finite(
    model: Model, gradients: Sequence[torch.Tensor | None]
) -> tuple[str, tuple[int, ...], float] | None:
    """Where the first NaN or infinity is among a model's gradients: tensor, index, value."""
    for tensor, gradient in zip(model.tensors, gradients, strict=True):
        if gradient is not None and not all_finite([gradient]):
            index = tuple(gradient.isfinite().logical_not().nonzero()[0].tolist())
            return tensor.name, index, float(gradient[index])
    return None


def refuse_sparse(model: Model, gradients: Sequence[torch.Tensor | None]) -> None:
    """Raises BadRequest for a gradient that is not dense, naming the tensor."""
    for tensor, gradient in zip(model.tensors, gradients, strict=True):
        if gradient is not None and gradient.layout != torch.strided:
            raise BadRequest(
                f"The gradient of {tensor.name!r} has layout {gradient.layout}; servers take dense "
                f"gradients only: make the layer with sparse=False."
            )


def _total(tensor: torch.Tensor) -> float:
    """The sum of a tensor's squares where that takes no more than its sum, or else the sum."""
    if _has_squares(tensor):
        flat = tensor.view(-1)
        return torch.dot(flat, flat).item()
    return tensor.sum().item()


def _has_squares(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
