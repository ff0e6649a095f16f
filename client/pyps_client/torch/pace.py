"""After which minibatches a worker pushes and before which it pulls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyps_client.torch.overlap import SessionLike
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often to push and to pull, and whether beside the computation."""

    # Minibatches summed in a push (the paper's n_push), and minibatches between pulls (n_fetch). None: what the
    # protocol wants, or else 1.
    push_every: int | None = None
    pull_every: int | None = None
    # "off": the worker waits for each. "step": both go on beside the computation, on threads.
    overlap: str = "off"
    # "paper": the appendix's literal timing. None: every push carries push_every minibatches.
    compat: str | None = None

    def __post_init__(self) -> None:
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise BadRequest(f"{name} is {value!r}; expected a whole number of minibatches, 1 or more.")
        if self.overlap not in ("off", "step"):
            raise BadRequest(f"overlap is {self.overlap!r}; expected 'off' or 'step'.")
        if self.compat not in (None, "paper"):
            raise BadRequest(f"compat is {self.compat!r}; expected None or 'paper'.")

    def under(self, session: SessionLike) -> Pace:
        """The pace under the protocol of a joined run; BadRequest where they contradict each other."""
        if self.overlap == "step" and session.current_version_only:
            raise BadRequest(
                "overlap is 'step', but the run's protocol takes gradients of the present version only, and a worker "
                "that computes ahead has none: pass overlap='off', or start the servers with --protocol async."
            )
        wanted = session.accumulate
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            if wanted and value not in (None, wanted):
                raise BadRequest(
                    f"{name} is {value}, but the run's protocol wants {wanted} minibatches in a push and a pull after "
                    f"each: leave {name} out, or start the servers with accumulate={value}."
                )
        return replace(self, push_every=self.push_every or wanted or 1, pull_every=self.pull_every or wanted or 1)

    @property
    def minibatches_in_push(self) -> int:
        return self.push_every or 1

    @property
    def minibatches_to_pull(self) -> int:
        return self.pull_every or 1

    def push_after(self, step: int) -> bool:
        """True when minibatch number `step`, from 0, is to be followed by a push."""
        return (step if self.compat == "paper" else step + 1) % self.minibatches_in_push == 0

    def pull_before(self, step: int) -> bool:
        """True when minibatch number `step` is to be preceded by a pull."""
        return step % self.minibatches_to_pull == 0
