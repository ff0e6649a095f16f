"""Which batches a loop has been handed, and is done with."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pyps_client.stepper import Stepper


class BatchCount:
    """Batches handed out in an iteration, and those that the loop is done with.

    Exact where `Portions.epoch` sees the loop take each batch. Elsewhere each is taken to be followed by one step.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.is_exact = False
        self._handed = 0
        self._taken = 0
        # The step that the batch handed out next will be, where each is followed by one.
        self._due = 0
        self._on_their_way: deque[Handed] = deque()
        # Exact only: the stepper's steps when the newest batch was handed over, and the examples since that step.
        self._steps_before = -1
        self._examples = 0

    def begin(self, *, exact: bool) -> None:
        """Begins an iteration with nothing on its way."""
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
        """Whether the loop is done with that batch, by its number."""
        return number is not None and self._handed - self.ahead > number

    def handed_out(self, examples: int, *, ends_portion: bool) -> int:
        """Notes a batch on its way to the loop; returns its number."""
        batch = Handed(examples, ends_portion)
        if self.is_exact:
            self._on_their_way.append(batch)
        else:
            self._due = max(self._due, self._stepper.steps)
            self._announce(batch, self._due, examples)
            self._due += 1
        self._handed += 1
        return self._handed - 1

    def hand_over(self) -> None:
        """Notes that the loop gets the oldest batch on its way."""
        if not self._on_their_way:
            return
        batch = self._on_their_way.popleft()
        steps = self._stepper.steps
        # Several batches before one step count together.
        self._examples = batch.examples + (self._examples if steps == self._steps_before else 0)
        self._steps_before = steps
        self._announce(batch, steps, self._examples)

    def taken_back(self) -> None:
        """Notes that the loop is done with the batch it got last."""
        self._taken = min(self._taken + 1, self._handed)

    def broken_off(self) -> None:
        """Notes that the loop ended with the batch it got last: done with it if a step followed."""
        if self._stepper.steps > self._steps_before:
            self.taken_back()

    def _announce(self, batch: Handed, step: int, examples: int) -> None:
        self._stepper.tell_examples(examples)
        if batch.ends_portion:
            self._stepper.end_portion_after(step)


@dataclass(slots=True)
class Handed:
    """A batch on its way to the loop."""

    examples: int
    ends_portion: bool
