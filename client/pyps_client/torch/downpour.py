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

import numpy as np
import torch

from pyps_client.torch.conversion import TorchConverter
from pyps_client.torch.gradient_buffer import GradientBuffer
from pyps_client.torch.layout import Layout
from pyps_client.torch.local_steps import LocalSteps
from pyps_client.torch.overlap import BlockingLink, Link, SessionLike, ThreadedLink
from pyps_client.torch.pace import Pace, Tempo
from pyps_client.torch.parameter_buffer import ParameterBuffer
from pyps_client.torch.pinned import PinnedPages
from pyps_client.torch.rates import RateChanges
from pyps_client.torch.screen import Screen
from pyps_client.torch.shared_buffers import SharedBuffers
from pyps_client.torch.written import Written
from pyps_client.work import LeaseCall
from pyps_wire.common_pb2 import REASON_FINISHED, Receipt
from pyps_wire.errors import RunFinished, ServerUnavailable
from pyps_wire.work_pb2 import LeaseReply

# With overlap, how many pushes' worth of minibatches may gather, and how many pulls may be missed, before the
# worker waits for the one under way. A worker that ran on without bound would at last push a sum that no rate
# was meant for.
BEHIND_MAX = 8


class Downpour:
    """One worker's steps: gathers gradients, pushes, pulls, and steps locally in between. Used by one thread.

    Its session is connected, and lends it the memory for gradients and parameters.
    """

    def __init__(
        self,
        session: SessionLike,
        layout: Layout,
        *,
        pace: Pace,
        local_rates: Callable[[], Sequence[float]],
        rate_changes: RateChanges = dict,
        buffers: SharedBuffers | None = None,
        read_my_writes: bool = False,
    ) -> None:
        self._session = session
        self._layout = layout
        self._tempo = Tempo(pace, session)
        # The sizes of a local step now, one a parameter group; zero for none.
        self._local_rates = local_rates
        self._rate_changes = rate_changes
        self._buffers = buffers
        self._read_my_writes = read_my_writes
        overlaps = pace.overlap == "step"
        # What a device converts crosses its bus in the wire's type.
        on_host = all(block.device.type == "cpu" for block in layout.blocks)
        lent = session.lend(2 if overlaps else 1, converter=TorchConverter() if on_host else None)
        self._private = lent.private
        devices = [block.device for block in layout.blocks if block.on_cuda]
        self._pinned = PinnedPages(chain(lent.parameters, *lent.gradients), devices) if devices else None
        self._gradients = GradientBuffer(layout, lent.gradients[0], codec=lent.converted_to)
        # What lands beside the computation must not be in the model at once.
        self._parameters = ParameterBuffer(layout, lent.parameters, alias=not overlaps, private=lent.private)
        self._local = LocalSteps(layout, self._parameters)
        self._written = Written(layout, self._parameters.value_of)
        self._blocking = None if overlaps else BlockingLink(session, self._parameters)
        self._link: Link = self._blocking or self._threaded(
            GradientBuffer(layout, lent.gradients[1], codec=lent.converted_to)
        )
        # Versions of the parameters in the model.
        self._versions: Mapping[int, int] = {}
        self._push_due = False
        self._pull_due = False
        self._steps_since_pull = 0
        self._screen = Screen(layout.model)
        self._finished = False
        self._settled = False
        # Minibatches so far, steps without one included.
        self.steps = 0
        # Minibatches that had left the buffer, on their way or left out, before the newest push and with it.
        self._sent_before = 0
        self._sent = 0

    @property
    def finished(self) -> bool:
        """True when the run is over and takes no more gradients."""
        return self._finished or self._session.finished

    @property
    def receipts(self) -> Sequence[Receipt]:
        """The servers' answers to the newest push that was answered."""
        return self._link.receipts

    @property
    def skipped(self) -> int:
        """Minibatches and sums of minibatches that were left out because they were not finite."""
        return self._screen.skipped

    @property
    def steps_answered(self) -> int:
        """Minibatches, from the first on, that are done with: their gradients answered, refused or left out."""
        try:
            self._link.raise_error()
        except RunFinished:
            self._finished = True
        return self._sent if self._link.in_flight is None else self._sent_before

    def start(self) -> None:
        """Pulls the run's parameters into the model, before the first minibatch, once the worker may begin."""
        try:
            self._session.proceed()
        except RunFinished:
            self._finished = True
        self._link.pull()
        self._link.wait_for_pull()
        self._take_pulled()

    def step(self, gradients: Sequence[torch.Tensor | None], *, example_count: int = 0) -> None:
        """Takes one minibatch's gradients, one entry a parameter; None where there is none."""
        self._written.check(is_first=self.steps == 0)
        try:
            with torch.no_grad():
                self._step(gradients, example_count)
        except RunFinished:
            self._finished = True
        finally:
            self._written.note()
        if self.finished and not self._settled:
            self._settle()

    def end_portion_after(self, step: int) -> None:
        """Says that minibatch number `step`, from 0, is the last of its portion of data."""
        self._tempo.end_portion_after(step)

    def idle(self) -> None:
        """Takes a step without a minibatch, where others wait for each worker's steps."""
        try:
            if self._session.current_version_only or self._session.ask_to_proceed:
                self._written.check(is_first=self.steps == 0)
                with torch.no_grad():
                    self._idle()
        except RunFinished:
            self._finished = True

    def finish(self) -> None:
        """Takes over that the run is over, and brings its parameters into the model."""
        self._finished = True
        if not self._settled:
            with torch.no_grad():
                self._settle()

    def flush(self) -> None:
        """Pushes what has gathered and waits for the answer. ServerUnavailable says how much was not delivered."""
        delivered = self._sent if self._link.in_flight is None else self._sent_before
        try:
            self._link.wait_for_push()
            delivered = self._sent
            if self._gradients.minibatch_count and not self.finished:
                self._push()
                self._link.wait_for_push()
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
        if self._blocking is None or not self._session.gives_out_data or self._gradients.minibatch_count:
            return ask(None)
        self._written.check(is_first=self.steps == 0)
        with torch.no_grad():
            try:
                return self._blocking.lease(ask)
            finally:
                self._take_pulled()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The servers' parameters as they are now, by name. The model keeps its own until the next pull."""
        vectors = [np.empty(size, np.float32) for size in self._layout.model.group_sizes]
        self._session.snapshot(vectors)
        return self._parameters.tensors_of(vectors)

    def hand_out_gradients(self) -> None:
        """Lets the next minibatch's gradients be computed right where they are pushed from, where it goes alone.

        The model's gradients lose their values, and are to be made zero.
        """
        if self._blocking is not None and self._tempo.push_after(self.steps):
            self._gradients.hand_out()
        else:
            self._gradients.take_back()

    def close(self, *, separate: bool = True) -> None:
        """Ends the link's threads, and the use of what the session lent.

        Without `separate` the model's parameters stay where they lie.
        """
        self._link.close()
        if separate and not self._private:
            # What other processes see is let go: the model keeps what it has.
            self._gradients.take_back()
            self._parameters.separate()
        if self._pinned is not None:
            self._pinned.release()

    def _threaded(self, spare: GradientBuffer) -> ThreadedLink:
        return ThreadedLink(self._session, self._parameters, spare)

    def _settle(self) -> None:
        """Brings the finished run's parameters into the model."""
        self._settled = True
        # There is nothing to come but the end.
        self._session.hurry()
        self.flush()
        self._link.wait_for_pull()
        self._link.take_pulled()
        self._link.pull()
        self._link.wait_for_pull()
        self._take_pulled()

    def _step(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        self._link.raise_error()
        step = self.steps
        self._tempo.follow(step)
        self.steps = self._session.clock = step + 1
        ends_portion = self._tempo.ends_portion(step)
        self._push_due = self._push_due or ends_portion or self._tempo.push_after(step)
        self._pull_due = self._pull_due or self._tempo.pull_before(step + 1)
        self._gather(gradients, example_count)
        if ends_portion:
            # Nothing of the next portion comes into its push.
            self._link.wait_for_push()
        if not self._exchange_if_due():
            if self._push_if_due():
                self._proceed()
            self._steps_since_pull += 1
            self._pull_if_due()
        if self._gradients.minibatch_count:
            self._gradients.take_back()
        else:
            self._sent = self.steps
        self._finished = self._finished or any(receipt.reason == REASON_FINISHED for receipt in self.receipts)

    def _idle(self) -> None:
        """Says in so many words that there is no gradient, and waits for what every worker waits for."""
        self._link.wait_for_push()
        self._link.wait_for_pull()
        self._take_pulled()
        self._tempo.follow(self.steps)
        self.steps = self._session.clock = self.steps + 1
        absent = [False] * len(self._layout.parameters)
        self._session.push(
            self._gradients.vectors,
            present=absent,
            base_versions=self._versions,
            newest_base_versions=self._versions,
        )
        if not self._gradients.minibatch_count:
            self._sent = self.steps
        self._session.proceed()
        self._link.pull()
        self._link.wait_for_pull()
        self._take_pulled()

    def _gather(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        if any(gradient is not None for gradient in gradients):
            self._add(gradients, example_count)

    def _add(self, gradients: Sequence[torch.Tensor | None], example_count: int) -> None:
        """Adds a minibatch to what has gathered, where it is finite; takes a step of the worker's own with it."""
        moves = self._buffers.moves() if self._buffers is not None else []
        everything = [*gradients, *moves]
        accepted = self._screen.add(
            everything,
            to=self._gradients,
            versions=self._versions,
            example_count=example_count,
            servers_look=self._servers_look(),
        )
        if not accepted:
            if self._buffers is not None:
                self._buffers.skipped()
            return
        if self._buffers is not None:
            self._buffers.accepted(moves)
        if self._steps_locally():
            # Buffers, the last group if they are one, have moved already.
            self._local.step(everything, [*self._local_rates(), 0.0])

    def _steps_locally(self) -> bool:
        """Whether a minibatch is one for a step of the worker's own: else the pull that follows overwrites it."""
        return self._tempo.overlaps or not self._tempo.pull_before(self.steps)

    def _exchange_if_due(self) -> bool:
        """Pushes and pulls in one where both are due; False where they are not, or something comes in between."""
        if (
            self._blocking is None
            or not (self._push_due and self._pull_due and self._gradients.minibatch_count)
            or self._session.ask_to_proceed
        ):
            return False
        if not self._seal():
            return False
        self._push_due = self._pull_due = False
        try:
            self._blocking.exchange(self._gradients, self._rate_changes())
        except BaseException:
            # What came before the error is noted for the next step, should there be one.
            self._take_pulled()
            raise
        self._screen.note(self.receipts)
        asked = self._session.ask_to_proceed
        self._session.proceed()
        if asked or self._session.pull_needed:
            self._blocking.pull()
        self._take_pulled()
        return True

    def _push_if_due(self) -> bool:
        """True when the worker stands at the end of a push's worth of minibatches."""
        if not self._tempo.overlaps or self._gradients.minibatch_count >= BEHIND_MAX * self._tempo.minibatches_in_push:
            self._link.wait_for_push()
        if not self._push_due or not self._link.can_push():
            return False
        self._push_due = False
        if self._gradients.minibatch_count:
            self._push()
        return True

    def _push(self) -> None:
        if self._seal():
            self._sent_before, self._sent = self._sent, self.steps
            self._gradients = self._link.push(self._gradients, self._rate_changes())
            self._screen.note(self.receipts)

    def _seal(self) -> bool:
        """True when what has gathered may go on its way; else it is left out."""
        return self._screen.seal(self._gradients)

    def _proceed(self) -> None:
        if not self._tempo.overlaps:
            self._link.wait_for_push()
        self._session.proceed()

    def _pull_if_due(self) -> None:
        if not self._tempo.overlaps or self._steps_since_pull >= BEHIND_MAX * self._tempo.minibatches_to_pull:
            self._link.wait_for_pull()
        self._take_pulled()
        if (self._pull_due or self._session.pull_needed) and self._link.can_pull():
            self._pull_due = False
            self._link.pull()
            if not self._tempo.overlaps:
                self._link.wait_for_pull()
            # A blocking pull is there already.
            self._take_pulled()

    def _take_pulled(self) -> bool:
        """Brings what was pulled into the model; False where nothing was."""
        versions = self._link.take_pulled()
        if versions is None:
            return False
        if self._parameters.written_elsewhere():
            # Something else lies where the pulled parameters were, and not all of them came anew just now.
            versions = self._session.snapshot(self._parameters.vectors)
            self._parameters.separate()
        self._parameters.write()
        self._local.reset()
        if self._read_my_writes and self._link.in_flight is not None:
            self._local.reapply(self._link.in_flight, [*self._local_rates(), 0.0])
        if self._read_my_writes or self._buffers is not None:
            own = self._local_rates() if self._read_my_writes else [0.0] * len(self._local_rates())
            # How far buffers moved is added whole: what has gathered is not to be gathered again.
            self._local.reapply(self._gradients, [*own, -1.0])
        if self._buffers is not None:
            self._buffers.pulled()
        self._written.note()
        self._versions = versions
        self._steps_since_pull = 0
        return True

    def _servers_look(self) -> bool:
        """True where a minibatch goes alone and at once to a server that looks for NaN before it applies any of it."""
        return (
            self._session.checks_first
            and self._blocking is not None
            and self._push_due
            and self._gradients.minibatch_count == 0
            # Else the worker takes a step with it; and with buffers, its own statistics would have to be undone.
            and self._tempo.pull_before(self.steps)
            and self._buffers is None
        )
