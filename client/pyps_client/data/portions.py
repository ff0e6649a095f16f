"""Portions of a data set that all workers of a run share: an epoch ends when each example was trained on once."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyps_client.data.queue import RemoteQueue
from pyps_client.data.samplers import length_of, permutation
from pyps_client.log import logger
from pyps_client.pull import LeaseCall
from pyps_wire.errors import InvalidArgument, RunFinished
from pyps_wire.work_pb2 import DataSpec, LeaseReply

if TYPE_CHECKING:
    from pyps_client.worker import Worker

T = TypeVar("T")

# Batches in a portion, where neither the user nor the protocol says: so many fewer calls than batches.
PORTION_BATCHES = 8


class Stepper(Protocol):
    """One worker's steps, as its portions see them. Used by the thread that trains."""

    @property
    def session(self) -> Worker:
        """The worker's membership in the run, connected."""

    @property
    def steps(self) -> int:
        """Minibatches handed in, empty steps included."""

    @property
    def steps_answered(self) -> int:
        """Minibatches, from the first on, that are done with: their gradients answered, refused or left out."""

    @property
    def finished(self) -> bool:
        """True when the run is over."""

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        """Ask for a portion, and in one call for the parameters where the protocol hands out both under one mutex."""

    def tell_examples(self, count: int) -> None:
        """Set the number of examples of the next minibatch."""

    def end_portion_after(self, step: int) -> None:
        """Mark minibatch number `step`, from 0, as its portion's last."""

    def flush(self) -> None:
        """Push the gathered gradients and wait for the answer."""

    def idle(self) -> None:
        """Take a step without a minibatch, where others wait for each worker's steps."""

    def finish(self) -> None:
        """Note that the run is over, and take its last parameters."""

    def tell_over(self) -> None:
        """Report a loop that goes on after the run's end: once, or by RunFinished where a push would raise it."""


def others_wait(session: Worker) -> bool:
    """Return whether workers wait for each other's steps under the protocol in force."""
    return session.terms.current_version_only or session.terms.ask_to_proceed


