"""Counts what a coordinator and its servers say to each other."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from google.protobuf.message import Message


@dataclass(frozen=True)
class Traffic:
    """Messages and their bytes, both ways, without gRPC's own. A message and its answer count as one.

    Greetings are not counted, nor what is asked at control ports: they have no part in any iteration's figures.
    """

    # Of instructions on vectors: as many for a small model as for a large one.
    instruction_messages: int = 0
    instruction_bytes: int = 0
    # Of passes over the data set: 8 bytes a staged sum, and progress, which has a line a worker and is told of more
    # often in a pass that takes longer.
    pass_messages: int = 0
    pass_bytes: int = 0

    @property
    def messages(self) -> int:
        return self.instruction_messages + self.pass_messages

    @property
    def bytes(self) -> int:
        return self.instruction_bytes + self.pass_bytes

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.instruction_messages - earlier.instruction_messages,
            self.instruction_bytes - earlier.instruction_bytes,
            self.pass_messages - earlier.pass_messages,
            self.pass_bytes - earlier.pass_bytes,
        )


class TrafficMeter:
    """Adds up messages. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Traffic()

    @property
    def total(self) -> Traffic:
        return self._total

    def count(self, request: Message, reply: Message, *, of_instructions: bool) -> None:
        """Counts one call."""
        num_bytes = request.ByteSize() + reply.ByteSize()
        with self._lock:
            of = self._total
            self._total = Traffic(
                of.instruction_messages + of_instructions,
                of.instruction_bytes + num_bytes * of_instructions,
                of.pass_messages + (not of_instructions),
                of.pass_bytes + num_bytes * (not of_instructions),
            )
