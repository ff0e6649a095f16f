"""Downpour SGD's worker (Dean et al. 2012, section 4.1, appendix algorithm 1.1): when to push, pull, step locally.

The threads of the appendix's pseudo-code race. Here they do not:

* A push begins after every `push_every` minibatches and carries all of them; with compat="paper" the literal test
  `step % push_every == 0` pushes the first minibatch alone.
* While a push is under way, gradients gather in the other buffer: no gradient is lost or pushed twice.
* Pulled parameters arrive in a buffer of their own and enter the model between minibatches; the first before the first.
* They may lack this worker's gradients that are under way.

The servers' answers say what the protocol in force wants from the next step on: a worker asks before each step (serial,
ssp), waits for the version that its round makes (hardsync, backup), overlaps nothing under either, or sums minibatches
(asgd:accumulate).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from pyps_client.arrays import split_tensors
from pyps_client.log import logger
from pyps_client.pull import LeaseCall
from pyps_client.push import Plan
from pyps_client.torch.buffers import SharedBuffers
from pyps_client.torch.gradients import Finite, Gradients, Minibatch
from pyps_client.torch.layout import Layout
from pyps_client.torch.memory import PinnedPages, TorchConverter
from pyps_client.torch.parameters import Parameters, Written
from pyps_client.torch.rates import RateChanges
from pyps_client.torch.schedule import Due, Schedule, Settings
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import RunFinished, ServerUnavailable
from pyps_wire.work_pb2 import LeaseReply


class Off:
    """overlap="off": a step pushes and pulls what is due, and waits. The other modes are subclasses."""

    # Buffers for gradients.
    num_buffers = 1
    # True where parameters may lie in the memory that is pulled into, since only a step pulls.
    may_alias = True
    # True where gradients may be computed in the memory that is pushed from.
    may_hand_out = True
    # True where pushes and pulls go on during the computation.
    in_parallel = False

    def __init__(self, steps: Steps) -> None:
        self._steps: Steps = weakref.proxy(steps)

    @classmethod
    def possible_with(cls, session: Worker, settings: Settings) -> type[Off]:
        """Return this mode, or the one to use instead with this worker's transports."""
        return cls

    @property
    def answered(self) -> int:
        """Minibatches, from the first on, whose gradients are answered, refused or left out."""
        return self._steps.sent

    def step(self, gradients: Minibatch, due: Due) -> None:
        """Gather one minibatch, push and pull what is due."""
        self._steps.gather(gradients, due)
        self._steps.push_and_pull()

    def collect(self) -> None:
        """Take over pushes and pulls that have ended; raise their errors."""

    def wait_for_push(self) -> None:
        """Return once no push is under way; raise its error."""

    def wait(self) -> None:
        """Return once nothing is under way, with pulled parameters in the model; raise errors."""

    def give_up(self) -> None:
        """End a backward pass that has no step: its gradients are about to be cleared."""

    def close(self) -> None:
        """End the threads and hooks."""


