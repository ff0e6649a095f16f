"""Portions of a data set that all workers of a run share: an epoch ends when each example was trained on once."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyps_client.data.queue import RemoteQueue
from pyps_client.data.samplers import SEED_MAX, check_whole, length_of, permutation
from pyps_client.log import logger
from pyps_client.pull import LeaseCall
from pyps_wire.errors import InvalidArgument, RunFinished
from pyps_wire.work_pb2 import DataSpec, LeaseReply, Portion

if TYPE_CHECKING:
    from pyps_client.worker import Worker

T = TypeVar("T")

# Batches in a portion, if neither the user nor the protocol sets the number. A worker makes one call for a portion.
PORTION_BATCHES = 8


class Stepper(Protocol):
    """The steps of one worker, for its portions. Used by the thread that trains.

    The defaults are for a caller that pushes and pulls itself, so that each step is answered when it returns.
    """

    # The worker's membership in the run, connected.
    session: Worker

    @property
    def steps(self) -> int:
        """The number of minibatches so far, empty steps included."""

    @property
    def steps_answered(self) -> int:
        """How many of these, from the first on, have their answer, or were left out."""
        return self.steps

    @property
    def finished(self) -> bool:
        """True when the run is over."""
        return self.session.finished

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        """Ask for a portion; in the same call for parameters, where the protocol gives both under one mutex."""
        return ask(None)

    def tell_examples(self, count: int) -> None:
        """Set the number of examples in the next minibatch."""

    def end_portion_after(self, step: int) -> None:
        """Mark minibatch number `step`, from 0, as the last of its portion."""
        return

    def flush(self) -> None:
        """Push the gathered gradients and wait for the answer."""
        return

    def idle(self) -> None:
        """Take a step without a minibatch, if the protocol makes workers wait for each other's steps."""

    def finish(self) -> None:
        """Note that the run is over, and pull its last parameters."""
        return

    def tell_over(self) -> None:
        """Log once, or raise RunFinished, when a loop continues after the end of the run."""


