"""A worker's push to one shard, and whether it can be used at all: it fits, and its numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_zeros
from pyps_wire.codecs import CODECS, FLOAT32, Codec
from pyps_wire.errors import InvalidArgument, ServerUnavailable, WrongSize

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The codecs that kernels read and write. Payloads in others become float32 first.
NATIVE = tuple(CODECS[number] for number in _kernels.CODECS.values())


class PayloadKind(IntEnum):
    """What the numbers of a payload mean; the wire contract's numbers."""

    GRADIENT = 1
    # Locally trained parameters minus those they started from.
    DELTA = 2
    # No gradient for the shard in this step; a round still needs this push of the worker.
    NOTHING = 3
    # How far a buffer moved, which no rule scales.
    BUFFER = 4


# An int64 in a payload.
ID_BYTES = 8


class Extent(NamedTuple):
    """A part of a shard, in parameters."""

    offset: int
    length: int


class Gradient(NamedTuple):
    """One shard's part of a push. (worker_id, incarnation, sequence) is the push's identity.

    Without extents the payload covers the whole shard; parameters outside the extents had no gradient, which is not a
    gradient of zero. A push of NOTHING has no payload and no extents.
    """

    worker_id: str
    incarnation: int
    sequence: int
    base_version: int
    epoch: int
    codec: Codec
    payload: bytes | memoryview
    extents: tuple[Extent, ...] = ()
    kind: int = PayloadKind.GRADIENT
    example_count: int = 0
    minibatch_count: int = 1
    newest_base_version: int | None = None
    # The worker's own count of steps, for protocols that compare workers' clocks.
    clock: int = 0
    # The shard's base rate from this push on, by the worker that owns the schedule; None leaves it.
    learning_rate: float | None = None
    # Likewise the momentum of its rule.
    momentum: float | None = None
    # True if the worker does not own the schedule: rate and momentum are then in force until the owner sets some.
    provisional: bool = False
    # The Euclidean norm of the whole push, over all shards; 0 where the worker did not compute it.
    norm: float = 0.0
    # Whether the payload lies in memory that the worker can still write; otherwise it never changes.
    volatile: bool = False
    # A factor of the payload's numbers. It comes after them, from a worker that clips gradients while they are sent.
    scale: float = 1.0
    # Of a push that is sent again to a server that came back: how far its base version lies behind the shard's version,
    # or as far as there are versions. The other base versions are of an earlier epoch then.
    resent_staleness: int | None = None
    # Of a push to a table: how many ids, of 8 bytes, ascending, stand in the payload in front of their rows' gradients.
    num_rows: int = 0

    @property
    def schedules(self) -> bool:
        """True if the push sets a rate or momentum as the owner of the schedule."""
        return not self.provisional and (self.learning_rate is not None or self.momentum is not None)

    def decided(self, *, holds: bool) -> Gradient:
        """Return the gradient with its provisional rate and momentum as ordinary ones, or without them."""
        if holds:
            return self._replace(provisional=False)
        return self._replace(learning_rate=None, momentum=None, provisional=False)

    def based_at(self, version: int) -> Gradient:
        """Return a gradient that is sent again with its base version, at a shard of that version."""
        base_version = version - min(version, self.resent_staleness or 0)
        return self._replace(base_version=base_version, newest_base_version=None, resent_staleness=None)

    def private(self) -> Gradient:
        """Return the gradient with a copy of its payload, which may have changed since a scan."""
        return self._replace(payload=bytes(self.payload), volatile=False)

    @property
    def numbers(self) -> bytes | memoryview:
        """The payload without ids."""
        return memoryview(self.payload)[ID_BYTES * self.num_rows :] if self.num_rows else self.payload

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.payload, "<i8", self.num_rows)

    def count(self, shard_length: int) -> int:
        """Return how many numbers the payload holds; a table's length is that of a row."""
        if self.num_rows:
            return self.num_rows * shard_length
        return sum([length for _, length in self.extents]) if self.extents else shard_length

    def parameter_index(self, payload_index: int) -> int:
        """Return the place in the shard of the payload's number at `payload_index`."""
        for offset, length in self.extents:
            if payload_index < length:
                return offset + payload_index
            payload_index -= length
        return payload_index


