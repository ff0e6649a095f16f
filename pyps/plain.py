"""Gradients and receipts as plain JSON values, for files: checkpoints and update logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pyps.core.aggregation import Contribution
from pyps.core.gradient import Extent, Gradient
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.staleness import Weighing


def receipt_to_plain(receipt: Receipt) -> dict[str, Any]:
    """The receipt's fields; the enumerations as their numbers."""
    fields = {field.name: getattr(receipt, field.name) for field in dataclasses.fields(receipt)}
    return {**fields, "outcome": int(receipt.outcome), "reason": int(receipt.reason)}


def receipt_from_plain(plain: Mapping[str, Any]) -> Receipt:
    """The receipt that `receipt_to_plain` wrote."""
    return Receipt(**{**plain, "outcome": Outcome(plain["outcome"]), "reason": Reason(plain["reason"])})


def gradient_to_plain(gradient: Gradient) -> dict[str, Any]:
    """The gradient's fields without its payload, which is kept beside them in bytes."""
    names = (field.name for field in dataclasses.fields(gradient) if field.name != "payload")
    return {name: getattr(gradient, name) for name in names}


def gradient_from_plain(plain: Mapping[str, Any], payload: bytes) -> Gradient:
    """The gradient that `gradient_to_plain` wrote, with its payload."""
    extents = tuple(Extent(*extent) for extent in plain["extents"])
    return Gradient(**{**plain, "extents": extents, "payload": payload})


def contribution_to_plain(contribution: Contribution) -> dict[str, Any]:
    """A waiting gradient without its payload, which is kept beside it in bytes; their number is told."""
    return {
        "gradient": gradient_to_plain(contribution.gradient),
        "payload_bytes": memoryview(contribution.gradient.payload).nbytes,
        "staleness": contribution.staleness,
        "weighing": dataclasses.asdict(contribution.weighing),
    }


def contribution_from_plain(plain: Mapping[str, Any], payload: bytes) -> Contribution:
    """The waiting gradient that `contribution_to_plain` wrote, with its payload."""
    gradient = gradient_from_plain(plain["gradient"], payload)
    return Contribution(gradient, plain["staleness"], Weighing(**plain["weighing"]))


def split_payloads(plains: Sequence[Mapping[str, Any]], payloads: bytes) -> list[bytes]:
    """The payloads of waiting gradients that were laid end to end; ValueError where they are not all there."""
    ends = list(accumulate(plain["payload_bytes"] for plain in plains))
    if (ends[-1] if ends else 0) != len(payloads):
        raise ValueError(f"{len(payloads)} bytes of waiting gradients, expected {ends[-1] if ends else 0}")
    return [payloads[end - plain["payload_bytes"] : end] for plain, end in zip(plains, ends, strict=True)]
