"""The place in the data: it goes to the servers with each push, and comes back to whoever takes the worker's place."""

from __future__ import annotations

import copy
import json
import weakref
from typing import Any

from pyps_client.log import logger
from pyps_wire.errors import InvalidArgument

POSITION_BYTES_MAX = 64 * 2**10

# The open optimizers and clients of this process, and which one's steps count.
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
_counted: weakref.ref[Any] | None = None
# The sampler that drew last, of whose examples a step is; None where none ever did, which a step reads first.
newest: weakref.ref[Any] | None = None


def add(optimizer: Any) -> None:
    """Note an optimizer or client, whose `restored_position` samplers go on from."""
    _optimizers.add(optimizer)


def discard(optimizer: Any) -> None:
    """Forget an optimizer that closes."""
    global _counted
    _optimizers.discard(optimizer)
    if _counted is not None and _counted() is optimizer:
        _counted = None


def drew(sampler: Any) -> None:
    """Note that a sampler gave out an example."""
    global newest
    if newest is None or newest() is not sampler:
        newest = weakref.ref(sampler, _gone)


def _gone(sampler: weakref.ref[Any]) -> None:
    global newest
    if newest is sampler:
        newest = None


def after_step(optimizer: Any) -> bytes:
    """Count a step; return the position to send: the one that the script has set, else that of the samplers."""
    global _counted
    if _counted is None or _counted() is None:
        _counted = weakref.ref(optimizer)
    sampler = None if newest is None else newest()
    if sampler is not None and _counted() is optimizer:
        sampler.stepped()
    return _position(optimizer, sampler)


def before_step(optimizer: Any) -> bytes:
    """Return the position after a step that is to come."""
    sampler = None if newest is None else copy.copy(newest())
    if sampler is not None and (_counted is None or _counted() in (None, optimizer)):
        sampler.stepped()
    return _position(optimizer, sampler)


def _position(optimizer: Any, sampler: Any) -> bytes:
    position = optimizer.data_position
    if position is None:
        return b"" if sampler is None else json.dumps({sampler.key: sampler.place()}).encode()
    if not isinstance(position, bytes) or len(position) > POSITION_BYTES_MAX:
        what = f"{len(position)} bytes" if isinstance(position, bytes) else f"a {type(position).__name__}"
        raise InvalidArgument(f"data_position is {what}; expected None or bytes, {POSITION_BYTES_MAX} at most.")
    return position


def restored(key: str) -> list[int] | None:
    """Return the place at which a sampler of that key goes on; joins the run. None where no optimizer is made yet."""
    for data in [optimizer.restored_position for optimizer in list(_optimizers)]:
        try:
            places = json.loads(data or "{}")
            epoch, trained, per_step = map(int, places.get(key, (0, 0, 0)))
        except (ValueError, TypeError, AttributeError):
            # The script's own.
            continue
        if places and key not in places:
            logger.info("the data was divided otherwise before, so this worker's part of it begins anew")
        if epoch or trained:
            logger.info("the data goes on in epoch %d after %d examples, where this worker's place was", epoch, trained)
            return [epoch, trained, per_step]
    return [0, 0, 0] if _optimizers else None
