"""What the kernels' tests share: every instruction set, inputs, and references of the codecs."""

import functools
import re

import numpy as np
import pytest

from pyps import _kernels
from pyps.core.rules import RULES
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32

# Those of CMakeLists.txt.
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
# The native codecs that write each number by itself.
WORDS = (FLOAT32, FLOAT16, BFLOAT16)
# The last is beyond what the kernels fetch ahead, and beyond the bytes from which they write past the caches.
LENGTHS = [0, 1, 7, 8, 9, 4097, 140_003]


@pytest.fixture(params=INSTRUCTION_SETS, autouse=True)
def instruction_set(request):
    """Runs each test of a module that has this name on every instruction set; one that is missing is a skip."""
    if request.param not in _kernels.available():
        pytest.skip(f"this processor, or this build for it, has no {request.param}")
    before = _kernels.isa()
    _kernels.select(request.param)
    yield request.param
    _kernels.select(before)


# Each rule takes those of its formula.
NUMBERS = {
    "rate": 0.1,
    "momentum": 0.9,
    "decay": 0.99,
    "beta1": 0.9,
    "beta2": 0.999,
    "share": 0.25,
    "ends": 1.0,
    "gradient_share": 0.7,
    "gradient_share1": 0.1,
    "gradient_share2": 0.001,
    "root_scale": 31.6,
    "eps": 1e-10,
    "weight_decay": 0.0,
    "parameter_share": 1.0,
}


def apply(rule, parameters, *slots_and_gradients, reply=None, guarded=False, **numbers):
    """Calls the kernel of the rule, whose slots come in their order; numbers that are not given are those above."""
    *slots, gradients = slots_and_gradients
    kernel = _kernels.ShardKernel(rule, parameters, dict(zip(RULES[rule].slot_names, slots, strict=True)))
    values = NUMBERS | numbers
    return kernel.apply(gradients, tuple(values[name] for name in kernel.numbers), reply, guarded)


def decode_reference(payload, codec):
    if codec == BFLOAT16:
        return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
    dtype = np.float32 if codec == FLOAT32 else np.float16
    return np.frombuffer(payload, dtype).astype(np.float32)


def encode_reference(values, codec):
    if codec == FLOAT32:
        return values.tobytes()
    if codec == FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def around_all_halves(codec):
    """Every finite value of 16 bits, the ties between neighbours, what lies next to each, and what overflows."""
    decoded = decode_reference(np.arange(65536, dtype=np.uint16).tobytes(), codec)
    decoded = decoded[np.isfinite(decoded)]
    ties = np.unique(decoded).astype(np.float64)
    ties = ((ties[1:] + ties[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([decoded, ties, np.float32([65519.996, 65520, np.inf, -np.inf])])
    up, down = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))
    return np.concatenate([exact, up, down])


def lane_sum(terms):
    """Element i in lane i modulo 16, the lanes added in order."""
    rows = np.zeros(-(-len(terms) // 16) * 16)
    rows[: len(terms)] = terms
    lanes = np.zeros(16)
    for row in rows.reshape(-1, 16):
        lanes += row
    total = 0.0
    for lane in lanes:
        total += lane
    return total


def bits(values):
    return values.view(np.uint32)


@functools.cache
def _wide_values(length, seed):
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-20, 10, length)).astype(np.float32)
    values = random.standard_normal(length).astype(np.float32) * scale
    values[random.random(length) < 0.05] = 0
    return values


def wide_values(length, seed):
    """Normal values times powers of two, so that roundings of every kind occur; some are zero."""
    return _wide_values(length, seed).copy()


@functools.cache
def payload_of(length, codec, seed):
    return encode_reference(_wide_values(length, seed), codec)


def at_offset(payload, offset):
    return memoryview(bytes(offset) + payload)[offset:]


def read_only(array):
    array.flags.writeable = False
    return array


def misaligned(length):
    return np.frombuffer(bytearray(4 * length + 1), np.float32, offset=1)


def assert_refused(call, error, words):
    """The call raises that error with those words, which name the case where it does not."""
    try:
        call()
    except error as raised:
        assert re.search(words, str(raised)), f"{raised!r} says nothing of {words!r}"
    else:
        pytest.fail(f"no {error.__name__} of {words!r}")