class Finding(NamedTuple):
    """The place of a push's first NaN or infinity; shard -1 where all its numbers are finite."""

    shard_id: int = -1
    parameter: int = -1
    # Of a table: the row's id; `parameter` is the place in the row then.
    row: int | None = None

    @property
    def finite(self) -> bool:
        return self.shard_id < 0


FINITE = Finding()


def scan(gradient: Gradient, *, shard_id: int, shard_length: int) -> Finding:
    """Find the first NaN or infinity in a gradient, or in its scaled numbers, which takes as long as a small update.

    Raise InvalidArgument (WrongSize where sizes differ) when the gradient could never be applied to its shard.
    """
    require_fitting(gradient, shard_id=shard_id, shard_length=shard_length)
    if gradient.kind == PayloadKind.NOTHING:
        return FINITE
    if gradient.num_rows:
        return _scan_rows(gradient, shard_id, shard_length)
    count = gradient.count(shard_length) if gradient.extents else shard_length
    if gradient.codec in NATIVE:
        index = _kernels.first_non_finite(gradient.payload, gradient.codec, count)
    else:
        _, index = _decoded(gradient, shard_id, count)
    if index < 0 and gradient.scale > 1.0:
        with np.errstate(over="ignore"):
            scaled = gradient.codec.decode(gradient.payload, count) * np.float32(gradient.scale)
        index = _kernels.first_non_finite(scaled.data, FLOAT32, count)
    return FINITE if index < 0 else Finding(shard_id, gradient.parameter_index(index))


