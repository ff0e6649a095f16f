"""The processes of one replica, each with a part of the model, as a process group of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyps_client import leave
from pyps_client.replica.arrangement import Copy
from pyps_client.replica.group import Group
from pyps_wire.errors import InvalidArgument, PypsError, ReplicaLost

T = TypeVar("T")

# How long a process waits for the others. The end of a process is noticed at once, by its connections. This time is for
# machines that vanish; it is longer than a slow minibatch, or a leader's wait for its turn.
TIMEOUT_SECONDS = 1800

# The name of a replica that no optimizer has yet.
UNNAMED = "the replica"

# Texts of torch's backends when another process has ended; their errors are plain RuntimeErrors.
_SIGNS_OF_LOSS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "remote process exited",
    "ncclRemoteError",
    "collective operation timeout",
)

# The replicas of this program, for errors that come from the user's own calls.
_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Block:
    """The place of a plain parameter in a tensor that is split over the processes of a replica.

    `offset`: where it begins in the whole, one number a dimension; `whole_shape`: the whole's sizes.
    """

    offset: tuple[int, ...]
    whole_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, numbers in (("offset", self.offset), ("whole_shape", self.whole_shape)):
            if not isinstance(numbers, Sequence) or not all(type(number) is int for number in numbers):
                raise InvalidArgument(f"{name} of a Block is {numbers!r}; expected whole numbers, one a dimension.")


class Replica(Group):
    """The processes that hold one model together, each a part of it, and are one worker of the run.

    Each of them makes it with the same arguments and passes it on: RemoteOptimizer(..., replica=replica). All take the
    same steps. `broadcast`, `all_gather`, `all_reduce` and `spread` are collective: every process calls them, in the
    same order. If another process has ended they raise ReplicaLost: a replica ends as a whole.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        blocks: Mapping[str, Block] | None = None,
        replicated: Collection[str] = (),
    ) -> None:
        """Join the processes of `group`, by default all of torch.distributed's world; all of them call it.

        `blocks`: by name, the places of plain parameters that are blocks of a split tensor. `replicated`: the names of
        plain parameters that several processes hold, with the same gradients. Other plain parameters belong to this
        process alone or, if parallelize_module split modules around them, to all processes of the mesh. DTensors need
        no entry.

        Raises InvalidArgument before torch.distributed.init_process_group(), and in a process that is not in the group.
        """
        if isinstance(replicated, str):
            raise InvalidArgument(
                f"replicated is {replicated!r}; give a list of names, as in replicated=[{replicated!r}]."
            )
        for name, block in (blocks or {}).items():
            if not isinstance(block, Block):
                raise InvalidArgument(f"blocks[{name!r}] is {block!r}; expected Block(offset=..., whole_shape=...).")
        # The worker's name, once an optimizer has the replica; for messages.
        self.name = UNNAMED
        self.ranks = _ranks_of(group)
        self.index = self.ranks.index(dist.get_rank())
        self.count = len(self.ranks)
        self.blocks = dict(blocks or {})
        self.replicated = frozenset(replicated)
        self._group: Any = None
        if self.count > 1:
            with self._as_one():
                # Over gloo, whatever the user's group is: the values are in the CPU's memory.
                self._group = dist.new_group(
                    list(self.ranks),
                    timeout=timedelta(seconds=TIMEOUT_SECONDS),
                    backend="gloo",
                    # Then other replicas in the world need not make this call.
                    use_local_synchronization=self.count < dist.get_world_size(),
                )
        _replicas.add(self)
        leave.translate_with(translated)

    def broadcast(self, value: T) -> T:
        # torch's broadcast fails once the user's program has destroyed the world, maybe before its last push.
        return self.all_gather(value)[0]

    def all_gather(self, value: T) -> list[T]:
        values: list[Any] = [value] * self.count
        if self._group is not None:
            with self._as_one():
                dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if self._group is not None:
            with self._as_one():
                dist.all_reduce(sums, group=self._group)
        return [float(number) for number in sums.tolist()]

    @torch.no_grad()
    def spread(self, copies: Sequence[Copy], local: Sequence[torch.Tensor]) -> None:
        """Send tensors that several processes hold from the one that trains them to the others, in float32.

        `copies`: the arrangement's; `local`: this process's tensors, one a claim, on any device.
        """
        if self._group is None:
            return
        for copy in copies:
            flat = torch.empty(sum(copy.sizes), dtype=torch.float32, device="cpu")
            pieces = zip(torch.split(flat, list(copy.sizes)), copy.held, strict=True)
            pairs = [(piece, local[held.claim].detach()[held.place]) for piece, held in pieces if held is not None]
            if copy.owner == self.index:
                for piece, place in pairs:
                    piece.copy_(place.flatten())
            with self._as_one():
                options = dist.BroadcastOptions()
                options.rootRank = copy.owner
                self._group.broadcast([flat], options).wait()
            if copy.owner != self.index:
                for piece, place in pairs:
                    place.copy_(piece.view(place.shape))

    def lost(self, error: BaseException) -> ReplicaLost:
        """Return ReplicaLost for an error of torch.distributed, without the paths and advice in its text."""
        text = str(error)
        cause = next((sign for sign in _SIGNS_OF_LOSS if sign in text), "") or next(iter(text.strip().splitlines()), "")
        return ReplicaLost(
            f"process {self.index} of {self.name} lost another of its processes ({cause}): a replica ends as a whole; "
            f"start it again"
        )

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not dist.is_initialized() and not _shows_loss(error):
                raise InvalidArgument(
                    "The process group was destroyed while its replica was in use: close the optimizer before "
                    "torch.distributed.destroy_process_group()."
                ) from error
            raise self.lost(error) from error


def translated(error: BaseException) -> PypsError | None:
    """Return ReplicaLost if the error of a collective call of the user's shows a lost process; else None."""
    several = [replica for replica in _replicas if replica.count > 1]
    if not several or isinstance(error, PypsError) or not isinstance(error, Exception):
        return None
    # A named replica first: an optimizer uses it.
    replica = min(several, key=lambda replica: replica.name == UNNAMED)
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _shows_loss(cause):
            return replica.lost(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _shows_loss(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_LOSS)


def _ranks_of(group: Any) -> tuple[int, ...]:
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(
            "A Replica needs torch.distributed: call torch.distributed.init_process_group() before it. `pyps run "
            "--parts` and torchrun set the environment variables that it reads."
        )
    if isinstance(group, DeviceMesh):
        ranks = sorted(int(rank) for rank in group.mesh.flatten().tolist())
    elif group is None or isinstance(group, dist.ProcessGroup):
        ranks = sorted(dist.get_process_group_ranks(group))
    else:
        # torch gives no ProcessGroup to a process that is not in it.
        ranks = []
    if dist.get_rank() not in ranks:
        raise InvalidArgument(
            f"Process {dist.get_rank()} of torch.distributed is not in the group, whose processes are {ranks}: give "
            f"each process the group that it belongs to."
        )
    return tuple(ranks)
