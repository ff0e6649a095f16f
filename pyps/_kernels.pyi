"""The server's native kernels (csrc/bindings.cpp). A call over 16,384 numbers or more releases the GIL.

A gradient is any C-contiguous buffer: raw bytes at any offset, or an array of the codec's own type
(float32 for FLOAT32, float16 for FLOAT16, uint16 for BFLOAT16). Arrays are one-dimensional, C-contiguous
float32; those written to must be writable and share no memory with the others. Nothing is converted or
copied: TypeError and ValueError name what does not fit, before anything is written.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

Floats = npt.NDArray[np.float32]

# Codec name -> number.
CODECS: dict[str, int]

def isa() -> str:
    """Name the instruction set in use.

    It is the widest available or what PYPS_ISA names, chosen at the first call of any kernel. ValueError
    when PYPS_ISA names none that is available: call this at start, so that the error comes at start.
    """

def available() -> list[str]:
    """Name the instruction sets of this build and processor, narrowest first."""

def select(name: str) -> None:
    """Switch the instruction set for every caller. For tests."""

# g = f0 * g0 + f1 * g1 + ... in float32, summed in this order: (payload, codec, factor) each.
Gradients = Sequence[tuple[Buffer, int, float]]

# Where a rule writes the parameters that it made, in the same pass: a writable buffer, or a bytes object that
# nobody else has seen; the offset there in bytes; the codec.
Reply = tuple[Buffer, int, int]

class ShardKernel:
    """A rule of csrc/kernel_rules.h bound to one shard's parameters and slots, found by their names.

    They are checked here, once: later calls trust that no payload and no reply overlaps them.
    """

    # The names of the formula's numbers, in its order.
    numbers: list[str]

    def __init__(self, rule: str, parameters: Floats, slots: dict[str, Floats]) -> None: ...
    def apply(
        self,
        gradients: Gradients,
        numbers: tuple[float, ...],
        reply: Reply | None = None,
        guarded: bool = False,
        start: int = 0,
        stop: int | None = None,
    ) -> int:
        """Update parameters and slots in place, from `start` to `stop`.

        `guarded` is for payloads that a worker may write to meanwhile: each block of 1,024 numbers is copied, scanned
        again and left out of the sum where it is not finite. Return how many numbers were left out.
        """

    def write(self, reply: Reply) -> None:
        """Write the encoded parameters into the reply."""

# Of some rows: int64 ids that ascend, then as in Gradients, but each row encoded by itself. Nobody may write to them
# meanwhile. Ids may also be raw bytes.
TableParts = Sequence[tuple[Buffer, Buffer, int, float]]

class Table:
    """Rows of numbers by their ids. A row comes to be at its first update, and is its initial value before.

    Initial values are a function of seed, id and column, so a table is a function of its updates, to the bit. Any
    thread may call anything; readers see whole rows beside a writer. MemoryError and ValueError change nothing.
    """

    # The names of the formula's numbers, in its order.
    numbers: list[str]

    def __init__(
        self,
        dim: int,
        rule: str,
        first_slots: Sequence[float],
        *,
        bfloat16: bool = False,
        seed: int = 0,
        scale: float = 0.0,
        norm_max: float = 0.0,
        min_count: int = 1,
        ttl: int = 0,
        capacity: int = 0,
    ) -> None:
        """Make an empty table.

        Args:
            dim: Numbers of a row, 1 to 1024.
            rule: A rule of shards, "rowwise_adagrad", which has one accumulator a row, or "assign", whose rows are
                their last gradients.
            first_slots: The first value of each slot, in the rule's order.
            bfloat16: Whether rows are held so, and rounded at random after each update, as seed, id, version and column
                have it. Slots are float32.
            seed, scale: Initial values are uniform in [-scale, scale).
            norm_max: A row of a larger Euclidean norm is scaled down to it after its update; 0 for none.
            min_count: The update of its own with which an id becomes a row. Before, it is a candidate, and its
                gradients are dropped.
            ttl: Rows and candidates without an update for more versions than that are dropped as the next update
                begins; 0 for none.
            capacity: A new row beyond so many replaces the least recently updated one; 0 for none.
        """

    def update(self, parts: TableParts, numbers: tuple[float, ...], version: int) -> None:
        """Apply the rule to each row with the weighted sum of its gradients, under a version above the last."""

    def bytes_with(self, ids: Sequence[Buffer], version: int) -> int:
        """Return the most bytes of the table after an update of these ids; as many as now where all have rows."""

    def lookup(self, ids: Buffer, reply: Reply) -> int:
        """Write the rows of ids in any order, each encoded by itself; return how many are more than initial."""

    def dump(
        self, after_version: int, candidates: bool = False
    ) -> tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.uint64],
        npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32],
        npt.NDArray[np.float32],
    ]:
        """Return ids, versions, parameters and slots of the rows updated after a version, the oldest first.

        Of candidates the parameters are their counts, and there are no slots.
        """

    def load(
        self,
        ids: Buffer,
        versions: Buffer,
        parameters: Buffer,
        slots: Buffer,
        version: int,
        candidates: bool = False,
    ) -> None:
        """Put what was dumped at a version into a table that has none; after an error it is of no use.

        Versions ascend.
        """

    def stats(self) -> dict[str, int]:
        """Return rows, candidates, bytes, and version; and counts since the table is empty.

        Ids "admitted" as rows, gradients "dropped" before, rows "evicted" for others, rows and candidates "expired".
        """

def first_non_finite(gradient: Buffer, codec: int, count: int) -> int:
    """Return the index of the first NaN or infinity among `count` numbers, -1 when there is none."""

def decode(gradient: Buffer, codec: int, out: Floats) -> None:
    """Write the encoded values as float32 into `out`."""

def encode(values: Floats, codec: int) -> bytes:
    """Return the values encoded, rounded to nearest, ties to even; NaN stays NaN."""

def summary(values: Floats) -> tuple[float, float, float]:
    """Return (sum of squares in float64, min, max).

    Min and max pass over NaN, the sum does not; of no values they are (0.0, inf, -inf).
    """

def bandwidth(arrays: list[Floats], gradient: Buffer) -> None:
    """Move the memory that a rule over these one to three arrays moves, with one addition each.

    For benchmarks.
    """

def split_frame(message: Buffer, field_number: int) -> tuple[bytes, int, int]:
    """Return (the message without its payload field, the payload's offset, its size in bytes).

    A message without a payload has offset len(message) and size 0. ValueError names the reason and the
    byte when the message is no valid protobuf encoding.
    """

def count_fields(message: Buffer, tree: Mapping[int, Any]) -> tuple[int, list[int]]:
    """Return (fields and packed varints in the message, how often each field of `tree` is there, parents first).

    The tree has messages, by number, with trees of their own, and lists of varints with None; fields in messages beside
    the tree are not counted. ValueError when the message is no valid protobuf encoding.
    """

def new_frame(room: int, field_number: int, count: int, codec: int) -> tuple[bytes, int]:
    """Return (room for a header, the payload field's tag and length, `count` uninitialised values; their offset).

    The caller writes the values and calls `write_header` before it shows the message to others.
    """

def write_header(frame: bytes, room: int, header: bytes) -> bool:
    """Write the header of a new frame; what is left of its room is a field that readers skip.

    False, and nothing is written, where it does not fit: it is longer than the room, or one byte shorter.
    """

# Arithmetic on vectors: in float64 in the order written, rounded once. `z` may be the same array as others are; else it
# shares no memory with them. Sums over elements are float64, in one order on every instruction set.

def vector_copy(z: Floats, x: Floats) -> None:
    """z = x"""

def vector_move(z: Floats, x: Floats, a: float, y: Floats | None) -> None:
    """z = x + a * y, or z = x where y is None"""

def vector_dot(x: Floats, y: Floats) -> float:
    """Return the sum of x * y."""

def vector_norm1(x: Floats) -> float:
    """Return the sum of |x|."""

def vector_norm_inf(x: Floats) -> float:
    """Return the largest |x|: 0.0 of no elements, NaN where one is NaN."""

def vector_combine(z: Floats, scalars: Sequence[float], vectors: Sequence[Floats]) -> None:
    """z = 0 + scalars[0] * vectors[0] + scalars[1] * vectors[1] + ..., in one pass over memory"""

def vector_fold(z: Floats, stages: Sequence[Floats], divisor: float) -> None:
    """z = (0 + stages[0] + stages[1] + ...) / divisor, in one pass over memory

    ValueError unless the divisor is above 0 and finite.
    """

def vector_gram(names: Sequence[Floats], others: Sequence[Floats]) -> npt.NDArray[np.float64]:
    """Return vector_dot of each of `names` with each of `others`, one row a name, in one pass over memory."""