class Portions:
    """Batches of the portions that server 0 gives to this worker: DataLoader(dataset, batch_sampler=portions).

        portions = Portions(dataset, optimizer, batch_size=32, epochs=20)
        loader = DataLoader(dataset, batch_sampler=portions, num_workers=2)
        for epoch in range(20):
            for x, y in portions.epoch(loader):
                ...

    One iteration is one epoch of the whole data set, which all workers share; the batches are this worker's part of it.
    The epoch ends when every portion has been trained on by some worker. A portion is delivered once the servers have
    the gradients of all its batches, with one `optimizer.step()` a batch. If its worker dies, another worker gets it.

    With `epochs`, a worker that finds no portion left does not wait for the others: its iteration continues with
    batches of the next epoch, as far as the servers' --epochs-ahead allows, and ends when its own epoch is complete.

    A loader with processes of its own fetches batches ahead. Then `for x, y in loader` may end before the epoch does,
    and the next iteration continues the same epoch. `epoch` always ends with the epoch.
    All processes of a replica make the same portions and loader, and get the same batches.
    After a `break` the next iteration continues the epoch, and portions that were not completed return to the queue.
    Iterations of epochs that the run has completed end at once; after the end of the run, all do.
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

        `batch_size`: examples in a batch, unless the servers' schedule (batch_growth) sets it. `portion_batches`:
        batches in a portion. The default is 8, or the batches of one push where the protocol sums minibatches
        (asgd:accumulate=) or the servers set the size of batches. `seed`: of each epoch's permutation. All of these
        must be the same in all workers. `epochs`: the number of epochs of the loop, counted from the run's first;
        without it the worker never begins an epoch ahead. `name`: shown to people.

        Raises a ConfigurationError for a data set without examples, for settings that differ from those of the run,
        and for a second Portions of the same optimizer. Iterations raise what steps do.
        """
        length = length_of(dataset)
        stepper: Stepper | None = getattr(optimizer, "stepper", None)
        if stepper is None:
            raise InvalidArgument(
                f"optimizer is a {type(optimizer).__name__}; expected a pyps_client.RemoteOptimizer or a "
                "pyps_client.Client, whose servers hand out the portions."
            )
        check_whole("batch_size", batch_size, least=1)
        check_whole("seed", seed, most=SEED_MAX)
        for setting, value in (("epochs", epochs), ("portion_batches", portion_batches)):
            if value is not None:
                check_whole(setting, value, least=1)
        if not isinstance(shuffle, bool):
            raise InvalidArgument(f"shuffle is {shuffle!r}; expected True or False.")
        if not isinstance(name, str):
            raise InvalidArgument(f"name is {name!r}; expected a text.")
        self._stepper = stepper
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
        if optimizer in _optimizers:
            raise InvalidArgument(
                f"This {type(optimizer).__name__} has Portions already, which know its epoch: others would begin with "
                "epoch 0 again, which the run has behind it. Make Portions(...) and its loader once, before the loop "
                "over the epochs."
            )
        _optimizers.add(optimizer)
        # The newest epoch of a batch, and the permutation of its examples.
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        # Examples in a batch of the present epoch.
        self.batch_size = batch_size
        self._epoch = 0
        self._epochs = epochs or 0
        # Portions with batches in the loop or the loader, not delivered, the oldest first.
        self._portions: deque[_Portion] = deque()
        # A leased portion without such batches.
        self._at_hand: _Portion | None = None
        # Whether the epoch of this iteration is over, or the run.
        self._over = False
        # Whether an iteration ended with the run.
        self._ended = False
        self._warned_of_early_end = False
        self._within_epoch = False
        self._count = BatchCount(stepper)

    @property
    def ends_portion(self) -> bool:
        """True if the newest batch is the last of its portion.

        A Client that sums the gradients of several batches pushes then, before it takes the next batch.
        """
        return not self._portions or self._portions[-1].is_drawn

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return about how many batches of an epoch this worker gets: an equal share among the present workers.

        For a progress bar. A trainer must not stop after so many: a fast worker gets more.
        """
        batches = -(-self._spec.num_examples // self.batch_size)
        return -(-batches // max(1, self._stepper.session.num_workers))

    def __iter__(self) -> Iterator[list[int]]:
        if not self._within_epoch:
            self._begin(exact=False)
        yield from self._batches()

    def epoch(self, loader: Iterable[T] | None = None) -> Iterator[T]:
        """Yield the batches of one whole epoch from a loader over these portions; without a loader, indices.

        A batch counts as trained on once the loop asks for the next batch, even without a step.
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
                    self._count.yielded()
                    try:
                        yield batch
                    except GeneratorExit:
                        self._count.broken_off()
                        raise
                    self._count.done()
                if self._at_hand is not None:
                    raise InvalidArgument(
                        f"The {type(source).__name__} given to epoch() draws no batches from these portions: give it "
                        "DataLoader(dataset, batch_sampler=portions) itself, which can be iterated more than once."
                    )
            self._flush()
        finally:
            self._within_epoch = False

    def _begin(self, *, exact: bool) -> None:
        self._over = False
        if self._ended:
            self._stepper.tell_over()
        self._at_hand = None
        self._flush()
        if self._portions:
            self._queue.give_up([portion.leased.lease_id for portion in self._portions])
            logger.info("%d portions return to the queue: not all of their batches had a step", len(self._portions))
            self._portions.clear()
        self._count.begin(exact=exact)

    def _flush(self) -> None:
        """Deliver what can be delivered before the loop does something else, maybe for long."""
        if self._portions:
            self._stepper.flush()
            self._deliver()

    def _batches(self) -> Iterator[list[int]]:
        while portion := self._at_hand or self._next_portion():
            self._at_hand = None
            self._portions.append(portion)
            end = portion.leased.stop
            for start in range(portion.leased.start, end, portion.batch_size):
                stop = min(start + portion.batch_size, end)
                portion.is_drawn = stop == end
                self._count.drawn(_Batch(portion, stop - start, is_last=stop == end))
                yield self._indices(portion.epoch, start, stop)
                if len(self._portions) > 1 or self._stepper.finished:
                    # The answer to an earlier push may have come during the computation.
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
        """Lease a portion; None if the epoch or the run is over, or if the loader has batches that it fetched ahead."""
        self._deliver()
        if self._portions:
            portion = self._lease(wait=False)
            if portion is not None or self._ended:
                return portion
            if self._count.ahead:
                if not (self._over or self._within_epoch or self._warned_of_early_end):
                    self._warned_of_early_end = True
                    logger.warning(
                        "an iteration over Portions ends before its epoch does: the loader fetched %d batches ahead, "
                        "or they had no step; the next iteration continues epoch %d. Write `for batch in "
                        "portions.epoch(loader)`, which ends with the epoch.",
                        *(self._count.ahead, self._epoch),
                    )
                return None
            # No portion is free, and other workers may wait for those of this worker.
            self._stepper.flush()
            self._deliver(passed_over=True)
        return None if self._over else self._lease(wait=True)

    def _lease(self, *, wait: bool) -> _Portion | None:
        """Lease a portion of the epoch, or of a later one; None if there is none, or the epoch or the run is over."""
        stepper = self._stepper
        if self._epochs and self._epoch >= self._epochs:
            self._over = True
            return None
        while not stepper.finished:
            terms = stepper.session.terms
            # Under these protocols workers wait for each other's steps.
            idles = wait and (terms.current_version_only or terms.ask_to_proceed)
            ask = partial(self._queue.lease, pass_number=self._epoch, passes=self._epochs, wait=wait and not idles)
            try:
                reply = self._retried(partial(stepper.lease, ask))
            except RunFinished:
                break
            if reply.outcome == LeaseReply.OUTCOME_LEASED:
                self.batch_size = reply.batch_size or self._spec.batch_size
                return _Portion(reply.portion, int(getattr(reply, "pass")), self.batch_size)
            if reply.outcome == LeaseReply.OUTCOME_PASS_DONE:
                self._epoch += 1
                self._over = True
                return None
            if reply.outcome == LeaseReply.OUTCOME_ENDED:
                break
            if not idles:
                return None
            # Others cannot complete their portions while they wait for a step of this worker.
            stepper.idle()
        self._end_with_run()
        return None

    def _retried(self, call: Callable[[], T]) -> T:
        """Return the call's result; if it is refused, name the data set to the servers and call again."""
        try:
            return call()
        except InvalidArgument:
            # A server restored from an early checkpoint does not know the data set. Other refusals repeat themselves.
            self._queue.open(self._spec)
            return call()

    def _deliver(self, *, passed_over: bool = False) -> None:
        """Deliver portions whose gradients the servers have; with `passed_over`, also if the last batch had no step."""
        if self._stepper.finished:
            # The run needs no delivery any more.
            self._end_with_run()
            return
        answered = self._stepper.steps_answered
        while self._portions:
            portion = self._portions[0]
            if portion.last_step is None or (portion.last_step > answered and not (passed_over and self._within_epoch)):
                return
            self._portions.popleft()
            leased = portion.leased
            examples = leased.stop - leased.start
            reply = self._retried(partial(self._queue.deliver, [leased.lease_id], example_count=examples))
            if not reply.accepted:
                logger.warning(
                    "portion %d of epoch %d was given to another worker too: %s",
                    *(leased.portion_id, portion.epoch, reply.message.rstrip(".")),
                )

    def _end_with_run(self) -> None:
        self._portions.clear()
        self._over = self._ended = True
        # A closed optimizer raises it.
        with contextlib.suppress(RunFinished):
            self._stepper.finish()


