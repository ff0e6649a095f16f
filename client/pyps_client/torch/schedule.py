"""After which minibatches a worker pushes and pulls: by its user's settings, and by the protocol in force."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pyps_client.launch import check_types
from pyps_client.log import logger
from pyps_client.run_state import Terms, View
from pyps_client.torch.buffers import BUFFER_MODES
from pyps_wire.errors import InvalidArgument

_CHOICES = {"overlap": ("off", "step", "backward"), "compat": (None, "paper"), "buffers": BUFFER_MODES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The user's settings of a worker's steps, which RemoteOptimizer explains."""

    # The paper's n_push and n_fetch.
    push_every: int | None = None
    pull_every: int | None = None
    overlap: str = "off"
    compat: str | None = None
    local_learning_rate: float | None = None
    buffers: str = "local"
    owns_schedule: bool | None = None
    rescales_gradients: bool | None = None
    # True where the size of local steps between pulls is known, be it 0.
    local_rate_known: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("push_every", "pull_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(f"{name} is {value!r}; expected a whole number of minibatches, 1 or more.")
            if self.overlap == "backward" and value not in (None, 1):
                raise InvalidArgument(
                    f"overlap is 'backward', by which each backward pass is a push and a pull, but {name} is {value}: "
                    "leave it out, or use overlap='step'."
                )
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise InvalidArgument(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}.")
        rate = self.local_learning_rate
        if rate is not None and not 0 <= rate < math.inf:
            raise InvalidArgument(f"local_learning_rate is {rate!r}; expected 0 (no local steps) or more.")


class Due(NamedTuple):
    """What follows a minibatch."""

    push: bool
    pull: bool
    # True where a portion of data ends with it, and so a push.
    ends_portion: bool


class Schedule:
    """When a worker pushes and pulls: by the user's settings, or by the protocol's, which may change."""

    def __init__(self, settings: Settings, view: View) -> None:
        self._settings = settings
        self._view = view
        self._terms: Terms | None = None
        # The protocol's minibatches in a push; 0 leaves it to the worker.
        self._wanted = 0
        self._warned_of_numbers = self._warned_of_rest = self._reported_wait = False
        # A push follows every so many minibatches, counted from minibatch number `_pushes_since` on.
        self.push_every = settings.push_every or 1
        self._pushes_since = 0
        self.pull_every = settings.pull_every or 1
        self._pulls_since = 0
        # Minibatches that are the last of their portions of data.
        self.portion_ends: set[int] = set()
        # True while pushes and pulls may go on during the computation, or begin during the backward pass.
        self.overlaps = False
        self.sends_early = False
        self.follow(0)

    def at(self, step: int) -> Due:
        """Return what follows minibatch number `step`, from 0."""
        if self._view.state.terms is not self._terms:
            self.follow(step)
        ends_portion = bool(self.portion_ends) and self._ends_portion(step)
        pulls = (step + 1 - self._pulls_since) % self.pull_every == 0
        return Due(ends_portion or self.pushes_after(step), pulls, ends_portion)

    def pushes_after(self, step: int) -> bool:
        border = step if self._settings.compat == "paper" else step + 1
        return (border - self._pushes_since) % self.push_every == 0

    def follow(self, step: int) -> None:
        """Follow the protocol's present terms, from minibatch number `step` on."""
        settings = self._settings
        self._terms = terms = self._view.state.terms
        wanted = terms.accumulate
        if wanted != self._wanted:
            self._wanted = wanted
            self._warn_of_other_numbers(wanted)
            every = settings.push_every or wanted or 1
            self._pushes_since = _since(self._pushes_since, self.push_every, every, border=step)
            self.push_every = every
            every = settings.pull_every or wanted or 1
            self._pulls_since = _since(self._pulls_since, self.pull_every, every, border=step)
            self.pull_every = every
        if self.pull_every > 1 and not (settings.local_rate_known or self._warned_of_rest):
            self._warned_of_rest = True
            logger.warning(
                "a pull comes after every %d minibatches (%s), and until it does this worker's model stays as it is: "
                "the steps of its optimizer depend on earlier gradients, which the servers hold. Pass "
                "local_learning_rate, the size of a plain SGD step, or 0 to say that no local steps are meant.",
                self.pull_every,
                f"pull_every={settings.pull_every}" if settings.pull_every else terms.protocol,
            )
        reason = _why_it_waits(settings, terms)
        if reason and not self._reported_wait:
            logger.info("overlap is %r, but %s", settings.overlap, reason)
        self._reported_wait = bool(reason)
        # Nor do steps overlap that are granted one by one.
        self.overlaps = settings.overlap == "step" and not reason and not terms.ask_to_proceed
        self.sends_early = settings.overlap == "backward" and not reason

    def _ends_portion(self, step: int) -> bool:
        """Return whether a portion, and so a push, ends with minibatch number `step`; both counts start again then.

        Only where the protocol sums minibatches: a portion is one push's worth of them.
        """
        ended = {end for end in self.portion_ends if end <= step}
        self.portion_ends -= ended
        if not self._wanted or step not in ended:
            return False
        self._pushes_since = self._pulls_since = step + 1
        return True

    def _warn_of_other_numbers(self, wanted: int) -> None:
        if not wanted or self._warned_of_numbers:
            return
        stated = {"push_every": self._settings.push_every, "pull_every": self._settings.pull_every}
        others = [f"{name} is {value}" for name, value in stated.items() if value not in (None, wanted)]
        if others:
            self._warned_of_numbers = True
            logger.warning(
                "%s here, but %s wants %d minibatches in a push and a pull after each: this worker keeps to its own. "
                "Leave push_every and pull_every out to follow the protocol.",
                *(" and ".join(others), self._view.state.terms.protocol, wanted),
            )


def _why_it_waits(settings: Settings, terms: Terms) -> str:
    """Return why pushes and pulls must not overlap the computation under these terms; empty where they may."""
    protocol, overlap = terms.protocol, settings.overlap
    if overlap == "step" and terms.current_version_only:
        return (
            f"{protocol} takes gradients of the present version only, and a worker that computes ahead has none: "
            "pushes and pulls are waited for while it is in force"
        )
    if overlap != "backward":
        return ""
    if terms.clip_norm and settings.rescales_gradients is False:
        reason = "the servers clip each push by its norm, which nobody knows before"
    elif terms.ask_to_proceed:
        reason = f"{protocol} grants steps one by one, and others wait for the end of this worker's"
    elif terms.accumulate or protocol.partition(":")[0] == "asgd":
        reason = f"{protocol} takes a push as a whole, of so many minibatches"
    else:
        return ""
    return f"{reason}: each push is sent whole, in its step, while that is so"


def _since(since: int, every: int, changed: int, *, border: int) -> int:
    """Return from which minibatch on to count when the interval changes at `border`.

    Minibatches that have gathered count, up to the whole interval: they are sent with those that complete it, or with
    the next one.
    """
    if changed == every:
        return since
    begun = (border - since) % every
    return max(border - begun, border + 1 - changed)
