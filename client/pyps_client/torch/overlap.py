"""overlap="step": pushes and pulls go on in parallel to the computation. And the table of all modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyps_client.torch.backward import Backward
from pyps_client.torch.gradients import Gradients, Minibatch
from pyps_client.torch.layout import Layout
from pyps_client.torch.schedule import Due, Settings
from pyps_client.torch.steps import Off, Steps
from pyps_client.transport.threads import Future, Threads
from pyps_client.worker import Worker
from pyps_wire.common_pb2 import Receipt

# How many pushes' worth of minibatches may gather, and how many pulls may be missed, before the worker waits for the
# push or pull under way. Without a bound it would push a sum too large for its learning rate.
BEHIND_MAX = 8


class Step(Off):
    """overlap="step": one push and one pull at a time, each on a thread of its own, or both in one exchange.

    While a push is under way, gradients gather in the other buffer; the next push sends their sum. Where the protocol
    in force allows no overlap, the worker waits.
    """

    num_buffers = 2
    may_alias = False
    in_parallel, may_hand_out = True, False

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._spare = steps.gradient_buffers[1]
        self._threads = Threads()
        # A push and a pull, or both as one exchange: under way, or ended and not taken over yet.
        self.pushing: Future[Sequence[Receipt]] | None = None
        self.pulling: Future[Any] | None = None
        # Gradients whose push is under way.
        self.in_flight: Gradients | None = None
        # Minibatches that had left the buffer before the newest push.
        self._sent_before = 0

    @property
    def answered(self) -> int:
        return self._steps.sent if self.in_flight is None else self._sent_before

    def step(self, gradients: Minibatch, due: Due) -> None:
        steps = self._steps
        steps.gather(gradients, due)
        if not steps.schedule.overlaps:
            self.wait()
            steps.push_and_pull()
            return
        if due.ends_portion:
            # A push must hold no gradients of the next portion.
            self.wait_for_push()
        self._go_on()

    def collect(self) -> None:
        if self.pushing is not None or self.pulling is not None:
            self.end(*self.over())

    def wait_for_push(self) -> None:
        self._wait_for(self.pushing)

    def wait(self) -> None:
        self._wait_for(self.pushing)
        self._wait_for(self.pulling)
        self._steps.take_pulled()

    def close(self) -> None:
        self._threads.close()

    def over(self) -> tuple[bool, bool]:
        """Return whether a push, and whether a pull, was under way and has ended."""
        pushed = self.pushing is not None and self.pushing.done()
        if self.pulling is self.pushing:
            return pushed, pushed
        return pushed, self.pulling is not None and self.pulling.done()

    def end(self, pushed: bool, pulled: bool) -> None:
        """Take over the end of the push, and of the pull, that are under way; raise their errors."""
        pushing, pulling = self.pushing, self.pulling
        if pushed and pulling is pushing:
            self.pulling = None
        if pushed and pushing is not None and self.in_flight is not None:
            # After an error too: the worker has tried for as long as it may.
            self.in_flight.clear()
            self.pushing, self._spare, self.in_flight = None, self.in_flight, None
            # If this raises, a pull of its own stays to be taken over.
            self._steps.receipts = pushing.value() or ()
            self._steps.finite.note(self._steps.receipts)
        if pulled and pulling is not None and pulling is not pushing:
            self.pulling = None
            pulling.value()
        # Where an exchange's round waits for other workers, a pull follows.
        if pulled and not (pushed and self._steps.session.pull_needed):
            self._steps.note_pulled()

    def _wait_for(self, future: Future[Any] | None) -> None:
        if future is not None:
            future.wait()
            self.end(future is self.pushing, future is self.pulling)

    def _go_on(self) -> None:
        """Begin what is due, and wait only where too much has gathered."""
        steps, schedule = self._steps, self._steps.schedule
        if steps.gradients.minibatch_count >= BEHIND_MAX * schedule.push_every:
            self._wait_for(self.pushing)
        steps.steps_since_pull += 1
        if steps.steps_since_pull >= BEHIND_MAX * schedule.pull_every:
            self._wait_for(self.pulling)
        # Before a pull rewrites the buffer.
        steps.take_pulled()
        pull_needed = steps.session.pull_needed
        if steps.push_due and self.pushing is None:
            steps.push_due = False
            if steps.gradients.minibatch_count and steps.seal():
                # A needed pull waits for others, which a push must not.
                pulls = steps.pull_due and not pull_needed and self.pulling is None
                steps.pull_due = steps.pull_due and not pulls
                self._push(pulls=pulls)
            if steps.view.state.terms.ask_to_proceed:
                steps.session.proceed()
        if (steps.pull_due or pull_needed) and self.pulling is None:
            steps.pull_due = False
            self.pulling = Future(steps.bring)
            self._threads.start(self.pulling)

    def _push(self, *, pulls: bool) -> None:
        """Begin to push sealed gradients, and to pull in the same exchange; gather in the other buffer from now on."""
        steps, gradients, parameters = self._steps, self._steps.gradients, self._steps.parameters
        plan, session = steps.plan(pulls=pulls), steps.session
        self._sent_before, steps.sent = steps.sent, steps.steps

        def exchange() -> Sequence[Receipt]:
            gradients.ready()
            if pulls:
                parameters.wait_until_free()
            return session.exchange(plan)

        assert self.pushing is None, "a push began while another was under way"
        # All before it starts: Ctrl-C may come between any two lines.
        self.pushing = Future(exchange)
        if pulls:
            self.pulling = self.pushing
        self.in_flight, steps.gradients = gradients, self._spare
        self._threads.start(self.pushing)


MODES: Mapping[str, type[Off]] = {"off": Off, "step": Step, "backward": Backward}


def steps_of(worker: Worker, layout: Layout, settings: Settings, **options: Any) -> Steps:
    return Steps(worker, layout, settings, overlap=MODES[settings.overlap], **options)
