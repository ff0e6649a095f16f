"""overlap="backward": a push that leaves, a shard at a time, while the backward pass still computes.

One backward pass is one push. It begins with the first gradient, and `seal` ends it within the step: what was not
complete by then goes too, and what has left must still be what the model's gradients say.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pyps_client.departures import Departures
from pyps_client.fork import ForkGuard
from pyps_client.torch.gradients import Gradients
from pyps_client.torch.layout import Layout, several
from pyps_client.transport.threads import Future, Threads
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Partition

# So many numbers of each gradient, or a few more, are looked at to see whether it was changed.
NUM_SAMPLES = 16

Exchange = Callable[[], Sequence[Receipt]]


class Backward:
    """The push of the present backward pass. Gradients become complete on autograd's threads, all else is in a step."""

    def __init__(
        self,
        layout: Layout,
        partition: Partition,
        gradients: Gradients,
        begin: Callable[[Departures], Exchange | None],
    ) -> None:
        """`gradients` lie where they are sent from. `begin`: the exchange of what departs, to be run on a thread; None
        where this minibatch is pushed within its step.
        """
        self._layout = layout
        self._partition = partition
        self._gradients = gradients
        self._begin = begin
        self._guard = ForkGuard()
        self._threads = Threads()
        self._shards_of: list[list[int]] = [[] for _ in layout.parameters]
        for shard in partition.shards:
            for piece in partition.pieces(shard.shard_id):
                self._shards_of[piece.tensor_index].append(shard.shard_id)
        # Autograd has a thread a device.
        self._lock = threading.Lock()
        # Guarded by _lock: whether a pass has begun, and, where it is pushed as it goes, what leaves.
        self._has_begun = False
        self._departures: Departures | None = None
        # Tensors of each shard whose gradients are to come, and events after which a device's have come.
        self._missing: dict[int, int] = {}
        self._events: dict[int, list[torch.cuda.Event]] = {}
        # The gradients that were taken, how often each had been written, and some of its numbers.
        self._taken: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._pushing: Future[Sequence[Receipt]] | None = None
        # Held weakly: the model may live longer than its optimizer.
        computed = weakref.WeakMethod(self._computed)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_tell, computed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(layout.parameters)
            if parameter.requires_grad
        ]

    @property
    def is_under_way(self) -> bool:
        """Whether a push has begun that no step has ended."""
        return self._departures is not None

    def seal(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Lets all that is left of the push go, and waits for its end; False where numbers were not finite.

        InvalidArgument where a gradient that had left is another by now; nothing more leaves then.
        """
        departures = self._departures
        assert departures is not None
        changed = []
        for index, gradient in enumerate(gradients):
            before = self._taken.get(index)
            if before is not None:
                taken, version, numbers = before
                if gradient is not taken or taken._version != version or not torch.equal(_some_of(taken), numbers):
                    changed.append(index)
            elif gradient is not None:
                # It got none in this pass: it was there before, or somebody else put it there.
                if any(self._missing[shard_id] <= 0 for shard_id in self._shards_of[index]):
                    changed.append(index)
                else:
                    self._take(index, gradient)
        if changed:
            names = [self._layout.model.tensors[index].name for index in changed]
            raise InvalidArgument(
                f"Gradients ({several(names)}) were changed between backward() and step(), as clip_grad_norm_, "
                "GradScaler.unscale_ or zero_grad do, but overlap='backward' had begun to send them: this step was not "
                "taken whole. Change gradients no more, or use overlap='step' or 'off'."
            )
        departures.seal()
        assert self._pushing is not None
        self._pushing.wait()
        return not departures.spoiled

    @property
    def has_left(self) -> bool:
        """Whether servers were sent anything, or could not be."""
        failed = self._pushing is not None and self._pushing.error is not None
        return failed or (self._departures is not None and bool(self._departures.left))

    @property
    def num_answered(self) -> int:
        """Shards whose numbers servers have answered."""
        return 0 if self._departures is None else self._departures.num_answered

    def receipts(self) -> Sequence[Receipt]:
        """What servers answered to the push, sealed or given up; raises what was raised, once."""
        return () if self._pushing is None else self._pushing.value()

    def end(self) -> None:
        """Ends the pass, and whatever of its push has not left."""
        departures, self._departures = self._departures, None
        if departures is not None:
            departures.abandon()
            self._gradients.clear()
        self._taken, self._events = {}, {}
        self._has_begun = False

    def give_up(self) -> int:
        """Ends a pass that no step will end. Returns how many shards are answered, once nothing of it is read."""
        departures = self._departures
        self.end()
        if self._pushing is not None:
            self._pushing.wait()
        return 0 if departures is None else departures.num_answered

    def close(self) -> None:
        """Takes the hooks off, and lets nothing leave any more."""
        for hook in self._hooks:
            hook.remove()
        if self._departures is not None:
            self._departures.abandon()
        self._threads.close()

    def _computed(self, index: int, parameter: torch.Tensor) -> None:
        """Takes a gradient of which the backward pass has computed all."""
        if self._guard.in_child:
            return
        with self._lock:
            if not self._has_begun:
                self._has_begun = True
                self._start()
            gradient = parameter.grad
            # Of a sparse one the step says what is wrong.
            if self._departures is None or gradient is None or gradient.layout != torch.strided:
                return
            if index in self._taken:
                raise InvalidArgument(
                    f"A second gradient of {self._layout.model.tensors[index].name!r} was computed before step(), but "
                    "overlap='backward' had begun to send the first: call backward() once a step (on the sum of the "
                    "losses), and step() after each; zero_grad() of this optimizer goes before one that follows a pass "
                    "that was broken off. To accumulate, or to skip steps, or for checkpoint(..., "
                    "use_reentrant=True) around shared parameters, use overlap='step' or 'off'."
                )
            self._take(index, gradient)

    def _start(self) -> None:
        if self._pushing is not None:
            # One that was abandoned reads the numbers still.
            self._pushing.wait()
        gradients = self._gradients
        departures = Departures(self._partition, gradients.present, fits=gradients.fits, arrive=self._arrive)
        exchange = self._begin(departures)
        if exchange is None:
            return
        self._missing = {shard.shard_id: 0 for shard in self._partition.shards}
        for parameter, shards in zip(self._layout.parameters, self._shards_of, strict=True):
            # What has one from before is pushed too.
            if parameter.requires_grad or parameter.grad is not None:
                for shard_id in shards:
                    self._missing[shard_id] += 1
        self._departures = departures
        self._pushing = self._threads.submit(exchange)

    def _take(self, index: int, gradient: torch.Tensor) -> None:
        assert self._departures is not None
        event = self._gradients.lay(index, gradient)
        self._taken[index] = gradient, gradient._version, _some_of(gradient)
        for shard_id in self._shards_of[index]:
            if event is not None:
                self._events.setdefault(shard_id, []).append(event)
            self._missing[shard_id] -= 1
            if self._missing[shard_id] == 0:
                self._departures.complete(shard_id)

    def _arrive(self, shard_id: int) -> None:
        for event in self._events.get(shard_id, ()):
            event.synchronize()


def _some_of(gradient: torch.Tensor) -> torch.Tensor:
    """Some numbers of a gradient: torch does not count all writes, as GradScaler's, which changes every one."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // NUM_SAMPLES)].nan_to_num()


def _tell(computed: weakref.WeakMethod[Any], index: int, parameter: torch.Tensor) -> None:
    method = computed()
    if method is not None:
        method(index, parameter)
