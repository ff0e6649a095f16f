"""After which minibatches a worker pushes and before which it pulls."""

from __future__ import annotations

from dataclasses import dataclass

from pyps_client.log import logger
from pyps_client.torch.overlap import SessionLike
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the user says of how often to push and to pull, and whether beside the computation."""

    # Minibatches summed in a push (the paper's n_push), and minibatches between pulls (n_fetch). None: what the
    # protocol in force wants, or else 1.
    push_every: int | None = None
    pull_every: int | None = None
    # "off": the worker waits for each. "step": both go on beside the computation, on threads, where the protocol in
    # force lets them.
    overlap: str = "off"
    # "paper": the appendix's literal timing. None: every push carries push_every minibatches.
    compat: str | None = None
    # Whether it is known how large the worker's own steps between pulls are, be it 0.
    local_rate_known: bool = True

    def __post_init__(self) -> None:
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise BadRequest(f"{name} is {value!r}; expected a whole number of minibatches, 1 or more.")
        if self.overlap not in ("off", "step"):
            raise BadRequest(f"overlap is {self.overlap!r}; expected 'off' or 'step'.")
        if self.compat not in (None, "paper"):
            raise BadRequest(f"compat is {self.compat!r}; expected None or 'paper'.")


@dataclass(frozen=True, slots=True)
class Beat:
    """Every so many minibatches, counted from the border before minibatch number `since`."""

    every: int = 1
    since: int = 0

    def at(self, border: int) -> bool:
        """True at the border before minibatch number `border`, from 0, if it is one of the beat's."""
        return (border - self.since) % self.every == 0

    def changed(self, every: int, border: int) -> Beat:
        """The beat of another length from this border on: what the old one began counts, up to the whole length.

        So what has gathered goes on its way together with what completes it, or with the very next minibatch.
        """
        if every == self.every:
            return self
        begun = (border - self.since) % self.every
        return Beat(every, max(border - begun, border + 1 - every))


class Tempo:
    """The pace in force: the user's, and where that leaves it open the protocol's, which may change between steps."""

    def __init__(self, pace: Pace, session: SessionLike) -> None:
        self._pace = pace
        self._session = session
        self._wanted = 0
        self._warned = False
        self._told_of_rest = False
        self._held_back = False
        self._push = Beat(pace.push_every or 1)
        self._pull = Beat(pace.pull_every or 1)
        # Minibatches that are the last of their portions of data.
        self._portion_ends: set[int] = set()
        # Whether pushes and pulls go on beside the computation now.
        self.overlaps = False
        self.follow(0)

    def follow(self, step: int) -> None:
        """Takes over what the protocol in force wants, at the border before minibatch number `step`."""
        wanted = self._session.accumulate
        if wanted != self._wanted:
            self._wanted = wanted
            self._warn_of(wanted)
            self._push = self._push.changed(self._pace.push_every or wanted or 1, step)
            self._pull = self._pull.changed(self._pace.pull_every or wanted or 1, step)
        if self._pull.every > 1 and not (self._pace.local_rate_known or self._told_of_rest):
            self._told_of_rest = True
            logger.warning(
                "a pull comes after every %d minibatches (%s), and until it does this worker's model stays as it is: "
                "the steps of its optimizer depend on earlier gradients, which the servers hold. Pass "
                "local_learning_rate, the size of a plain SGD step, or 0 to say that no local steps are meant.",
                self._pull.every,
                f"pull_every={self._pace.pull_every}" if self._pace.pull_every else self._session.protocol,
            )
        present_only = self._session.current_version_only
        if self._pace.overlap == "step" and present_only and not self._held_back:
            logger.info(
                "overlap is 'step', but %s takes gradients of the present version only, and a worker that computes "
                "ahead has none: pushes and pulls are waited for while it is in force",
                self._session.protocol,
            )
        self._held_back = present_only
        # Where steps are granted one by one, nothing goes on beside the computation either.
        self.overlaps = self._pace.overlap == "step" and not present_only and not self._session.ask_to_proceed

    @property
    def minibatches_in_push(self) -> int:
        return self._push.every

    @property
    def minibatches_to_pull(self) -> int:
        return self._pull.every

    def push_after(self, step: int) -> bool:
        """True when minibatch number `step`, from 0, is to be followed by a push."""
        return self._push.at(step if self._pace.compat == "paper" else step + 1)

    def pull_before(self, step: int) -> bool:
        """True when minibatch number `step` is to be preceded by a pull."""
        return self._pull.at(step)

    def end_portion_after(self, step: int) -> None:
        """Notes that minibatch number `step` is the last of its portion of data."""
        self._portion_ends.add(step)

    def ends_portion(self, step: int) -> bool:
        """True when a push and a pull are to follow minibatch number `step` because a portion ends with it.

        So it is where the protocol sums a push's worth of minibatches, and a portion is one: both beats begin anew.
        """
        ended = {end for end in self._portion_ends if end <= step}
        self._portion_ends -= ended
        if not self._wanted or step not in ended:
            return False
        self._push = Beat(self._push.every, step + 1)
        self._pull = Beat(self._pull.every, step + 1)
        return True

    def _warn_of(self, wanted: int) -> None:
        """Says once that the user's number is another than the protocol's, which it goes before."""
        if not wanted or self._warned:
            return
        stated = {"push_every": self._pace.push_every, "pull_every": self._pace.pull_every}
        others = [f"{name} is {value}" for name, value in stated.items() if value not in (None, wanted)]
        if others:
            self._warned = True
            logger.warning(
                "%s here, but %s wants %d minibatches in a push and a pull after each: this worker keeps to its own. "
                "Leave push_every and pull_every out to follow the protocol.",
                *(" and ".join(others), self._session.protocol, wanted),
            )
