"""Downpour SGD's worker (Dean et al. 2012, section 4.1, appendix algorithm 1.1): when to push, pull, step locally.

The appendix's pseudo-code lets its threads race; what is done about it:

* A push begins after every `push_every` minibatches, each carrying so many; with compat="paper" the literal
  test `step % push_every == 0` pushes the first minibatch alone.
* Gradients are swapped out with their buffer, and gathering goes on in the other while a push is under way:
  the sum of all pushed payloads is the sum of all computed gradients.
* Pulled parameters land in a buffer of their own and enter the model between minibatches only.
* They may lack this worker's own gradients that are still under way, as in the paper; with read_my_writes the
  worker takes those steps on them itself.
* The first pull is over before the first minibatch.

What a protocol wants beyond the paper comes with the servers' answers, and holds from the next step on: the worker asks
before its next step where steps are granted (serial, ssp), waits for the version that its round makes (hardsync, backup
workers), overlaps nothing under either, and sums as many minibatches as are wanted (asgd:accumulate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from pyps_client.departures import Departures
from pyps_client.log import logger
from pyps_client.pull import LeaseCall
from pyps_client.push import Plan
from pyps_client.torch.backward import Backward, Exchange
from pyps_client.torch.buffers import SharedBuffers
from pyps_client.torch.gradients import Finite, Gradients
from pyps_client.torch.layout import Layout
from pyps_client.torch.memory import PinnedPages, TorchConverter
from pyps_client.torch.overlap import Overlap
from pyps_client.torch.parameters import LocalSteps, Parameters, Written
from pyps_client.torch.rates import RateChanges
from pyps_client.torch.schedule import Due, Pace, Schedule
from pyps_client.transport.threads import Future
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt
from pyps_wire.errors import InvalidArgument, RunFinished, ServerUnavailable
from pyps_wire.work_pb2 import LeaseReply

# With overlap, how many pushes' worth of minibatches may gather, and how many pulls may be missed, before the
# worker waits for the one under way. A worker that ran on without bound would at last push a sum that no rate
# was meant for.
BEHIND_MAX = 8


class Steps:
    """One worker's steps: gathers gradients, pushes, pulls, and steps locally in between. Used by one thread.

    Its worker is connected, and lends it the memory for gradients and parameters. For portions of data it is a
    `pyps_client.data.portions.Stepper`.
    """

    def __init__(
        self,
        worker: Worker,
        layout: Layout,
        *,
        pace: Pace,
        local_rates: Callable[[], Sequence[float]],
        rate_changes: RateChanges = dict,
        buffers: SharedBuffers | None = None,
        read_my_writes: bool = False,
    ) -> None:
        """`local_rates`: the sizes of a local step now, one a parameter group; empty or zero for none."""
        self.session = worker
        # Returns the check of model and settings that precedes what is sent ahead of a step, if there is one; the check
        # takes whether the step is the first.
        self.check_before: Callable[[], Callable[[bool], object] | None] = lambda: None
        # Examples in each minibatch from now on; None where nobody says.
        self.examples_in_batch: int | None = None
        self._view = worker.view
        self._layout = layout
        self._schedule = Schedule(pace, worker.view)
        self._local_rates = local_rates
        self._rate_changes = rate_changes
        self._buffers = buffers
        self._read_my_writes = read_my_writes
        overlaps = pace.overlap == "step"
        # What a device converts crosses its bus in the wire's type.
        on_host = all(block.device.type == "cpu" for block in layout.blocks)
        lent = worker.lend(2 if overlaps else 1, converter=TorchConverter() if on_host else None)
        self._private = lent.private
        devices = [block.device for block in layout.blocks if block.on_cuda]
        self._pinned = PinnedPages(chain(lent.parameters, *lent.gradients), devices) if devices else None
        # As they were lent; those that gather now, and with overlap the others.
        self._lent = [Gradients(layout, vectors, codec=lent.converted_to) for vectors in lent.gradients]
        self._gradients = self._lent[0]
        self._overlap = Overlap(self._lent[1] if overlaps else None)
        # What begins to leave in the backward pass, if anything may.
        self._backward: Backward | None = None
        if pace.overlap == "backward":
            self._backward = self._leaving_early()
        # What lands beside the computation must not be in the model at once.
        alias = not overlaps and self._backward is None
        self._parameters = Parameters(layout, lent.parameters, alias=alias, private=lent.private)
        if devices:
            worker.tell_landed(self._parameters.land)
        # Versions of what a pull has brought, which is not in the model yet; and of the parameters in the model.
        self._pulled: Mapping[int, int] | None = None
        self._versions: Mapping[int, int] = {}
        # Whether a shard in the model came in part only, as an error or Ctrl-C amid it leaves it: it has no version.
        self._torn = False
        self._local = LocalSteps(layout, self._parameters)
        self._written = Written(layout, self._parameters.value_of)
        # Until a step, or a push in a backward pass, has begun: what that brings may be in the place of the first pull.
        self._is_first = True
        self._push_due = False
        self._pull_due = False
        self._steps_since_pull = 0
        self._finite = Finite(layout.model)
        self._finished = self._settled = self._told_of_end = False
        # Minibatches so far, steps without one included.
        self.steps = 0
        # Minibatches that had left the buffer, on their way or left out, before the newest push and with it.
        self._sent_before = 0
        self._sent = 0
        # The servers' answers to the newest push that was answered.
        self.receipts: Sequence[Receipt] = ()

    @property
    def finished(self) -> bool:
        """True when the run is over and takes no more gradients."""
        return self._finished or self._view.state.finished

    @property
    def skipped(self) -> int:
        """Minibatches and sums of minibatches that were left out because they were not finite."""
        return self._finite.skipped

    @property
    def steps_answered(self) -> int:
        """Minibatches, from the first on, that are done with: their gradients answered, refused or left out."""
        try:
            self._collect()
        except RunFinished:
            self._finished = True
        return self._sent if self._overlap.in_flight is None else self._sent_before

    def start(self) -> None:
        """Pulls the run's parameters into the model, before the first minibatch, once the worker may begin."""
        try:
            self.session.proceed()
        except RunFinished:
            self._finished = True
        self._pull()
        self._written.note()

    def step(self, gradients: Sequence[torch.Tensor | None], *, example_count: int | None = None) -> None:
        """Takes one minibatch's gradients, one entry a parameter; None where there is none.

        `example_count`: `examples_in_batch` by default.
        """
        self._written.check(is_first=self._is_first)
        try:
            self._step(gradients, (example_count if example_count is not None else self.examples_in_batch) or 0)
        except RunFinished:
            self._finished = True
        finally:
            if self._backward is not None:
                self._backward.end()
            self._written.note()
        if not self._settled and (self._finished or self._view.state.finished):
            self._settle()

    def tell_examples(self, count: int) -> None:
        """Says how many examples the minibatch that comes next has."""
        self.examples_in_batch = count

    def end_portion_after(self, step: int) -> None:
        """Says that minibatch number `step`, from 0, is the last of its portion of data."""
        self._schedule.portion_ends.add(step)

    def idle(self) -> None:
        """Takes a step without a minibatch, where others wait for each worker's steps."""
        terms = self._view.state.terms
        if not (terms.current_version_only or terms.ask_to_proceed):
            return
        self._written.check(is_first=self._is_first)
        try:
            self._idle()
        except RunFinished:
            self._finished = True
        finally:
            self._written.note()

    def finish(self) -> None:
        """Takes over that the run is over, and brings its parameters into the model."""
        self._finished = True
        if not self._settled:
            self._settle()

    def tell_over(self) -> None:
        """Says once that a loop goes on although the run is over."""
        if not self._told_of_end:
            self._told_of_end = True
            logger.warning(
                "the run %s is over: steps do nothing any more. Leave the loop where optimizer.finished is true, or "
                "write `for batch in optimizer.until_finished(loader)`.",
                self.session.run_id,
            )

    def flush(self) -> None:
        """Pushes what has gathered and waits for the answer. ServerUnavailable says how much was not delivered."""
        delivered = self._sent if self._overlap.in_flight is None else self._sent_before
        try:
            self._wait_for(self._overlap.pushing)
            delivered = self._sent
            if self._gradients.minibatch_count and not self.finished and self._seal():
                self._exchange(pulls=False)
            if not self._gradients.minibatch_count:
                self._sent = self.steps
        except RunFinished:
            self._finished = True
        except ServerUnavailable as lost:
            if delivered == self.steps:
                raise
            undelivered = f"The gradients of the last {self.steps - delivered} of {self.steps} minibatches"
            raise ServerUnavailable(f"{lost} {undelivered} were not delivered.") from None

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        """Asks for a portion; the parameters come with it where one mutex is held for both, and no gradient gathers."""
        # DistributedDataParallel writes parameters too: what wrote them is the better word.
        if (check := self.check_before()) is not None:
            check(self.steps == 0)
        if self._overlap.is_used or not self.session.gives_out_data or self._gradients.minibatch_count:
            return ask(None)
        self._written.check(is_first=self._is_first)
        self._parameters.wait_until_free()
        try:
            return ask(self.session.with_parameters(self._parameters.vectors))
        finally:
            self._pulled = self.session.held_versions
            self._take_pulled()
            self._written.note()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The servers' parameters as they are now, by name. The model keeps its own until the next pull."""
        vectors = [np.empty(size, np.float32) for size in self._layout.model.group_sizes]
        self.session.snapshot(vectors)
        return self._parameters.tensors_of(vectors)

    def hand_out_gradients(self) -> None:
        """Lets the next minibatch's gradients be computed right where they are pushed from, where it goes alone.

        The model's gradients lose their values, and are to be made zero.
        """
        if not self._overlap.is_used and self._schedule.pushes_after(self.steps):
            self._gradients.hand_out()
        else:
            self._gradients.take_back()

    def give_up_backward(self) -> None:
        """Ends a backward pass that broke off, or that no step followed: its gradients are to be cleared.

        Raises what was raised where shards were to leave, as the step would have.
        """
        if self._backward is None:
            return
        num_answered = self._backward.give_up()
        if num_answered:
            logger.warning(
                "a backward pass was broken off, or no step() followed it: %d of %d shards had left, as overlap is "
                "'backward', and count; the rest of its push is left out",
                *(num_answered, self.session.partition.num_shards),
            )
        try:
            self._backward.receipts()
        except RunFinished:
            self._finished = True

    def close(self, *, separate: bool = True) -> None:
        """Ends the threads beside the computation, and the use of what the worker lent.

        Without `separate` the model's parameters stay where they lie.
        """
        if self._backward is not None:
            self._backward.close()
        self._overlap.close()
        if separate and not self._private:
            # What other processes see is let go: the model keeps what it has.
            self._gradients.take_back()
            self._parameters.separate()
        if self._pinned is not None:
            self._pinned.release()

    def _settle(self) -> None:
        """Brings the finished run's parameters into the model."""
        self._settled = True
        # There is nothing to come but the end.
        self.session.hurry()
        self.flush()
        self._wait_for(self._overlap.pulling)
        self._pull()
        self._written.note()

    def _step(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        if self._overlap.is_used:
            self._collect()
        step = self.steps
        due = self._schedule.at(step)
        self.steps = self.session.clock = step + 1
        self._is_first = False
        self._push_due = self._push_due or due.push
        self._pull_due = self._pull_due or due.pull or self._torn
        self._gather(gradients, example_count, due)
        if self._schedule.overlaps:
            if due.ends_portion:
                # Nothing of the next portion comes into its push.
                self._wait_for(self._overlap.pushing)
            self._go_on_beside()
        else:
            if self._overlap.is_used:
                self._come_back()
            self._push_and_pull()
        if self._gradients.minibatch_count:
            self._gradients.take_back()
        else:
            self._sent = self.steps

    def _idle(self) -> None:
        """Says in so many words that there is no gradient, and waits for what every worker waits for."""
        self._come_back()
        if self._torn:
            self._pull()
        self._schedule.follow(self.steps)
        self.steps = self.session.clock = self.steps + 1
        self._is_first = False
        absent = [False] * len(self._layout.parameters)
        self.session.exchange(Plan(self._gradients.vectors, present=absent, base_versions=self._versions))
        if not self._gradients.minibatch_count:
            self._sent = self.steps
        self.session.proceed()
        self._pull()

    def _gather(self, gradients: Sequence[torch.Tensor | None], example_count: int, due: Due) -> None:
        if self._backward is not None and self._backward.is_under_way:
            self._end_backward(self._backward, gradients, example_count)
            return
        if self._torn:
            # They were computed on no version that there ever was, and say nothing of one: this step only pulls.
            logger.warning("the parameters came in part when a step failed: the minibatch computed on them is left out")
            if self._buffers is not None:
                self._buffers.skipped()
            return
        for gradient in gradients:
            if gradient is not None:
                self._add(gradients, example_count, due)
                return

    def _add(self, gradients: Sequence[torch.Tensor | None], example_count: int, due: Due) -> None:
        """Adds a minibatch to what has gathered, where it is finite; takes a step of the worker's own with it."""
        buffers = self._buffers
        moves = buffers.moves() if buffers is not None else []
        everything = [*gradients, *moves]
        # Else the pull that follows overwrites a step of the worker's own.
        steps_locally = self._schedule.overlaps or not due.pull
        accepted = self._finite.add(
            everything,
            to=self._gradients,
            versions=self._versions,
            example_count=example_count,
            # It goes alone and at once to a server that looks for NaN before it applies any of it; else the worker
            # takes a step with it, or, with buffers, its own statistics would have to be undone.
            server_checks=(
                not self._overlap.is_used
                and self._push_due
                and self._gradients.minibatch_count == 0
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
            # Buffers, the last group if they are one, have moved already.
            self._local.step(everything, [*sizes, 0.0])

    def _push_and_pull(self) -> None:
        """Pushes and pulls what is due, and waits for it: in one where both are, and nothing comes in between."""
        if self._push_due:
            # The end of a push's worth of minibatches.
            self._push_due = False
            if self._gradients.minibatch_count and self._seal():
                pulls = self._pull_due and not self._view.state.terms.ask_to_proceed
                try:
                    self._exchange(pulls=pulls)
                except BaseException:
                    # What came before the error is noted for the next step, should there be one.
                    self._take_pulled()
                    raise
                self._pull_due = self._pull_due and not pulls
                if pulls and self._view.state.terms.ask_to_proceed:
                    # What came with the push came before the leave to begin a step.
                    self._pull_due = True
            if self._view.state.terms.ask_to_proceed:
                self.session.proceed()
        if self._pull_due or self.session.pull_needed:
            self._pull_due = False
            self._pull()
        else:
            self._take_pulled()

    def _go_on_beside(self) -> None:
        """Begins what is due beside the computation, and waits only where too much is behind."""
        overlap, schedule = self._overlap, self._schedule
        if self._gradients.minibatch_count >= BEHIND_MAX * schedule.push_every:
            self._wait_for(overlap.pushing)
        self._steps_since_pull += 1
        if self._steps_since_pull >= BEHIND_MAX * schedule.pull_every:
            self._wait_for(overlap.pulling)
        # What landed is taken first: a pull rewrites the buffer.
        self._take_pulled()
        pull_needed = self.session.pull_needed
        if self._push_due and overlap.pushing is None:
            self._push_due = False
            if self._gradients.minibatch_count and self._seal():
                # A pull that is needed waits for others, which a push must not.
                pulls = self._pull_due and not pull_needed and overlap.pulling is None
                self._pull_due = self._pull_due and not pulls
                self._begin_push(pulls=pulls)
            if self._view.state.terms.ask_to_proceed:
                self.session.proceed()
        if (self._pull_due or pull_needed) and overlap.pulling is None:
            self._pull_due = False
            overlap.pull(self._bring)

    def _begin_push(self, *, pulls: bool) -> None:
        """Begins to push sealed gradients, and to pull in one with it; gathers in the other buffer from now on."""
        gradients, plan = self._gradients, self._plan(pulls=pulls)
        self._sent_before, self._sent = self._sent, self.steps

        def exchange() -> Sequence[Receipt]:
            gradients.ready()
            if pulls:
                self._parameters.wait_until_free()
            return self.session.exchange(plan)

        self._gradients = self._overlap.push(gradients, exchange, pulls=pulls)

    def _exchange(self, *, pulls: bool) -> None:
        """Pushes sealed gradients, and pulls what is newer in one; the buffer is empty then."""
        gradients = self._gradients
        if self._pinned is not None:
            # Devices may be at it still.
            gradients.ready()
            self._parameters.wait_until_free()
        try:
            if self._backward is not None and self._backward.is_under_way:
                self.receipts = self._backward.receipts()
            else:
                self.receipts = self.session.exchange(self._plan(pulls=pulls))
        finally:
            # After an error too: the worker has tried for as long as it was told to.
            gradients.clear()
            if pulls:
                # Likewise: some shards may have come, and the model's parameters may lie in the vectors.
                self._pulled = self.session.held_versions
        self._finite.note(self.receipts)

    def _plan(self, *, pulls: bool) -> Plan:
        """The push of what was sealed."""
        gathered = self._gradients
        return Plan(
            gathered.vectors,
            self._parameters.vectors if pulls else None,
            present=gathered.present,
            example_count=gathered.example_count,
            minibatch_count=gathered.minibatch_count,
            base_versions=gathered.base_versions,
            newest_base_versions=gathered.newest_base_versions,
            kinds=gathered.kinds,
            learning_rates=self._rate_changes(),
            clock=self.steps,
            lent_index=0 if gathered is self._lent[0] else 1,
        )

    def _seal(self) -> bool:
        """True when what has gathered may go on its way; else it is left out."""
        if self._backward is not None and self._backward.is_under_way:
            return True
        return self._finite.seal(self._gradients)

    def _leaving_early(self) -> Backward | None:
        """What begins each push in the backward pass; None where nothing could leave by itself."""
        if self.session.clips:
            raise InvalidArgument(
                "overlap is 'backward', but the servers clip each push by its norm (--clip-norm), which nobody knows "
                "before all of it is computed: use overlap='step' or 'off'."
            )
        if not self.session.goes_by_calls:
            logger.info(
                "overlap is 'backward', but a server sees this worker's gradients where they lie and takes a push as "
                "one: each push leaves in its step, whole, as with 'off'"
            )
            return None
        return Backward(self._layout, self.session.partition, self._gradients, self._begin_backward)

    def _begin_backward(self, departures: Departures) -> Exchange | None:
        """The exchange of what departs as the backward pass computes it; None where a push waits for its step."""
        self._schedule.follow(self.steps)
        if not self._schedule.leaves_early or self.finished or self._gradients.minibatch_count or self._torn:
            return None
        # As a step does before anything leaves.
        if (check := self.check_before()) is not None:
            check(self.steps == 0)
        self._written.check(is_first=self._is_first)
        self._is_first = False
        plan = self._plan(pulls=True)
        plan.departures, plan.minibatch_count, plan.clock = departures, 1, self.steps + 1
        plan.example_count = self.examples_in_batch or 0
        plan.base_versions = plan.newest_base_versions = self._versions

        def exchange() -> Sequence[Receipt]:
            self._parameters.wait_until_free()
            return self.session.exchange(plan)

        return exchange

    def _end_backward(self, backward: Backward, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        """Lets the rest of the push leave that the backward pass began, and waits for its end."""
        if example_count != (self.examples_in_batch or 0):
            raise InvalidArgument(
                f"step(examples={example_count}) comes too late: with overlap='backward' gradients have begun to "
                f"leave, as those of {self.examples_in_batch or 0} examples. Set optimizer.examples_in_batch before "
                "backward(), or use pyps_client.data.count_examples."
            )
        if self._rate_changes():
            raise InvalidArgument(
                "The learning rate or the momentum was changed between backward() and step(), but with "
                "overlap='backward' gradients have begun to leave at the old one: change it before backward()."
            )
        if backward.seal(gradients):
            self._finite.passed()
        else:
            if backward.num_answered:
                logger.warning(
                    "%d of %d shards had left before a gradient was found that is not finite, and count; the rest of "
                    "the push is left out",
                    *(backward.num_answered, self.session.partition.num_shards),
                )
            self._finite.leave_out(gradients, for_others=False)
        # It goes by what servers say, not by what gathered; where they were sent nothing a pull follows.
        self._gradients.minibatch_count = int(backward.has_left)

    def _pull(self) -> None:
        """Pulls into the model, and waits for it."""
        try:
            self._bring()
        except BaseException:
            # Some shards may have come, and one in part, into a model whose parameters lie in the vectors.
            if self._versions:
                self._pulled = self.session.held_versions
                self._take_pulled()
            raise
        self._pulled = self.session.held_versions
        self._take_pulled()

    def _bring(self) -> None:
        """Pulls into the parameters' buffer; on any thread."""
        self._parameters.wait_until_free()
        self.session.pull(self._parameters.vectors)

    def _take_pulled(self) -> bool:
        """Brings what was pulled into the model; False where nothing was."""
        versions, self._pulled = self._pulled, None
        if versions is None:
            return False
        if self._parameters.written_elsewhere():
            # Something else lies where the pulled parameters were, and not all of them came anew just now.
            versions = self.session.snapshot(self._parameters.vectors)
            self._parameters.separate()
        self._parameters.write()
        if self._local.masters:
            self._local.reset()
        if self._read_my_writes or self._buffers is not None:
            self._reapply()
        if self._buffers is not None:
            self._buffers.pulled()
        self._versions = versions
        self._torn = min(versions.values(), default=0) < 0
        self._steps_since_pull = 0
        return True

    def _reapply(self) -> None:
        """Takes the steps of what the servers may not have yet on parameters that were pulled; with buffers, theirs."""
        num_groups = self._layout.model.num_groups
        sizes = (self._local_rates() if self._read_my_writes else ()) or [0.0] * num_groups
        trained = sizes[: num_groups - (self._buffers is not None)]
        if self._read_my_writes and self._overlap.in_flight is not None:
            self._local.step(self._overlap.in_flight.sums(), [*trained, 0.0])
        # How far buffers moved is added whole: what has gathered is not to be gathered again.
        self._local.step(self._gradients.sums(), [*trained, -1.0])

    # Beside the computation.

    def _collect(self) -> None:
        """Takes over what has ended beside the computation; raises what it raised."""
        self._end(*self._overlap.over())

    def _end(self, pushed: bool, pulled: bool) -> None:
        """Takes over the end of the push, and of the pull, that are under way; raises what it raised."""
        if not (pushed or pulled):
            return
        receipts = self._overlap.end(pushed=pushed, pulled=pulled)
        if receipts is not None:
            self.receipts = receipts
            self._finite.note(receipts)
        # Where an exchange's round waits for other workers, a pull follows.
        if pulled and not (pushed and self.session.pull_needed):
            self._pulled = self.session.held_versions

    def _wait_for(self, future: Future[Any] | None) -> None:
        """Returns once it is over; raises what it raised."""
        if future is not None:
            future.wait()
            self._end(future is self._overlap.pushing, future is self._overlap.pulling)

    def _come_back(self) -> None:
        """Returns once nothing is under way beside the computation, with what was pulled in the model."""
        self._wait_for(self._overlap.pushing)
        self._wait_for(self._overlap.pulling)
        self._take_pulled()
