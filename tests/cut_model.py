"""A small model cut over two parts, numbers for it, and a run of it, as one worker that holds all parts begins it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pyps_wire.blocks import place
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.partition import Model, Tensor
from support import AnyServer
from wire_worker import WireWorker

Floats = npt.NDArray[np.float32]

# Up by columns, down by rows, a scale of part 0 alone: 3 shards of part 0, which go to server 0 of 2, and 2 of part 1.
CUT = Model(
    (
        Tensor("up", (8, 10), 0, (8, 20), (0, 0), 0),
        Tensor("down", (10, 8), 0, (20, 8), (0, 0), 0),
        Tensor("scale", (8,), 0),
        Tensor("up", (8, 10), 1, (8, 20), (0, 10), 1),
        Tensor("down", (10, 8), 1, (20, 8), (10, 0), 1),
    ),
    shard_size=80,
)

SGD = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})] * CUT.num_groups)


def whole_tensors(seed: int = 1) -> dict[str, Floats]:
    """The tensors of the model before it was cut, no two numbers alike."""
    rng = np.random.default_rng(seed)
    shapes = {tensor.name: tensor.whole_shape or tensor.shape for tensor in CUT.tensors}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def vectors_of(tensors: Mapping[str, Floats]) -> list[Floats]:
    """The same numbers as they lie in the vectors of the cut model's groups."""
    blocks: list[list[Floats]] = [[] for _ in range(CUT.num_groups)]
    for tensor in CUT.tensors:
        whole = tensors[tensor.name]
        values = whole[place(tensor.offset, tensor.shape)] if tensor.whole_shape else whole
        blocks[tensor.group].append(values.reshape(-1))
    return [np.concatenate(values) for values in blocks]


@contextlib.contextmanager
def cut_run(servers: Sequence[AnyServer]) -> Iterator[list[WireWorker]]:
    """A run of the cut model whose parameters are 0: one worker that holds all parts, joined at each server."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(WireWorker(server.data, "a", model=CUT, server_index=index, num_servers=len(servers)))
            for index, server in enumerate(servers)
        ]
        for worker in workers[1:]:
            worker.sender.CopyFrom(workers[0].sender)
        term = workers[0].hello().term
        # Server 0 last: it is ready only when all are.
        for worker in reversed(workers):
            worker.initialize(term)
        for worker in workers:
            worker.hello()
        yield workers


def push_tensors(workers: Sequence[WireWorker], tensors: Mapping[str, Floats], **fields: int) -> None:
    """Pushes such gradients that plain SGD with rate 1 adds these numbers to the parameters."""
    vectors = vectors_of(tensors)
    for worker in workers:
        for shard in worker.plan.of_server(worker.server_index):
            values = -vectors[shard.group][shard.offset : shard.offset + shard.length]
            worker.push(worker.push_request(values, shard.shard_id, **fields))