# Optimizers that have Portions.
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(slots=True)
class _Portion:
    leased: Portion
    epoch: int
    batch_size: int
    # Whether its last batch is drawn.
    is_drawn: bool = False
    # How many steps must be answered before it is delivered, once that is known.
    last_step: int | None = None


class _Batch(NamedTuple):
    portion: _Portion
    examples: int
    is_last: bool


class BatchCount:
    """Counts an iteration's batches: drawn by the loader, yielded to the loop, done there.

    In `Portions.epoch` the counts are exact. Elsewhere each batch is expected to have one step, and is done with it.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.begin(exact=False)

    def begin(self, *, exact: bool) -> None:
        self._is_exact = exact
        # If not exact: the number of the step that the next batch will have.
        self._next_step = self._stepper.steps
        # If exact: the batches that are not yielded yet, and the newest one that is yielded and not done; the number of
        # steps when that was yielded, and the examples yielded since the step before.
        self._fetched: deque[_Batch] = deque()
        self._newest: _Batch | None = None
        self._steps_before = -1
        self._examples = 0

    @property
    def ahead(self) -> int:
        """Batches that are drawn and not done."""
        if self._is_exact:
            return len(self._fetched) + (self._newest is not None)
        return max(0, self._next_step - self._stepper.steps)

    def drawn(self, batch: _Batch) -> None:
        """Note a batch that the loader drew; if not exact, announce the step that it is expected to have."""
        if self._is_exact:
            self._fetched.append(batch)
            return
        step = max(self._next_step, self._stepper.steps)
        self._next_step = step + 1
        self._announce(step, batch.examples, batch)
        if batch.is_last:
            batch.portion.last_step = step + 1

    def yielded(self) -> None:
        if not self._fetched:
            return
        self._newest = batch = self._fetched.popleft()
        steps = self._stepper.steps
        # Batches without a step between them are one minibatch.
        self._examples = batch.examples + (self._examples if steps == self._steps_before else 0)
        self._steps_before = steps
        self._announce(steps, self._examples, batch)

    def done(self) -> None:
        batch, self._newest = self._newest, None
        if batch is not None and batch.is_last:
            steps = self._stepper.steps
            # If no step followed the batch, its gradient may be part of the next step.
            batch.portion.last_step = steps + 1 if steps == self._steps_before else steps

    def broken_off(self) -> None:
        """Note that the loop ended with the newest batch, which is done if a step followed."""
        if self._stepper.steps > self._steps_before:
            self.done()

    def _announce(self, step: int, examples: int, batch: _Batch) -> None:
        self._stepper.tell_examples(examples)
        if batch.is_last:
            self._stepper.end_portion_after(step)