def _scan_rows(gradient: Gradient, shard_id: int, length: int) -> Finding:
    ids = gradient.ids
    descends = ids[1:] <= ids[:-1]
    if descends.any():
        at = int(descends.argmax())
        raise _located(
            InvalidArgument(f"id {ids[at + 1]} follows {ids[at]}; expected ids that ascend, each once"),
            gradient,
            shard_id,
        )
    index = _kernels.first_non_finite(gradient.numbers, gradient.codec, gradient.count(length))
    return FINITE if index < 0 else Finding(shard_id, index % length, int(ids[index // length]))


def first_of(findings: Iterable[Finding]) -> Finding:
    """Return the first finding that is not finite, else FINITE."""
    return next((finding for finding in findings if not finding.finite), FINITE)


# Each extent costs a kernel call under the shard's lock: this many take a fraction of a second.
EXTENTS_MAX = 65_536

# Sums of larger counts would not fit the messages that report them.
EXAMPLES_MAX = 2**32

FLOAT32_MAX = 3.4028234663852886e38


def decoded(payload: bytes | memoryview, codec: Codec, *, count: int) -> tuple[Floats, int]:
    """Return the payload's numbers in a new array, and the place of the first NaN or infinity, -1 for none.

    Raise WrongSize where the payload does not hold so many numbers.
    """
    codec.require_count(payload, count)
    values = aligned_zeros(count)
    if codec in NATIVE:
        _kernels.decode(payload, codec, values)
    else:
        codec.decode_into(payload, values)
    return values, _kernels.first_non_finite(values.data, FLOAT32, count)


def _decoded(gradient: Gradient, shard_id: int, count: int) -> tuple[Floats, int]:
    try:
        return decoded(gradient.payload, gradient.codec, count=count)
    except InvalidArgument as error:
        raise _located(error, gradient, shard_id) from None


def _located(error: InvalidArgument, gradient: Gradient, shard_id: int) -> InvalidArgument:
    """Return the error with shard, push and worker in front."""
    return type(error)(f"shard {shard_id}, push {gradient.sequence} of worker {gradient.worker_id!r}: {error}")


def made_native(gradient: Gradient, *, shard_id: int, shard_length: int, divided: bool = False) -> Gradient:
    """Return the gradient as kernels read it; raises as `require_fitting`. `divided`: at other gradients' extents."""
    codec = gradient.codec
    # An update is made extent by extent, which splits payloads.
    readable = codec in NATIVE and (codec.dtype is not None or not (divided or gradient.extents))
    if readable or gradient.kind == PayloadKind.NOTHING:
        return gradient
    require_fitting(gradient, shard_id=shard_id, shard_length=shard_length)
    values, _ = _decoded(gradient, shard_id, gradient.count(shard_length))
    return gradient._replace(codec=FLOAT32, payload=FLOAT32.encode(values))


def norm_of(gradient: Gradient, shard_length: int) -> float:
    """Return the Euclidean norm of the whole push, or of this shard's part if that is larger; 0 for buffers."""
    if gradient.kind in (PayloadKind.BUFFER, PayloadKind.NOTHING):
        return 0.0
    return max(gradient.norm, norm_of_payload(gradient, shard_length))


def norm_of_payload(gradient: Gradient, shard_length: int) -> float:
    numbers = gradient.codec.decode(gradient.numbers, gradient.count(shard_length))
    # Squares of float32 fit a float64; summed pairwise in a fixed order, so that a replay gives the same bits.
    return gradient.scale * math.sqrt(float(np.add.reduce(np.square(numbers, dtype=np.float64))))


def require_fitting(gradient: Gradient, *, shard_id: int, shard_length: int) -> None:
    """Raise InvalidArgument or WrongSize unless the gradient can be applied to a shard of that length."""
    try:
        if gradient.learning_rate is not None:
            require_rate(gradient.learning_rate)
        if gradient.momentum is not None and not 0.0 <= gradient.momentum < 1.0:
            raise InvalidArgument(f"momentum is {gradient.momentum}; expected a number of at least 0 and less than 1")
        if not 0.0 <= gradient.norm < math.inf:
            raise InvalidArgument(f"gradient_norm is {gradient.norm}; expected a finite number of at least 0")
        if not 0.0 < gradient.scale <= FLOAT32_MAX:
            raise InvalidArgument(f"gradient_scale is {gradient.scale}; expected a finite float32 of more than 0")
        if gradient.example_count > EXAMPLES_MAX:
            raise InvalidArgument(f"example_count is {gradient.example_count}; expected at most {EXAMPLES_MAX}")
        if gradient.kind == PayloadKind.NOTHING:
            if gradient.extents or gradient.num_rows or len(gradient.payload):
                raise InvalidArgument("a push of NOTHING came with a payload, rows or extents; expected none")
            return None
        if gradient.num_rows:
            return _require_rows(gradient, shard_length)
        count = shard_length
        if gradient.extents:
            _require_extents(gradient.extents, shard_length=shard_length)
            count = gradient.count(shard_length)
        # Compared here first, without a call.
        if len(gradient.payload) != gradient.codec.max_bytes(count):
            gradient.codec.require_count(gradient.payload, count)
    except InvalidArgument as error:
        raise _located(error, gradient, shard_id) from None


def _require_rows(gradient: Gradient, length: int) -> None:
    codec, num_rows, held = gradient.codec, gradient.num_rows, memoryview(gradient.payload).nbytes
    by_row = not codec.sparse and num_rows * codec.max_bytes(length) == codec.max_bytes(num_rows * length)
    if gradient.extents or codec not in NATIVE or not by_row:
        raise InvalidArgument(
            f"rows of {length} numbers came in {codec.name} with {len(gradient.extents)} extents; expected whole rows, "
            "each encoded by itself, in an encoding of which no block would hold numbers of two rows"
        )
    if held != (expected := ID_BYTES * num_rows + codec.max_bytes(num_rows * length)):
        raise WrongSize(f"{num_rows} ids and rows of {length} numbers in {held} bytes; {codec.name} takes {expected}")


def require_kind(gradient: Gradient, *, shard_id: int, kind: PayloadKind) -> None:
    """Raise InvalidArgument unless the push is of the kind that the run's first worker declared, or of NOTHING."""
    if gradient.kind not in (kind, PayloadKind.NOTHING):
        raise InvalidArgument(
            f"worker {gradient.worker_id!r} pushed kind {gradient.kind} to shard {shard_id}; this run's first worker"
            f" declared {kind.name} ({int(kind)}) for its parameter group"
        )


def require_few_extents(count: int) -> None:
    """Raise InvalidArgument for too many extents. Call it before they are parsed, which takes long for a million."""
    if count > EXTENTS_MAX:
        raise InvalidArgument(f"{count} extents; expected at most {EXTENTS_MAX}, adjacent ones as one")


def require_possible_version(gradient: Gradient, *, shard_id: int, version: int) -> None:
    """Raise InvalidArgument for a gradient computed at a version that a shard of its epoch never had."""
    newest = max(gradient.base_version, gradient.newest_base_version or 0)
    if gradient.base_version < 0 or newest > version:
        wrong = min(gradient.base_version, 0) or newest
        raise InvalidArgument(
            f"worker {gradient.worker_id!r} pushed a gradient computed at version {wrong} of shard {shard_id},"
            f" which is at version {version} of the same epoch; base_version is the version that came with the"
            " pulled parameters"
        )


def require_rate(learning_rate: float) -> None:
    """Raise InvalidArgument unless the kernels can take the learning rate."""
    if not 0.0 <= learning_rate <= FLOAT32_MAX:
        raise InvalidArgument(f"learning_rate is {learning_rate}; expected a finite float32 of at least 0")


def _require_extents(extents: tuple[Extent, ...], *, shard_length: int) -> None:
    require_few_extents(len(extents))
    end = 0
    for offset, length in extents:
        if length < 1:
            raise InvalidArgument(f"the extent at {offset} is {length} parameters long; expected at least 1")
        if offset < end:
            raise InvalidArgument(
                f"the extent at {offset} begins before {end}, where the one before it ends;"
                " expected ascending, disjoint extents"
            )
        end = offset + length
    if end > shard_length:
        raise WrongSize(f"the last extent ends at {end}; the shard has {shard_length} parameters")


class Reply(NamedTuple):
    """Memory for a shard's parameters, from the byte `offset` on. A bytes object must have no other reader yet."""

    buffer: bytes | bytearray | memoryview
    offset: int
    codec: Codec


class PublishedReply:
    """A reply to a worker whose pulls follow a published copy: the shard says what the payload is, and its codec."""

    __slots__ = ("codec", "min_version", "payloads", "since_version")

    def __init__(self, codec: Codec, *, min_version: int = 0) -> None:
        """`min_version`: the version for which the caller has waited."""
        self.codec = codec
        self.min_version = min_version
        # Differences from that version on; or all parameters, in float32, where it is None.
        self.since_version: int | None = None
        self.payloads: Sequence[Buffer] = ()

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(payload).nbytes for payload in self.payloads)

    def in_full(self, parameters: Floats) -> None:
        self.codec, self.payloads = FLOAT32, [parameters.tobytes()]


class SharedMemory:
    """Memory that a worker shares, for a gradient or a reply. Once detached, the worker may overwrite it."""

    attached = True

    def require_attached(self) -> None:
        """Raise ServerUnavailable once the worker's connection has ended: its call is over."""
        if not self.attached:
            raise ServerUnavailable("the worker's memory is attached no longer")


class PushPlan(NamedTuple):
    """One shard's part of a push."""

    shard_id: int
    gradient: Gradient
    # Where newer parameters than the worker's are written; None for none.
    reply: Reply | PublishedReply | None = None
    # The version that the worker holds; -1 for none or one of another epoch.
    held_version: int = -1
    # The worker's shared memory, if gradient or reply lie there.
    memory: SharedMemory | None = None
    # The worker's secret.
    secret: bytes = b""
    # Where the worker's data stands once the push is applied; b"" where it does not say.
    data_position: bytes = b""