class Portions:
    """Batches of the portions that server 0 gives this worker, for DataLoader(dataset, batch_sampler=...).

    One iteration is one epoch of the whole data set, shared by all workers: it ends when every portion of the epoch is
    trained on, by whomever; the batches are this worker's part of it. A portion whose worker dies goes to another, and
    counts as trained on once the gradients of all its batches are with the servers: one `optimizer.step()` a batch.

        portions = Portions(dataset, optimizer, batch_size=32, epochs=20)
        loader = DataLoader(dataset, batch_sampler=portions, num_workers=2)
        for epoch in range(20):
            for x, y in portions.epoch(loader):
                ...

    With `epochs` a worker that finds nothing left of an epoch does not wait for those who still compute some of it: its
    iteration goes on with batches of the next, in that one's own order, as far as the servers' --epochs-ahead allows,
    and ends, as ever, when its own epoch is complete. The last of them has none after it.

    A loader with processes of its own fetches ahead, and cannot wait for the end of an epoch with batches on their
    way: `for x, y in loader` then may end early, and the next iteration goes on with the same epoch. `epoch` does not.
    All processes of a replica make the same portions and loader, and get the same batches: it is one worker.
    An iteration that was broken off is continued by the next one; what it left goes back. Epochs that the run has
    behind it, as for a worker that comes late or again, are over at once, and all of them once the run is over.
    """

    def __init__(
        self,
        dataset: Sized,
        optimizer: Any,
        *,
        batch_size: int = 32,
        portion_batches: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        name: str = "train",
    ) -> None:
        """`optimizer`: a RemoteOptimizer, or a Client.

        `batch_size`: examples in a batch, where the servers' schedule (batch_growth) leaves it open. `portion_batches`:
        batches in a portion, 8 by default; where the protocol sums minibatches in a push (asgd:accumulate=), or the
        schedule says how large they are, by default one push's worth. `seed`: of each epoch's permutation. All of
        these must be the same in all workers. `epochs`: how many the loop goes through, from the first of the run on;
        without it the worker begins none ahead, as none may come. `name`: for people.

        Raises a ConfigurationError for a data set without examples, or whose length, batches or seed are others than
        the run's, and for a second one of the same optimizer. Its iterations raise what steps do.
        """
        length = length_of(dataset)
        stepper: Stepper | None = getattr(optimizer, "stepper", None)
        if stepper is None:
            raise InvalidArgument(
                f"optimizer is a {type(optimizer).__name__}; expected a pyps_client.RemoteOptimizer or a "
                "pyps_client.Client, whose servers hand out the portions."
            )
        self._stepper = stepper
        whole = {"batch_size": batch_size, "epochs": epochs, "portion_batches": portion_batches}
        for setting, value in whole.items():
            if value is None and setting != "batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise InvalidArgument(f"{setting} is {value!r}; expected a whole number, 1 to {2**31 - 1}.")
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise InvalidArgument(f"seed is {seed!r}; expected 0 to {2**32 - 1}.")
        if not isinstance(shuffle, bool):
            raise InvalidArgument(f"shuffle is {shuffle!r}; expected True or False.")
        if not isinstance(name, str):
            raise InvalidArgument(f"name is {name!r}; expected a text.")
        if portion_batches is None:
            left_to_servers = stepper.session.terms.accumulate or stepper.session.terms.batch_size
            portion_batches = 0 if left_to_servers else PORTION_BATCHES
        self._spec = DataSpec(
            name=name,
            num_examples=length,
            portion_examples=portion_batches * batch_size,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
        )
        self._queue = RemoteQueue(stepper.session)
        self._queue.open(self._spec)
        if optimizer in _divided:
            raise InvalidArgument(
                f"This {type(optimizer).__name__} has Portions already, which know its epoch: others would begin with "
                "epoch 0 again, which the run has behind it. Make Portions(...) and its loader once, before the loop "
                "over the epochs."
            )
        _divided.add(optimizer)
        # An epoch, and its order.
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._batch_size = batch_size
        self._epoch = 0
        self._epochs = epochs or 0
        # Portions that are this worker's and not delivered, the oldest first.
        self._portions: deque[_Portion] = deque()
        # Leased, and no batch of it handed out yet.
        self._at_hand: _Portion | None = None
        # Whether the present iteration's epoch is over, or the run.
        self._over = False
        # Whether an iteration ended because the run is over: a loop that goes on then knows nothing of runs.
        self._ended = False
        self._told_of_early_end = False
        # Whether `epoch` has begun an iteration, and counts.
        self._within_epoch = False
        self._count = BatchCount(stepper)

    @property
    def batch_size(self) -> int:
        """Examples in a batch of the present epoch."""
        return self._batch_size

    @property
    def ends_portion(self) -> bool:
        """Whether the batch that was handed out last is its portion's last.

        A Client that sums the gradients of several batches in a push pushes then, before it asks for the next.
        """
        return not self._portions or self._portions[-1].last_batch is not None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch, from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of an epoch that come to this worker, about: an equal share of as many workers as live now.

        For a progress bar: a trainer that stops there cuts a fast worker's epoch short, and what it held goes back.
        """
        batches = -(-self._spec.num_examples // self._batch_size)
        return -(-batches // max(1, self._stepper.session.num_workers))

    def __iter__(self) -> Iterator[list[int]]:
        if not self._within_epoch:
            self._begin(exact=False)
        yield from self._batches()

    def epoch(self, loader: Iterable[T] | None = None) -> Iterator[T]:
        """Batches of one whole epoch, drawn by a loader over these portions; without one, indices.

        Unlike a bare iteration it ends with the epoch however far the loader fetches ahead, and it sees each batch that
        the loop is done with: one that was passed over without a step counts as done.
        """
        source: Iterable[Any] = self if loader is None else loader
        self._begin(exact=True)
        self._within_epoch = True
        try:
            while not self._over:
                self._at_hand = self._at_hand or self._next_portion()
                if self._at_hand is None:
                    break
                for batch in source:
                    self._count.hand_over()
                    try:
                        yield batch
                    except GeneratorExit:
                        self._count.broken_off()
                        raise
                    self._count.taken_back()
                if self._at_hand is not None:
                    raise InvalidArgument(
                        f"The {type(source).__name__} given to epoch() draws no batches from these portions: give it "
                        "DataLoader(dataset, batch_sampler=portions) itself, which can be iterated more than once."
                    )
            self._hand_in()
        finally:
            self._within_epoch = False

    def _begin(self, *, exact: bool) -> None:
        self._over = False
        if self._ended:
            self._stepper.tell_over()
        self._at_hand = None
        if self._portions:
            self._hand_in()
            left = [portion.lease_id for portion in self._portions]
            self._queue.give_up(left)
            self._portions.clear()
            if left:
                logger.info("portions that go back, as their batches were not all followed by a step: %d", len(left))
        self._count.begin(exact=exact)

    def _hand_in(self) -> None:
        """Deliver the portions that the loop is done with: it may stay away for long."""
        if self._portions:
            self._stepper.flush()
            self._deliver()

    def _batches(self) -> Iterator[list[int]]:
        while True:
            portion, self._at_hand = self._at_hand, None
            portion = portion or self._next_portion()
            if portion is None:
                return
            self._portions.append(portion)
            for start in range(portion.start, portion.stop, portion.batch_size):
                stop = min(start + portion.batch_size, portion.stop)
                number = self._count.handed_out(stop - start, ends_portion=stop == portion.stop)
                if stop == portion.stop:
                    portion.last_batch = number
                yield self._indices(portion.epoch, start, stop)
                if len(self._portions) > 1 or self._stepper.finished:
                    # An earlier push, in parallel to the computation, may be answered by now.
                    self._deliver()
                if self._over:
                    return

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        if not self._spec.shuffle:
            return list(range(start, stop))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, permutation(self._spec.num_examples, self._spec.seed, epoch)
        indices: list[int] = self._order[1][start:stop].tolist()
        return indices

    def _next_portion(self) -> _Portion | None:
        """Return the next portion; None where the epoch or the run is over, or a loader has batches on their way."""
        self._deliver()
        if not self._portions:
            return self._ask(wait=True)
        portion = self._ask(wait=False)
        if portion is not None or self._ended or self._count.ahead:
            if portion is None and not (self._over or self._within_epoch):
                self._tell_of_early_end()
            return portion
        # None is free, and other workers may wait for this worker's.
        self._stepper.flush()
        self._deliver(all_taken=True)
        return None if self._over else self._ask(wait=True)

    def _tell_of_early_end(self) -> None:
        if not self._told_of_early_end:
            self._told_of_early_end = True
            logger.warning(
                "an iteration over Portions ends before its epoch does, as %d batches are on their way in the loader, "
                "or had no step: the next one goes on with epoch %d. Write `for batch in portions.epoch(loader)`, "
                "which ends with the epoch.",
                *(self._count.ahead, self._epoch),
            )

    def _ask(self, *, wait: bool) -> _Portion | None:
        """Lease a portion of the epoch. The one place that does."""
        stepper = self._stepper
        if self._epochs and self._epoch >= self._epochs:
            self._over = True
            return None
        while not stepper.finished:
            steps_on = wait and others_wait(stepper.session)
            try:
                reply = self._insist(partial(stepper.lease, partial(self._lease, wait=wait and not steps_on)))
            except RunFinished:
                break
            outcome = reply.outcome
            if outcome == LeaseReply.OUTCOME_LEASED:
                self._batch_size = reply.batch_size or self._spec.batch_size
                return _Portion(reply, self._batch_size)
            if outcome == LeaseReply.OUTCOME_PASS_DONE:
                self._epoch += 1
                self._over = True
                return None
            if outcome == LeaseReply.OUTCOME_ENDED:
                break
            if not steps_on:
                return None
            # Others cannot end their portions while they wait for this worker's step.
            stepper.idle()
        self._end_with_run()
        return None

    def _lease(self, call: LeaseCall | None, *, wait: bool) -> LeaseReply:
        return self._queue.lease(pass_number=self._epoch, passes=self._epochs, wait=wait, call=call)

    def _insist(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except InvalidArgument:
            # A server that came back from before it heard of the data set; else the call has the same verdict again.
            self._queue.open(self._spec)
            return call()

    def _deliver(self, *, all_taken: bool = False) -> None:
        """Deliver the portions whose gradients are with the servers. `all_taken`: no gradient is on its way."""
        if self._stepper.finished:
            # Nobody goes on, so that it does not matter which of the last gradients were taken.
            self._end_with_run()
            return
        answered = self._stepper.steps_answered
        while self._portions:
            portion = self._portions[0]
            if portion.until is None and self._count.has_taken(portion.last_batch):
                portion.until = self._count.steps_taken
            if portion.until is None or (portion.until > answered and not all_taken):
                return
            self._portions.popleft()
            examples = portion.stop - portion.start
            reply = self._insist(partial(self._queue.deliver, [portion.lease_id], example_count=examples))
            if not reply.accepted:
                logger.warning(
                    "portion %d of epoch %d was given to another worker too: %s",
                    *(portion.portion_id, portion.epoch, reply.message.rstrip(".")),
                )

    def _end_with_run(self) -> None:
        self._portions.clear()
        self._over = self._ended = True
        # Not where the optimizer was closed.
        with contextlib.suppress(RunFinished):
            self._stepper.finish()


# Optimizers with portions, and so a place in the epochs, which outlives loaders and portions.
_divided: weakref.WeakSet[Any] = weakref.WeakSet()


class BatchCount:
    """Counts the batches of an iteration, and those that the loop is done with.

    Exact where `Portions.epoch` sees the loop take each batch. Elsewhere each is taken to be followed by one step.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.is_exact = False
        self._handed = 0
        self._taken = 0
        # The step that the batch handed out next will be, where each is followed by one.
        self._due = 0
        # The number of examples of each, and whether it ends its portion.
        self._on_their_way: deque[tuple[int, bool]] = deque()
        # Exact only: the stepper's steps when the newest batch was handed over, and the examples since that step.
        self._steps_before = -1
        self._examples = 0

    def begin(self, *, exact: bool) -> None:
        self.is_exact = exact
        self._handed = self._taken = self._examples = 0
        self._due, self._steps_before = self._stepper.steps, -1
        self._on_their_way.clear()

    @property
    def ahead(self) -> int:
        """Batches handed out that the loop is not done with."""
        if self.is_exact:
            return self._handed - self._taken
        return max(0, self._due - self._stepper.steps)

    @property
    def steps_taken(self) -> int:
        """The steps that hold all that the loop is done with."""
        steps = self._stepper.steps
        # Where no step followed, the batch may be a part of the next one.
        return steps + 1 if self.is_exact and steps == self._steps_before else steps

    def has_taken(self, number: int | None) -> bool:
        """Return whether the loop is done with that batch, by its number."""
        return number is not None and self._handed - self.ahead > number

    def handed_out(self, examples: int, *, ends_portion: bool) -> int:
        """Note a batch on its way to the loop, and return its number."""
        if self.is_exact:
            self._on_their_way.append((examples, ends_portion))
        else:
            self._due = max(self._due, self._stepper.steps)
            self._announce(self._due, examples, ends_portion)
            self._due += 1
        self._handed += 1
        return self._handed - 1

    def hand_over(self) -> None:
        """Note that the loop gets the oldest batch on its way."""
        if not self._on_their_way:
            return
        examples, ends_portion = self._on_their_way.popleft()
        steps = self._stepper.steps
        # Several batches before one step count together.
        self._examples = examples + (self._examples if steps == self._steps_before else 0)
        self._steps_before = steps
        self._announce(steps, self._examples, ends_portion)

    def taken_back(self) -> None:
        """Note that the loop is done with its newest batch."""
        self._taken = min(self._taken + 1, self._handed)

    def broken_off(self) -> None:
        """Note that the loop ended with its newest batch: done with it if a step followed."""
        if self._stepper.steps > self._steps_before:
            self.taken_back()

    def _announce(self, step: int, examples: int, ends_portion: bool) -> None:
        self._stepper.tell_examples(examples)
        if ends_portion:
            self._stepper.end_portion_after(step)


class _Portion:
    def __init__(self, reply: LeaseReply, batch_size: int) -> None:
        leased = reply.portion
        self.lease_id, self.portion_id = leased.lease_id, leased.portion_id
        self.start, self.stop = leased.start, leased.stop
        self.epoch = int(getattr(reply, "pass"))
        self.batch_size = batch_size
        # The number of its last batch, once that is handed out.
        self.last_batch: int | None = None
        # The step up to which gradients are to be answered, once the loop is done with the last batch.
        self.until: int | None = None
