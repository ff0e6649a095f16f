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

# How long a process waits for the others. One that dies is noticed at once, by its connections; this is for machines
# that vanish, and longer than a slow minibatch or a leader that waits for its turn.
TIMEOUT_SECONDS = 1800

# The name of a replica that no optimizer has yet.
UNNAMED = "the replica"

# What torch's backends say when another process is gone; their errors are plain RuntimeErrors.
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
    """Where a plain parameter lies in a tensor that is cut over the processes of a replica.

    `offset`: where it begins in the whole, one number a dimension; `whole_shape`: the whole's sizes.
    """

    offset: tuple[int, ...]
    whole_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, numbers in (("offset", self.offset), ("whole_shape", self.whole_shape)):
            if not isinstance(numbers, Sequence) or not all(type(number) is int for number in numbers):
                raise InvalidArgument(f"{name} of a Block is {numbers!r}; expected whole numbers, one a dimension.")


class Replica(Group):
    """This process among those that hold one model together, each a part of it: one worker in the run's eyes.

    Its processes make it alike and hand it to RemoteOptimizer(..., replica=replica); they take the same steps.
    `broadcast`, `all_gather`, `all_reduce` and `spread` are collective: every process calls them, in the same order.
    Where another process is gone they raise ReplicaLost: a replica ends as a whole.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        blocks: Mapping[str, Block] | None = None,
        replicated: Collection[str] = (),
    ) -> None:
        """Joins the processes of `group`, by default all of torch.distributed's world; all of them call it.

        DTensors say themselves how they are cut. `blocks` says it of plain parameters, by their names in the model:
        where this process's block lies in the whole tensor. `replicated` names plain parameters that several
        processes hold alike, with the same gradients; a plain parameter is else this process's own, but where
        parallelize_module cut the modules around it and left it alone, that of all processes of the mesh.

        Raises InvalidArgument before torch.distributed.init_process_group(), and in a process that is not in the group.
        """
        if isinstance(replicated, str):
            raise InvalidArgument(
                f"replicated is {replicated!r}; give a list of names, as in replicated=[{replicated!r}]."
            )
        for name, block in (blocks or {}).items():
            if not isinstance(block, Block):
                raise InvalidArgument(f"blocks[{name!r}] is {block!r}; expected Block(offset=..., whole_shape=...).")
        ranks = _ranks_of(group)
        # Its worker's once an optimizer is made with it, for messages.
        self.name = UNNAMED
        self.ranks = ranks
        self.index = ranks.index(dist.get_rank())
        self.count = len(ranks)
        self.blocks = dict(blocks or {})
        self.replicated = frozenset(replicated)
        self._group: Any = None
        if self.count > 1:
            with self._as_one():
                # These ranks alone, over gloo, whatever the user's group is: what it carries lies on the CPU.
                self._group = dist.new_group(
                    list(ranks),
                    timeout=timedelta(seconds=TIMEOUT_SECONDS),
                    backend="gloo",
                    # So that the other replicas of a world that holds several need not come here too.
                    use_local_synchronization=self.count < dist.get_world_size(),
                )
        _replicas.add(self)
        leave.translate_with(translated)

    def broadcast(self, word: T) -> T:
        # Not a broadcast of torch's: it fails once the user's program has destroyed the world, before its last push.
        return self.all_gather(word)[0]

    def all_gather(self, word: T) -> list[T]:
        words: list[Any] = [word] * self.count
        if self._group is not None:
            with self._as_one():
                dist.all_gather_object(words, word, group=self._group)
        return words

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if self._group is not None:
            with self._as_one():
                dist.all_reduce(sums, group=self._group)
        return [float(number) for number in sums.tolist()]

    @torch.no_grad()
    def spread(self, copies: Sequence[Copy], local: Sequence[torch.Tensor]) -> None:
        """Brings numbers that several processes hold from the one that trains them to the others, in float32.

        `copies` are the arrangement's, `local` this process's tensors, one a claim; on any device.
        """
        if self._group is None:
            return
        for copy in copies:
            places = [None if held is None else local[held.claim].detach()[held.place] for held in copy.slices]
            flat = torch.empty(sum(copy.sizes), dtype=torch.float32, device="cpu")
            pieces = torch.split(flat, list(copy.sizes))
            if copy.owner == self.index:
                for piece, place in zip(pieces, places, strict=True):
                    assert place is not None
                    piece.copy_(place.flatten())
            with self._as_one():
                options = dist.BroadcastOptions()
                options.rootRank = copy.owner
                self._group.broadcast([flat], options).wait()
            if copy.owner != self.index:
                for piece, place in zip(pieces, places, strict=True):
                    if place is not None:
                        place.copy_(piece.view(place.shape))

    def lost(self, error: BaseException) -> ReplicaLost:
        """Return the meaning of an error of torch.distributed for this process."""
        text = str(error)
        # The backends' own words, but without their sources' paths and advice.
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
            if not dist.is_initialized() and not _tells_of_loss(error):
                raise InvalidArgument(
                    "The process group was destroyed while its replica was in use: close the optimizer before "
                    "torch.distributed.destroy_process_group()."
                ) from error
            raise self.lost(error) from error


def translated(error: BaseException) -> PypsError | None:
    """Return ReplicaLost for an error of the user's own collectives by a lost process; else None."""
    # One that an optimizer gave a name before any that was only tried.
    several = [replica for replica in _replicas if replica.count > 1]
    if not several or isinstance(error, PypsError) or not isinstance(error, Exception):
        return None
    replica = min(several, key=lambda replica: replica.name == UNNAMED)
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _tells_of_loss(cause):
            return replica.lost(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _tells_of_loss(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_LOSS)


def _ranks_of(group: Any) -> tuple[int, ...]:
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(
            "A Replica needs torch.distributed: call torch.distributed.init_process_group() before it. `pyps run "
            "--parts` and torchrun set what that reads from the environment."
        )
    if isinstance(group, DeviceMesh):
        ranks = sorted(int(rank) for rank in group.mesh.flatten().tolist())
    elif group is None or isinstance(group, dist.ProcessGroup):
        ranks = sorted(dist.get_process_group_ranks(group))
    else:
        # What torch gives to those that are not in a group.
        ranks = []
    if dist.get_rank() not in ranks:
        raise InvalidArgument(
            f"Process {dist.get_rank()} of torch.distributed is none of the replica's, which are {ranks}: give each "
            f"process the group that it belongs to."
        )
    return tuple(ranks)
