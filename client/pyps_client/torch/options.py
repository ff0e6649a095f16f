"""A RemoteOptimizer's settings beside those that its constructor shows."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from numbers import Integral
from typing import TypedDict

import torch

from pyps_client.launch import check_types, renamed
from pyps_wire.errors import BadRequest
from pyps_wire.partition import DEFAULT_SHARD_SIZE


class Settings(TypedDict, total=False):
    """The fields of Options, as keywords of RemoteOptimizer."""

    token_file: str | os.PathLike[str] | None
    push_every: int | None
    pull_every: int | None
    local_learning_rate: float | None
    read_my_writes: bool
    compat: str | None
    gradient_codec: str | torch.dtype | None
    parameter_codec: str | torch.dtype | None
    # The two by their old names.
    gradient_dtype: str | torch.dtype | None
    parameter_dtype: str | torch.dtype | None
    transport: str | None
    start_wait_seconds: float | None
    loss_wait_seconds: float | None
    wait_seconds: float | None
    buffers: str
    owns_schedule: bool | None
    examples_in_batch: int | None
    shard_size: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """A RemoteOptimizer's settings beside those that its constructor shows; each may be a keyword of its own instead.

        RemoteOptimizer(model, optimizer, options=Options(push_every=4, pull_every=4))

    `token_file`: the path of the file with the servers' secret; PYPS_TOKEN_FILE by default.
    `push_every`, `pull_every`: minibatches that a push sums, and minibatches from pull to pull; by default what the
    protocol in force wants (asgd:accumulate=), or else 1.
    `local_learning_rate`: the size of the worker's own steps between pulls. By default the rate that the servers'
    schedule gives now under plain SGD; none under other rules, which is told where minibatches lie between pulls.
    `read_my_writes`: True takes the worker's own steps that pulled parameters may lack on them once more.
    `compat`: "paper" for the literal timing of Dean et al. 2012, appendix.
    `gradient_codec`: how gradients travel, "float32", "float16" or "bfloat16", or torch's types; PYPS_GRADIENT_CODEC or
    "float32" by default. `parameter_codec` (PYPS_PARAMETER_CODEC): how pulled parameters do. Servers hold and update
    them in float32.
    `transport`: "auto" for memory shared with servers on this machine; elsewhere a lane (TCP) or gRPC, "grpc" for gRPC
    everywhere, "shm" or "tcp" to fail rather than use another, "in_process" for servers of this process; PYPS_TRANSPORT
    or "auto" by default.
    `start_wait_seconds`, `loss_wait_seconds`, `wait_seconds`: how long to wait for a server at the start, for one that
    was lost, and for other workers; PYPS_START_WAIT_SECONDS and so on, or 300, 600 and 1800 by default.
    `buffers`: batch norm's statistics and their like stay with each worker ("local"), are averaged over the workers
    ("average"), or follow those of the first ("first"); the same for all workers.
    `owns_schedule`: True where this worker's changes of learning rate and momentum count, for all workers; by default
    that is the worker with index 0, or one without an index. Until it has pushed, each worker's scheduler counts.
    `examples_in_batch`: examples in each minibatch, where nobody says; `step(examples=...)` goes before it.
    `shard_size`: the most parameters, in numbers, of a shard; the same for all workers.
    """

    token_file: str | os.PathLike[str] | None = None
    push_every: int | None = None
    pull_every: int | None = None
    local_learning_rate: float | None = None
    read_my_writes: bool = False
    compat: str | None = None
    gradient_codec: str | torch.dtype | None = None
    parameter_codec: str | torch.dtype | None = None
    transport: str | None = None
    start_wait_seconds: float | None = None
    loss_wait_seconds: float | None = None
    wait_seconds: float | None = None
    buffers: str = "local"
    owns_schedule: bool | None = None
    examples_in_batch: int | None = None
    shard_size: int = DEFAULT_SHARD_SIZE

    def __post_init__(self) -> None:
        check_types(self)
        check_examples(self.examples_in_batch)

    @classmethod
    def of(cls, options: Options | None, settings: Settings) -> Options:
        """The options, completed by settings that are not None; BadRequest for one in both, TypeError for another."""
        own = renamed(settings)
        given = {name: value for name, value in own.items() if value is not None}
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name in own:
            if name not in defaults:
                near = difflib.get_close_matches(name, defaults, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(defaults)}"
                raise TypeError(f"RemoteOptimizer has no setting {name!r}; {hint}")
        for name, value in given.items():
            if (there := getattr(options, name, defaults[name])) != defaults[name]:
                raise BadRequest(f"{name} is {there!r} in options, and {value!r} beside them: give it once.")
        if not isinstance(options, cls | None):
            raise BadRequest(f"options is {options!r}; expected pyps_client.torch.Options(...).")
        return dataclasses.replace(options or cls(), **given)


def check_examples(count: object) -> None:
    """Refuses what is no number of examples; None says nothing of it."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, Integral) or count < 0):
        raise BadRequest(f"The number of examples in a minibatch is {count!r}; expected a whole number, 0 or more.")