class Steps:
    """One worker's steps: gathers gradients, pushes, pulls, and steps locally in between. Used by one thread.

    Its worker is connected. For portions of data it is a `pyps_client.data.portions.Stepper`.
    """

    def __init__(
        self,
        worker: Worker,
        layout: Layout,
        settings: Settings,
        *,
        local_rates: Callable[[], Sequence[float]],
        rate_changes: RateChanges = dict,
        overlap: type[Off] = Off,
        buffers: SharedBuffers | None = None,
    ) -> None:
        """`local_rates`: the sizes of a local step now, one per parameter group; empty or zero for none."""
        self.session = worker
        # Returns the check of model and settings to make before anything is sent ahead of a step; the check takes
        # True before the first step.
        self.check_before: Callable[[], Callable[[bool], object] | None] = lambda: None
        # Examples in each minibatch from now on; None for an unknown number.
        self.examples_in_batch: int | None = None
        # Steps of an optimizer of the worker's own in what is gathered as one minibatch (LocalTraining).
        self.local_steps = 1
        # Where the worker's data stands after the newest minibatch.
        self.data_position = b""
        self.layout = layout
        self.view = worker.view
        self.schedule = Schedule(settings, worker.view)
        self.rescales_gradients = settings.rescales_gradients
        self.rate_changes = rate_changes
        self._local_rates = local_rates
        self._buffers = buffers
        # A device converts to the wire's type before the bus.
        on_host = all(block.device.type == "cpu" for block in layout.blocks)
        memory = worker.lend(overlap.num_buffers, converter=TorchConverter() if on_host else None)
        overlap = overlap.possible_with(worker, settings)
        self._private = memory.private
        devices = [block.device for block in layout.blocks if block.on_cuda]
        self._has_gpu = bool(devices)
        self._pinned = PinnedPages(chain(memory.parameters, *memory.gradients), devices)
        self.gradient_buffers = [Gradients(layout, each, codec=memory.converted_to) for each in memory.gradients]
        # The buffer that gathers now.
        self.gradients = self.gradient_buffers[0]
        may_alias = overlap.may_alias and not memory.follows
        self.parameters = Parameters(layout, memory.parameters, alias=may_alias, private=memory.private)
        if devices:
            worker.tell_landed(self.parameters.land)
        # Versions of pulled parameters that are not in the model yet; and of those in the model.
        self._pulled: Mapping[int, int] | None = None
        self.versions: Mapping[int, int] = {}
        # True where an error left a part of some shard in the model: such a shard has no version.
        self.torn = False
        self.written = Written(layout, self.parameters)
        # True until a step, or a push in a backward pass, has begun.
        self.is_first = True
        self.push_due = self.pull_due = False
        self.steps_since_pull = 0
        self.finite = Finite(layout.model)
        self._finished = self._warned_of_end = False
        # True once the last parameters of a run that is over are in the model.
        self.settled = False
        # Minibatches so far, empty steps included; and those that have left the buffer: under way, or left out.
        self.steps = self.sent = 0
        # The servers' answers to the newest answered push.
        self.receipts: Sequence[Receipt] = ()
        self.overlap = overlap(self)

    @property
    def finished(self) -> bool:
        """True when the run is over and takes no more gradients."""
        return self._finished or self.view.state.finished

    @property
    def steps_answered(self) -> int:
        """Minibatches, from the first on, whose gradients are answered, refused or left out."""
        try:
            self.overlap.collect()
        except RunFinished:
            self._finished = True
        return self.overlap.answered

    def start(self) -> None:
        """Pull the run's parameters into the model, before the first minibatch, once the worker may begin."""
        try:
            self.session.proceed()
        except RunFinished:
            self._finished = True
        self._pull()
        self.send_copies()
        self.written.note()

    def step(self, gradients: Minibatch) -> None:
        """Take one minibatch's gradients."""
        self.written.check(is_first=self.is_first)
        try:
            self._step(gradients)
        except RunFinished:
            self._finished = True
        finally:
            self.written.note()
        if (self._finished or self.view.state.finished) and not self.settled:
            self._settle()

    def tell_examples(self, count: int) -> None:
        self.examples_in_batch = count

    def end_portion_after(self, step: int) -> None:
        self.schedule.portion_ends.add(step)

    def idle(self) -> None:
        terms = self.view.state.terms
        if not (terms.current_version_only or terms.ask_to_proceed):
            return
        self.written.check(is_first=self.is_first)
        try:
            self._idle()
        except RunFinished:
            self._finished = True
        finally:
            self.written.note()

    def finish(self) -> None:
        self._finished = True
        if not self.settled:
            self._settle()

    def tell_over(self) -> None:
        """Log once that a loop goes on although the run is over."""
        if not self._warned_of_end:
            self._warned_of_end = True
            logger.warning(
                "the run %s is over: steps do nothing any more. Leave the loop where optimizer.finished is true, or "
                "write `for batch in optimizer.until_finished(loader)`.",
                self.session.run_id,
            )

    def flush(self) -> None:
        """Push what has gathered and wait for the answer. ServerUnavailable says how much was not delivered."""
        delivered = self.overlap.answered
        try:
            self.overlap.wait_for_push()
            delivered = self.sent
            if self.gradients.minibatch_count and not self.finished and self.seal():
                self._exchange(pulls=False)
            if not self.gradients.minibatch_count:
                self.sent = self.steps
        except RunFinished:
            self._finished = True
        except ServerUnavailable as lost:
            if delivered == self.steps:
                raise
            undelivered = f"The gradients of the last {self.steps - delivered} of {self.steps} minibatches"
            raise ServerUnavailable(f"{lost} {undelivered} were not delivered.") from None

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        """Ask for a portion; the parameters come with it where one mutex is held for both, and no gradient gathers."""
        # The check names DistributedDataParallel, which writes parameters too.
        if (check := self.check_before()) is not None:
            check(self.steps == 0)
        if self.overlap.in_parallel or not self.session.gives_out_data or self.gradients.minibatch_count:
            return ask(None)
        self.written.check(is_first=self.is_first)
        self.parameters.wait_until_free()
        try:
            return ask(self.session.with_parameters(self.parameters.vectors))
        finally:
            self.note_pulled()
            self.take_pulled()
            self.written.note()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the servers' present parameters by name. The model keeps its own until the next pull."""
        vectors = [np.empty(size, np.float32) for size in self.layout.model.group_sizes]
        self.session.snapshot(vectors)
        tensors = split_tensors(self.layout.model, vectors)
        return {name: torch.from_numpy(values) for name, values in tensors.items()}

    def before_clearing(self, *, in_place: bool) -> None:
        """End a backward pass that no step followed, before its gradients are cleared; raise the error of its push.

        `in_place`: the model's gradients become zero; they move to the pushed memory where the next minibatch is a push
        of its own.
        """
        try:
            self.overlap.give_up()
        except RunFinished:
            self._finished = True
        if in_place and self.overlap.may_hand_out and self.schedule.pushes_after(self.steps):
            self.gradients.hand_out()
        elif in_place:
            self.gradients.take_back()

    def residuals(self) -> dict[str, Any] | None:
        """Return the worker's residuals as tensors, once no push is under way."""
        try:
            self.overlap.wait_for_push()
        except RunFinished:
            self._finished = True
        saved = self.session.residuals()
        for shard in () if saved is None else saved["shards"].values():
            shard["values"] = torch.from_numpy(shard["values"])
        return saved

    def close(self, *, separate: bool = True) -> None:
        """End the threads, and the use of the shared memory; without `separate` the model's parameters stay in it."""
        self.overlap.close()
        if separate and not self._private:
            # Other processes see this memory: the model keeps its values elsewhere.
            self.gradients.take_back()
            self.parameters.separate()
        self._pinned.release()

    # The modes of overlap call these.

    def gather(self, gradients: Minibatch, due: Due) -> None:
        """Add one minibatch to what has gathered, unless its gradients are absent or of no version."""
        if self.torn:
            # The gradients were computed on no version that ever existed: this step only pulls.
            logger.warning("the parameters came in part when a step failed: the minibatch computed on them is left out")
            if self._buffers is not None:
                self._buffers.skipped()
            return
        for gradient in gradients:
            if gradient is not None:
                self._add(gradients, due)
                return
        if self.session.tables is not None and self.session.tables.gathers:
            self._add(gradients, due)

    def seal(self) -> bool:
        """Convert what has gathered for the wire; False where it is left out."""
        return self.finite.seal(self.gradients)

    def push_and_pull(self, push: Callable[[], Sequence[Receipt]] | None = None) -> None:
        """Push and pull what is due, and wait: in one call where both are due and possible together.

        `push` waits for a push that is under way already.
        """
        if self.push_due:
            self.push_due = False
            if self.gradients.minibatch_count and (push is not None or self.seal()):
                pulls = self.pull_due and not self.view.state.terms.ask_to_proceed
                try:
                    self._exchange(pulls=pulls, push=push)
                except BaseException:
                    # Parameters that came before the error serve the next step.
                    self.take_pulled()
                    raise
                # Parameters that came before the permission to begin a step are pulled again.
                self.pull_due = self.pull_due and (not pulls or self.view.state.terms.ask_to_proceed)
            if self.view.state.terms.ask_to_proceed:
                self.session.proceed()
        if self.pull_due or self.session.pull_needed:
            self.pull_due = False
            self._pull()
        else:
            self.take_pulled()

    def plan(self, *, pulls: bool) -> Plan:
        """Return the push of what has gathered; `pulls`: with a pull in the same exchange."""
        gathered = self.gradients
        return Plan(
            gathered.sealed,
            self.parameters.vectors if pulls else None,
            present=gathered.present,
            example_count=gathered.example_count,
            minibatch_count=gathered.minibatch_count * self.local_steps,
            base_versions=gathered.base_versions,
            newest_base_versions=gathered.newest_base_versions,
            kinds=gathered.kinds,
            learning_rates=self.rate_changes(),
            clock=self.steps,
            data_position=self.data_position,
            lent_index=0 if gathered is self.gradient_buffers[0] else 1,
        )

    def bring(self) -> None:
        """Pull into the parameters' buffer; on any thread."""
        self.parameters.wait_until_free()
        self.session.pull(self.parameters.vectors)

    def note_pulled(self) -> None:
        """Note that the buffer holds newer parameters than the model."""
        self._pulled = self.session.held_versions

    def take_pulled(self) -> bool:
        """Bring pulled parameters into the model; False where there are none."""
        versions, self._pulled = self._pulled, None
        if versions is None:
            return False
        if self.written.spoiled:
            self.written.spoiled = False
            if self.parameters.aliases:
                # The user wrote into the buffer, and not every shard has come since.
                versions = self.session.snapshot(self.parameters.vectors)
                self.parameters.separate()
        self.parameters.write()
        if self._buffers is not None:
            # Moves that have gathered: each is added whole, since it does not gather again.
            no_steps = [0.0] * (self.layout.model.num_groups - 1)
            self.parameters.step_locally(self.gradients.sums(), [*no_steps, -1.0])
            self._buffers.pulled()
        self.versions = versions
        self.torn = min(versions.values(), default=0) < 0
        self.steps_since_pull = 0
        return True

    def send_copies(self) -> None:
        """Send changed numbers to the other processes of a replica that hold copies."""

    def _step(self, gradients: Minibatch) -> None:
        # Before this step is counted, since it may raise the error of an earlier one.
        if self.overlap.in_parallel:
            self.overlap.collect()
        due = self.schedule.at(self.steps)
        self.steps = self.session.clock = self.steps + 1
        self.is_first = False
        self.push_due = self.push_due or due.push
        self.pull_due = self.pull_due or due.pull or self.torn
        self.overlap.step(gradients, due)
        if self.gradients.minibatch_count:
            self.gradients.take_back()
        else:
            self.sent = self.steps
        self.send_copies()

    def _idle(self) -> None:
        """Push that there is no gradient, and wait as every worker does."""
        self.overlap.wait()
        if self.torn:
            self._pull()
        self.schedule.follow(self.steps)
        self.steps = self.session.clock = self.steps + 1
        self.is_first = False
        absent = [False] * len(self.layout.parameters)
        self.session.exchange(Plan(self.gradients.vectors, present=absent, base_versions=self.versions))
        if not self.gradients.minibatch_count:
            self.sent = self.steps
        self.session.proceed()
        self._pull()
        self.send_copies()

    def _settle(self) -> None:
        self.settled = True
        self.session.hurry()
        self.flush()
        self.overlap.wait()
        self._pull()
        self.send_copies()
        self.written.note()

    def _add(self, gradients: Minibatch, due: Due) -> None:
        """Add a minibatch to what has gathered, where it is finite, and take a local step with it."""
        buffers = self._buffers
        moves = buffers.moves() if buffers is not None else []
        everything = [*gradients, *moves]
        # A pull that follows at once would overwrite a local step.
        steps_locally = self.schedule.overlaps or not due.pull
        accepted = self.finite.add(
            everything,
            to=self.gradients,
            versions=self.versions,
            example_count=self.examples_in_batch or 0,
            # The server checks the whole push before it applies any of it. The worker must check where it sums, steps
            # locally, or would have to undo its buffers.
            server_checks=(
                not self.overlap.in_parallel
                and self.push_due
                and self.gradients.minibatch_count == 0
                and not steps_locally
                and buffers is None
                and self.session.checks_first
            ),
        )
        if buffers is not None:
            if not accepted:
                buffers.skipped()
                return
            buffers.accepted(moves)
        if accepted and steps_locally and (sizes := self._local_rates()):
            # Buffers, the last group if there are any, have moved already.
            self.parameters.step_locally(everything, [*sizes, 0.0])

    def _exchange(self, *, pulls: bool, push: Callable[[], Sequence[Receipt]] | None = None) -> None:
        """Push sealed gradients, and pull in the same call; the buffer is empty then."""
        gradients = self.gradients
        if self._has_gpu:
            gradients.ready()
            self.parameters.wait_until_free()
        try:
            self.receipts = self.session.exchange(self.plan(pulls=pulls)) if push is None else push()
        finally:
            # After an error too: the worker has tried for as long as it may.
            gradients.clear()
            if pulls:
                # Some shards may have come before an error, and the model's parameters may lie in the vectors.
                self._pulled = self.session.held_versions
        if self.finite.unchecked:
            self.finite.note(self.receipts)

    def _pull(self) -> None:
        try:
            self.bring()
        except BaseException:
            # Some shards may have come, and one in part, into a model whose parameters lie in the vectors.
            if self.versions:
                self.note_pulled()
                self.take_pulled()
            raise
        self.note_pulled()
        self.take_pulled()
