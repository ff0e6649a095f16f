"""After which minibatches a worker pushes and pulls: by its user's settings, and by the protocol in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pyps_client.log import logger
from pyps_client.run_state import Terms, View
from pyps_wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The user's settings for pushes and pulls, which RemoteOptimizer explains."""

    # The paper's n_push and n_fetch.
    push_every: int | None = None
    pull_every: int | None = None
    overlap: str = "off"
    compat: str | None = None
    # Whether the size of local steps between pulls is known, be it 0.
    local_rate_known: bool = True

    def __post_init__(self) -> None:
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name} is {value!r}; expected a whole number of minibatches, 1 or more.")
        if self.overlap not in ("off", "step", "backward"):
            raise InvalidArgument(f"overlap is {self.overlap!r}; expected 'off', 'step' or 'backward'.")
        for name in ("push_every", "pull_every"):
            if self.overlap == "backward" and getattr(self, name) not in (None, 1):
                raise InvalidArgument(
                    f"overlap is 'backward', by which each backward pass is a push and a pull, but {name} is "
                    f"{getattr(self, name)}: leave it out, or use overlap='step'."
                )
        if self.compat not in (None, "paper"):
            raise InvalidArgument(f"compat is {self.compat!r}; expected None or 'paper'.")


class Due(NamedTuple):
    """What follows a minibatch."""

    push: bool
    pull: bool
    # Whether a portion of data ends with it, which makes both due.
    ends_portion: bool


class Schedule:
    """When a worker pushes and pulls: by the user's pace, or by the protocol's, which may change."""

    def __init__(self, pace: Pace, view: View) -> None:
        self._pace = pace
        self._view = view
        self._terms: Terms | None = None
        self._wanted = 0
        self._warned = False
        self._told_of_rest = False
        self._held_back = False
        # A push follows every so many minibatches, counted from the border before minibatch number `_pushes_since`.
        self.push_every = pace.push_every or 1
        self._pushes_since = 0
        self.pull_every = pace.pull_every or 1
        self._pulls_since = 0
        # Minibatches that are the last of their portions of data.
        self.portion_ends: set[int] = set()
        # Whether pushes and pulls may go on during the computation now, or begin during the backward pass.
        self.overlaps = False
        self.sends_early = False
        self.follow(0)

    def at(self, step: int) -> Due:
        """Return what follows minibatch number `step`, from 0."""
        if self._view.state.terms is not self._terms:
            self.follow(step)
        ends_portion = bool(self.portion_ends) and self._ends_portion(step)
        border = step if self._pace.compat == "paper" else step + 1
        pushes = (border - self._pushes_since) % self.push_every == 0
        return Due(ends_portion or pushes, (step + 1 - self._pulls_since) % self.pull_every == 0, ends_portion)

    def pushes_after(self, step: int) -> bool:
        return ((step if self._pace.compat == "paper" else step + 1) - self._pushes_since) % self.push_every == 0

    def follow(self, step: int) -> None:
        self._terms = terms = self._view.state.terms
        wanted = terms.accumulate
        if wanted != self._wanted:
            self._wanted = wanted
            self._warn_of(wanted)
            every = self._pace.push_every or wanted or 1
            self._pushes_since = _since(self._pushes_since, self.push_every, every, border=step)
            self.push_every = every
            every = self._pace.pull_every or wanted or 1
            self._pulls_since = _since(self._pulls_since, self.pull_every, every, border=step)
            self.pull_every = every
        if self.pull_every > 1 and not (self._pace.local_rate_known or self._told_of_rest):
            self._told_of_rest = True
            logger.warning(
                "a pull comes after every %d minibatches (%s), and until it does this worker's model stays as it is: "
                "the steps of its optimizer depend on earlier gradients, which the servers hold. Pass "
                "local_learning_rate, the size of a plain SGD step, or 0 to say that no local steps are meant.",
                self.pull_every,
                f"pull_every={self._pace.pull_every}" if self._pace.pull_every else terms.protocol,
            )
        present_only = terms.current_version_only
        if self._pace.overlap == "step" and present_only and not self._held_back:
            logger.info(
                "overlap is 'step', but %s takes gradients of the present version only, and a worker that computes "
                "ahead has none: pushes and pulls are waited for while it is in force",
                terms.protocol,
            )
        if self._pace.overlap == "backward":
            reason = _why_whole(terms)
            if reason and not self._held_back:
                logger.info(
                    "overlap is 'backward', but %s: each push is sent whole, in its step, while that is so", reason
                )
            self._held_back, self.sends_early = bool(reason), not reason
            return
        self._held_back = present_only
        # Nor where steps are granted one by one.
        self.overlaps = self._pace.overlap == "step" and not present_only and not terms.ask_to_proceed

    def _ends_portion(self, step: int) -> bool:
        """Return whether a portion ends with minibatch number `step`, and so a push; both counts start again then.

        Only where the protocol sums minibatches: a portion is one push's worth of them.
        """
        ended = {end for end in self.portion_ends if end <= step}
        self.portion_ends -= ended
        if not self._wanted or step not in ended:
            return False
        self._pushes_since = self._pulls_since = step + 1
        return True

    def _warn_of(self, wanted: int) -> None:
        if not wanted or self._warned:
            return
        stated = {"push_every": self._pace.push_every, "pull_every": self._pace.pull_every}
        others = [f"{name} is {value}" for name, value in stated.items() if value not in (None, wanted)]
        if others:
            self._warned = True
            logger.warning(
                "%s here, but %s wants %d minibatches in a push and a pull after each: this worker keeps to its own. "
                "Leave push_every and pull_every out to follow the protocol.",
                *(" and ".join(others), self._view.state.terms.protocol, wanted),
            )


def _why_whole(terms: Terms) -> str:
    """Return why a push must not be sent before its step; empty where it may."""
    name = terms.protocol.partition(":")[0]
    if terms.clip_norm:
        return "the servers clip each push by its norm, which nobody knows before"
    if terms.ask_to_proceed:
        return f"{terms.protocol} grants steps one by one, and others wait for the end of this worker's"
    if terms.accumulate or name == "asgd":
        return f"{terms.protocol} takes a push as a whole, of so many minibatches"
    return ""


def _since(since: int, every: int, changed: int, *, border: int) -> int:
    """Return from which minibatch to count when the interval changes at this border.

    Minibatches that have gathered count, up to the whole interval: they are sent with those that complete it, or with
    the very next one.
    """
    if changed == every:
        return since
    begun = (border - since) % every
    return max(border - begun, border + 1 - changed)
