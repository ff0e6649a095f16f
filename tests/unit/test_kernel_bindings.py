"""The kernels' Python face: what it refuses before anything is written, instruction sets, and the GIL."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kernel_values import apply, assert_refused, misaligned, read_only
from pyps import _kernels
from pyps.core.rules import RULES


def floats(length=4):
    return np.ones(length, np.float32)


def alone(gradient, codec=1):
    return [(gradient, codec, 1.0)]


REFUSED_ARRAYS = [
    ([1.0] * 4, TypeError, "is of type list; expected a numpy.ndarray of float32"),
    (np.ones(4, np.float16), TypeError, "has dtype float16; expected float32"),
    (np.ones(4, np.int64), TypeError, "has dtype int64; expected float32"),
    (np.ones(4, ">f4"), TypeError, "has dtype >f4; expected float32"),
    (np.ones((2, 2), np.float32), ValueError, "is 2-dimensional; expected 1-D"),
    (np.ones(8, np.float32)[::2], ValueError, "is not C-contiguous"),
    (np.ones(4, np.float32)[::-1], ValueError, "is not C-contiguous"),
    (misaligned(4), ValueError, "is not aligned to 4 bytes"),
]


def test_arrays_that_do_not_fit_are_refused():
    for array, error, words in REFUSED_ARRAYS:
        for name, call in [*calls_with(array), *calls_on_vectors_with(array)]:
            assert_refused(call, error, f"^{name} {words}")
    for name, call in [*calls_with(np.ones(4)), *calls_on_vectors_with(np.ones(4))]:
        assert_refused(call, TypeError, f"^{name} has dtype float64; expected float32")


def calls_with(target):
    """Every place of an array, by the name that its errors have."""
    g = floats()
    in_rules = []
    for rule in RULES.values():
        for place, name in enumerate(["parameters", *rule.slot_names]):
            arrays = [floats() for _ in range(1 + len(rule.slot_names))]
            arrays[place] = target
            in_rules.append((name, lambda rule=rule.name, arrays=arrays: apply(rule, *arrays, alone(g))))
    return [
        *in_rules,
        ("array", lambda: _kernels.bandwidth([floats(), target], g)),
        ("out", lambda: _kernels.decode(g, 1, target)),
        ("values", lambda: _kernels.encode(target, 1)),
        ("values", lambda: _kernels.summary(target)),
    ]


def calls_on_vectors_with(array):
    """Every place of an array among the kernels of vectors."""
    k = _kernels
    writing = [
        lambda z: k.vector_copy(z, floats()),
        lambda z: k.vector_move(z, floats(), 2, floats()),
        lambda z: k.vector_combine(z, [2], [floats()]),
        lambda z: k.vector_fold(z, [floats()], 2),
    ]
    reading = {
        "x": [
            lambda x: k.vector_copy(floats(), x),
            lambda x: k.vector_move(floats(), x, 2, floats()),
            lambda x: k.vector_move(floats(), x, 2, None),
            lambda x: k.vector_dot(x, floats()),
            k.vector_norm1,
            k.vector_norm_inf,
        ],
        "y": [lambda y: k.vector_move(floats(), floats(), 2, y), lambda y: k.vector_dot(floats(), y)],
        r"vectors\[1\]": [lambda x: k.vector_combine(floats(), [1, 2], [floats(), x])],
        r"stages\[1\]": [lambda x: k.vector_fold(floats(), [floats(), x], 2)],
        r"names\[1\]": [lambda x: k.vector_gram([floats(), x], [floats()])],
        r"others\[0\]": [lambda x: k.vector_gram([floats()], [x])],
    }
    for name, calls in {"z": writing, **reading}.items():
        for call in calls:
            yield name, lambda call=call: call(array)


WRITTEN = {"z", "array", "out", "parameters", *(slot for rule in RULES.values() for slot in rule.slot_names)}


def test_a_read_only_target_is_refused_and_a_read_only_source_is_not():
    for name, call in [*calls_with(read_only(floats())), *calls_on_vectors_with(read_only(floats()))]:
        if name in WRITTEN:
            assert_refused(call, ValueError, f"^{name} is not writable")
        else:
            call()
    apply("sgd", floats(), alone(read_only(floats())))


REFUSED_GRADIENTS = [
    (5, 1, TypeError, r"^gradient\S* is of type int"),
    (np.ones(4), 1, TypeError, "format 'd'"),
    (np.ones(8, np.float16), 1, TypeError, "format 'e'"),
    (np.ones(2, np.float32), 2, TypeError, "format 'f'"),
    (np.ones(4, np.float16), 3, TypeError, "format 'e'"),
    (np.ones(4, np.uint16), 2, TypeError, "format 'H'"),
    (np.ones(4, np.int32), 1, TypeError, "format 'i'"),
    (np.ones(4, ">f4"), 1, TypeError, "format '>f'"),
    (np.zeros(4, "f2,u2"), 1, TypeError, "format 'T"),
    (np.ones(8, np.float32)[::2], 1, ValueError, "not C-contiguous"),
    (memoryview(bytes(32))[::2], 1, ValueError, "not C-contiguous"),
    (bytes(15), 1, ValueError, "15 bytes; 4 values of float32 take 16"),
    (bytes(17), 1, ValueError, "17 bytes; 4 values of float32 take 16"),
    (bytes(16), 2, ValueError, "16 bytes; 4 values of float16 take 8"),
    (bytes(16), 0, ValueError, "codec is 0; expected float32"),
    (bytes(16), 44, ValueError, "codec is 44; expected float32"),
]


def test_gradients_that_do_not_fit_are_refused():
    p, a, out = floats(), floats(), floats()
    for gradient, codec, error, words in REFUSED_GRADIENTS:
        for call in (
            lambda g=gradient, c=codec: apply("sgd", p, alone(g, c)),
            lambda g=gradient, c=codec: apply("sgd", p, alone(floats()) + alone(g, c)),
            lambda g=gradient, c=codec: apply("adagrad", p, a, alone(g, c)),
            lambda g=gradient, c=codec: _kernels.decode(g, c, out),
            lambda g=gradient, c=codec: _kernels.first_non_finite(g, c, 4),
        ):
            assert_refused(call, error, words)
    # Their bytes are 2^64, which is 0 in 64 bits.
    assert_refused(lambda: _kernels.first_non_finite(b"", 1, 2**62), ValueError, "0 bytes; 4611686018427387904 values")

    assert (p == 1).all() and (a == 1).all() and (out == 1).all()


def test_a_gradient_may_be_any_buffer_of_the_right_bytes():
    for codec, dtype in {1: np.float32, 2: np.float16, 3: np.uint16}.items():
        payload = _kernels.encode(np.array([0.5, -3, 0, 7], np.float32), codec)
        expected = floats()
        apply("sgd", expected, alone(payload, codec))
        for gradient in (
            bytearray(payload),
            memoryview(payload),
            memoryview(payload).cast("b"),
            memoryview(payload).cast("c"),
            np.frombuffer(payload, np.uint8),
            np.frombuffer(payload, dtype),
            np.frombuffer(payload, dtype).reshape(2, 2),
        ):
            p = floats()
            apply("sgd", p, alone(gradient, codec))
            assert np.array_equal(p, expected), (codec, gradient)


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="accumulator is 5 long; parameters is 4 long"):
        apply("adagrad", floats(4), floats(5), alone(floats(4)))
    with pytest.raises(ValueError, match="second_moment is 3 long; parameters is 4 long"):
        apply("adam", floats(4), floats(4), floats(3), alone(floats(4)))


def test_overlapping_memory_is_refused():
    memory = floats(8)
    with pytest.raises(ValueError, match="parameters and accumulator overlap in memory"):
        apply("adagrad", memory[:4], memory[3:7], alone(floats()))
    with pytest.raises(ValueError, match="out and gradient overlap in memory"):
        _kernels.decode(memory[3:7], 1, memory[:4])
    with pytest.raises(ValueError, match="first_moment and second_moment overlap in memory"):
        apply("adam", floats(), memory[:4], memory[3:7], alone(floats()))
    apply("adagrad", memory[:4], memory[4:], alone(floats()))


REFUSED_LISTS = [
    (5, TypeError, "gradients is of type int; expected a list of"),
    ((g for g in alone(floats())), TypeError, "gradients is of type generator"),
    ([], ValueError, "gradients is empty; expected at least one"),
    ([floats()], TypeError, r"gradients\[0\] is of type ndarray; expected a tuple"),
    ([(floats(), 1)], TypeError, r"gradients\[0\] is of type tuple; expected a tuple \(payload"),
    ([(floats(), "FLOAT32", 1.0)], TypeError, r"gradients\[0\]'s codec is of type str"),
    ([(floats(), 1.5, 1.0)], TypeError, r"gradients\[0\]'s codec is of type float"),
    ([*alone(floats()), (floats(), 1, None)], TypeError, r"gradients\[1\]'s factor is of type NoneType"),
    ([(floats(), 1, 1e39)], ValueError, r"gradients\[0\]'s factor is no number that is finite"),
]


def test_lists_that_do_not_fit_are_refused():
    p = floats()
    for gradients, error, words in REFUSED_LISTS:
        assert_refused(lambda g=gradients: apply("sgd", p, g), error, words)

    assert (p == 1).all()


def test_rules_slots_and_numbers_that_do_not_fit_are_refused():
    for name in ("rate", "decay", "gradient_share", "eps", "weight_decay"):
        for value in (float("nan"), float("inf"), 1e39):  # The last in float32.
            words = f"^{name} is .*; expected a number that is finite in float32"
            assert_refused(
                lambda n={name: value}: apply("rmsprop", floats(), floats(), alone(floats()), **n), ValueError, words
            )
        words = f"^rmsprop's {name} is of type str; expected a number"
        assert_refused(
            lambda n=name: apply("rmsprop", floats(), floats(), alone(floats()), **{n: "0.1"}), TypeError, words
        )
    kernel = _kernels.ShardKernel("sgd", floats(), {})
    assert_refused(
        lambda: kernel.apply(alone(floats()), (0.1,)), ValueError, "^1 numbers; sgd takes rate, weight_decay"
    )
    for start, stop in ((3, 2), (0, 5), (5, 5)):
        words = f"^the stretch {start} to {stop} is none of 4 parameters"
        call = lambda s=start, e=stop: kernel.apply(alone(floats()), (0.1, 0.0), start=s, stop=e)  # noqa: E731
        assert_refused(call, ValueError, words)
    moments = {"first_moment": floats()}
    words = "^second_moment is missing; the rule takes first_moment, second_moment"
    assert_refused(lambda: _kernels.ShardKernel("adam", floats(), moments), ValueError, words)
    words = f"^rule is 'lamb'; expected one of: {', '.join(RULES)}$"
    assert_refused(lambda: _kernels.ShardKernel("lamb", floats(), {}), ValueError, words)


def test_vectors_of_unequal_length_are_refused():
    z, k = floats(), _kernels
    for call, words in (
        (lambda: k.vector_copy(z, floats(5)), "x is 5 long; z is 4 long"),
        (lambda: k.vector_move(z, floats(), 1, floats(3)), "y is 3 long; z is 4 long"),
        (lambda: k.vector_dot(floats(), floats(3)), "y is 3 long; x is 4 long"),
        (lambda: k.vector_combine(z, [1, 1], [floats(), floats(3)]), r"vectors\[1\] is 3 long; vectors\[0\] is 4 long"),
        (lambda: k.vector_combine(z, [1], [floats(3)]), r"vectors\[0\] is 3 long; z is 4 long"),
        (lambda: k.vector_fold(z, [floats(3)], 1), r"stages\[0\] is 3 long; z is 4 long"),
        (lambda: k.vector_gram([floats(), floats(3)], [floats()]), r"names\[1\] is 3 long; names\[0\] is 4 long"),
        (lambda: k.vector_gram([floats()], [floats(3)]), r"others\[0\] is 3 long; names\[0\] is 4 long"),
    ):
        assert_refused(call, ValueError, f"^{words}$")
    assert (z == 1).all()


def test_vectors_that_overlap_in_part_are_refused():
    memory = floats(9)
    z, k = memory[:4], _kernels
    for x in (memory[1:5], memory[3:7]):
        for call in (
            lambda x=x: k.vector_copy(z, x),
            lambda x=x: k.vector_move(z, x, 1, floats()),
            lambda x=x: k.vector_move(z, floats(), 1, x),
            lambda x=x: k.vector_combine(z, [1, 1], [floats(), x]),
        ):
            assert_refused(call, ValueError, r"^z and .* overlap in memory$")
    with pytest.raises(ValueError, match=r"^z and stages\[0\] overlap in memory$"):
        k.vector_fold(z, [memory[1:5]], 1)
    k.vector_move(z, memory[4:8], 1, memory[5:9])


def test_scalars_and_lists_of_vectors_that_do_not_fit_are_refused():
    z, k = floats(), _kernels
    for divisor in (0, -1, float("nan"), float("inf")):
        words = r"^divisor is .*; expected a number above 0 that is finite$"
        assert_refused(lambda d=divisor: k.vector_fold(z, [floats()], d), ValueError, words)
    for call, error, words in (
        (lambda: k.vector_combine(z, [1, 2], [floats()]), ValueError, "2 scalars for 1 vectors; expected one for each"),
        (lambda: k.vector_combine(z, [1], floats()), TypeError, "vectors is of type ndarray; expected a list of array"),
        (lambda: k.vector_gram([floats()], iter([])), TypeError, "others is of type list_iterator; expected a list of"),
    ):
        assert_refused(call, error, f"^{words}")
    assert (z == 1).all()


def test_an_unknown_instruction_set_cannot_be_selected():
    isa = _kernels.isa()
    with pytest.raises(ValueError, match=r"instruction set is 'bogus'.*expected one of: baseline"):
        _kernels.select("bogus")
    assert _kernels.isa() == isa


def isa_of_a_new_process(name):
    # No fork: the variable is read at the first call.
    return subprocess.run(
        [sys.executable, "-c", "from pyps import _kernels; print(_kernels.isa())"],
        env=os.environ | {"PYPS_ISA": name},
        capture_output=True,
        text=True,
    )


def test_pyps_isa_chooses_the_instruction_set():
    for isa in _kernels.available():
        assert isa_of_a_new_process(isa).stdout.strip() == isa


def test_a_wrong_pyps_isa_is_one_clear_error():
    result = isa_of_a_new_process("bogus")

    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: PYPS_ISA is 'bogus'")
    assert last.endswith("expected one of: " + ", ".join(_kernels.available()))


LONG, SHORT = 1 << 20, 8000
GIL_CALLS = {
    "a rule": lambda x, y, z: apply("adagrad", x, y, alone(z)),
    "a sum": lambda x, y, z: apply("sgd", x, alone(y) + alone(z)),
    "bandwidth": lambda x, y, z: _kernels.bandwidth([x, y], z),
    "first_non_finite": lambda x, y, z: _kernels.first_non_finite(z, 1, z.size),
    "decode": lambda x, y, z: _kernels.decode(z, 1, x),
    "encode": lambda x, y, z: _kernels.encode(x, 1),
    "summary": lambda x, y, z: _kernels.summary(x),
    "a reply": lambda x, y, z: apply("sgd", x, alone(z), reply=(y, 0, 1), guarded=True),
    "write": lambda x, y, z: _kernels.ShardKernel("sgd", x, {}).write((y, 0, 1)),
}


def another_thread_runs(call):
    """Return whether the call gives up the GIL: with a switch interval of an hour, another thread gets it only then."""
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()

    def other():
        with gate:
            ran.set()

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # Before the thread starts: a thread keeps to the interval it met first.
    try:
        thread.start()
        gate.release()
        for _ in range(1000):
            call()
            if ran.is_set():
                break
        return ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_another_thread_runs_during_a_long_call_and_not_during_a_short_one():
    for name, call in GIL_CALLS.items():
        for length in (LONG, SHORT):
            if name == "bandwidth" and length == SHORT:
                continue  # A benchmark's, which always gives it up.
            arrays = [np.zeros(length, np.float32) for _ in range(3)]
            assert another_thread_runs(lambda call=call, arrays=arrays: call(*arrays)) == (length == LONG), (
                name,
                length,
            )
