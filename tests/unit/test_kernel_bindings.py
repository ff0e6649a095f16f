"""The kernels' Python face: what it refuses before anything is written, instruction sets, and the GIL."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kernel_values import misaligned, read_only
from pyps import _kernels


def floats(length=4):
    return np.ones(length, np.float32)


def alone(gradient, codec=1):
    return [(gradient, codec, 1.0)]


def adam(p, m, v, gradients, **settings):
    settings = {"rate": 0.1, "beta1": 0.9, "beta2": 0.999, "root_scale": 1.0, "eps": 0.0} | settings
    _kernels.adam(p, m, v, gradients, **settings)


REFUSED_ARRAYS = {
    "list": ([1.0] * 4, TypeError, "list"),
    "float64": (np.ones(4), TypeError, "float64"),
    "big-endian": (np.ones(4, ">f4"), TypeError, ">f4"),
    "two dimensions": (np.ones((2, 2), np.float32), ValueError, "2-dimensional"),
    "strided": (np.ones(8, np.float32)[::2], ValueError, "not C-contiguous"),
    "reversed": (np.ones(4, np.float32)[::-1], ValueError, "not C-contiguous"),
    "misaligned": (misaligned(4), ValueError, "not aligned"),
}


@pytest.mark.parametrize("target, error, words", REFUSED_ARRAYS.values(), ids=REFUSED_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(target, error, words):
    g = floats()
    calls = [
        ("parameters", lambda: _kernels.sgd(target, alone(g), rate=0.1)),
        ("parameters", lambda: _kernels.adagrad(target, floats(), alone(g), rate=0.1, eps=0)),
        ("velocity", lambda: _kernels.momentum(floats(), target, alone(g), rate=0.1, momentum=0.9)),
        ("velocity", lambda: _kernels.heavy_ball(floats(), target, alone(g), rate=0.1, momentum=0.9)),
        ("velocity", lambda: _kernels.nesterov(floats(), target, alone(g), rate=0.1, momentum=0.9)),
        ("accumulator", lambda: _kernels.adagrad(floats(), target, alone(g), rate=0.1, eps=0)),
        ("square_average", lambda: _kernels.rmsprop(floats(), target, alone(g), rate=0.1, decay=0.9, eps=0)),
        ("first_moment", lambda: adam(floats(), target, floats(), alone(g))),
        ("second_moment", lambda: adam(floats(), floats(), target, alone(g))),
        ("array", lambda: _kernels.bandwidth([floats(), target], g)),
        ("out", lambda: _kernels.decode(g, 1, target)),
        ("values", lambda: _kernels.encode(target, 1)),
        ("values", lambda: _kernels.summary(target)),
        ("values", lambda: _kernels.join_frame(b"", 1, target)),
    ]
    for name, call in calls:
        with pytest.raises(error, match=f"^{name} .*{words}"):
            call()


def test_a_read_only_target_is_refused():
    with pytest.raises(ValueError, match="parameters is not writable"):
        _kernels.sgd(read_only(floats()), alone(floats()), rate=0.1)
    with pytest.raises(ValueError, match="accumulator is not writable"):
        _kernels.adagrad(floats(), read_only(floats()), alone(floats()), rate=0.1, eps=0)
    with pytest.raises(ValueError, match="out is not writable"):
        _kernels.decode(floats(), 1, read_only(floats()))
    with pytest.raises(ValueError, match="second_moment is not writable"):
        adam(floats(), floats(), read_only(floats()), alone(floats()))


def test_what_is_only_read_may_be_read_only():
    assert _kernels.encode(read_only(floats()), 1) == floats().tobytes()
    _kernels.sgd(floats(), alone(read_only(floats())), rate=0.1)


REFUSED_GRADIENTS = {
    "no buffer": (5, 1, TypeError, r"^gradient\S* is of type int"),
    "float64": (np.ones(4), 1, TypeError, "format 'd'"),
    "float16 as float32": (np.ones(8, np.float16), 1, TypeError, "format 'e'"),
    "float32 as float16": (np.ones(2, np.float32), 2, TypeError, "format 'f'"),
    "float16 as bfloat16": (np.ones(4, np.float16), 3, TypeError, "format 'e'"),
    "uint16 as float16": (np.ones(4, np.uint16), 2, TypeError, "format 'H'"),
    "int32": (np.ones(4, np.int32), 1, TypeError, "format 'i'"),
    "big-endian": (np.ones(4, ">f4"), 1, TypeError, "format '>f'"),
    "structured": (np.zeros(4, "f2,u2"), 1, TypeError, "format 'T"),
    "strided": (np.ones(8, np.float32)[::2], 1, ValueError, "not C-contiguous"),
    "strided bytes": (memoryview(bytes(32))[::2], 1, ValueError, "not C-contiguous"),
    "too short": (bytes(15), 1, ValueError, "15 bytes; 4 values of float32 take 16"),
    "too long": (bytes(17), 1, ValueError, "17 bytes; 4 values of float32 take 16"),
    "too long for float16": (bytes(16), 2, ValueError, "16 bytes; 4 values of float16 take 8"),
    "codec 0": (bytes(16), 0, ValueError, "codec is 0; expected FLOAT32"),
    "codec 4": (bytes(16), 4, ValueError, "codec is 4; expected FLOAT32"),
}


@pytest.mark.parametrize("gradient, codec, error, words", REFUSED_GRADIENTS.values(), ids=REFUSED_GRADIENTS)
def test_gradients_that_do_not_fit_are_refused(gradient, codec, error, words):
    p, a, out = floats(), floats(), floats()

    for call in (
        lambda: _kernels.sgd(p, alone(gradient, codec), rate=0.1),
        lambda: _kernels.sgd(p, [*alone(floats()), (gradient, codec, 1.0)], rate=0.1),
        lambda: _kernels.adagrad(p, a, alone(gradient, codec), rate=0.1, eps=0),
        lambda: _kernels.decode(gradient, codec, out),
    ):
        with pytest.raises(error, match=words):
            call()

    assert (p == 1).all() and (a == 1).all() and (out == 1).all()


@pytest.mark.parametrize("codec", [_kernels.FLOAT32, _kernels.FLOAT16, _kernels.BFLOAT16])
def test_a_gradient_may_be_any_buffer_of_the_right_bytes(codec):
    payload = _kernels.encode(np.array([0.5, -3, 0, 7], np.float32), codec)
    dtype = {1: np.float32, 2: np.float16, 3: np.uint16}[codec]
    expected = floats()
    _kernels.sgd(expected, alone(payload, codec), rate=0.1)
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
        _kernels.sgd(p, alone(gradient, codec), rate=0.1)
        assert np.array_equal(p, expected)


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="accumulator is 5 long; parameters is 4 long"):
        _kernels.adagrad(floats(4), floats(5), alone(floats(4)), rate=0.1, eps=0)
    with pytest.raises(ValueError, match="second_moment is 3 long; parameters is 4 long"):
        adam(floats(4), floats(4), floats(3), alone(floats(4)))


def test_overlapping_memory_is_refused():
    memory = floats(8)
    for p, a, g in (
        (memory[:4], memory[3:7], floats()),
        (memory[:4], floats(), memory[3:7]),
        (floats(), memory[:4], memory[3:7]),
    ):
        with pytest.raises(ValueError, match="overlap in memory"):
            _kernels.adagrad(p, a, alone(g), rate=0.1, eps=0)
    with pytest.raises(ValueError, match="overlap in memory"):
        _kernels.sgd(memory[:4], alone(memoryview(memory).cast("B")[15:31]), rate=0.1)
    with pytest.raises(ValueError, match=r"parameters and gradients\[1\] overlap in memory"):
        _kernels.sgd(memory[:4], [*alone(floats()), *alone(memory[:4])], rate=0.1)
    with pytest.raises(ValueError, match="first_moment and second_moment overlap in memory"):
        adam(floats(), memory[:4], memory[3:7], alone(floats()))
    _kernels.adagrad(memory[:4], memory[4:], alone(floats()), rate=0.1, eps=0)


REFUSED_LISTS = {
    "no list": (5, TypeError, "gradients is of type int; expected a list of"),
    "a generator": ((g for g in alone(floats())), TypeError, "gradients is of type generator"),
    "no gradient": ([], ValueError, "gradients is empty; expected at least one"),
    "an array": ([floats()], TypeError, r"gradients\[0\] is of type ndarray; expected a tuple"),
    "two of three": ([(floats(), 1)], TypeError, r"gradients\[0\] is of type tuple; expected a tuple \(payload"),
    "no codec": ([(floats(), "FLOAT32", 1.0)], TypeError, r"gradients\[0\]'s codec is of type str"),
    "codec 1.5": ([(floats(), 1.5, 1.0)], TypeError, r"gradients\[0\]'s codec is of type float"),
    "no factor": ([*alone(floats()), (floats(), 1, None)], TypeError, r"gradients\[1\]'s factor is of type NoneType"),
    "infinite factor": ([(floats(), 1, 1e39)], ValueError, r"gradients\[0\]'s factor is no number that is finite"),
}


@pytest.mark.parametrize("gradients, error, words", REFUSED_LISTS.values(), ids=REFUSED_LISTS)
def test_lists_that_do_not_fit_are_refused(gradients, error, words):
    p = floats()

    with pytest.raises(error, match=words):
        _kernels.sgd(p, gradients, rate=0.1)

    assert (p == 1).all()


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 1e39])
def test_a_rate_that_is_not_finite_in_float32_is_refused(rate):
    with pytest.raises(ValueError, match=r"rate is .*; expected a number that is finite"):
        _kernels.sgd(floats(), alone(floats()), rate=rate)
    with pytest.raises(ValueError, match=r"eps is .*; expected a number that is finite"):
        _kernels.adagrad(floats(), floats(), alone(floats()), rate=0.1, eps=rate)


@pytest.mark.parametrize("name", ["eps", "weight_decay", "root_scale"])
def test_a_negative_setting_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} is -0.1.*; expected at least 0"):
        adam(floats(), floats(), floats(), alone(floats()), **{name: -0.1})


@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} is .*; expected a number from 0 to 1"):
        adam(floats(), floats(), floats(), alone(floats()), **{name: value})


def test_rate_and_eps_are_named_at_the_call():
    with pytest.raises(TypeError):
        _kernels.sgd(floats(), alone(floats()), 0.1)
    with pytest.raises(TypeError):
        _kernels.adagrad(floats(), floats(), alone(floats()), 0.1, 0.0)


def test_the_guard_refuses_a_broken_number():
    with pytest.raises(ValueError, match="7 bytes, which is no whole number of float32"):
        _kernels.first_non_finite(bytes(7), 1)
    with pytest.raises(ValueError, match="7 bytes, which is no whole number of float32"):
        _kernels.norm(bytes(7), 1)


# Instruction sets and the GIL.


def test_an_unknown_instruction_set_cannot_be_selected():
    isa = _kernels.isa()
    with pytest.raises(ValueError, match=r"instruction set is 'bogus'.*expected one of: baseline"):
        _kernels.select("bogus")
    assert _kernels.isa() == isa


def isa_of_a_new_process(name):
    return subprocess.run(
        [sys.executable, "-c", "from pyps import _kernels; print(_kernels.isa())"],
        env=os.environ | {"PYPS_ISA": name},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("isa", _kernels.available())
def test_pyps_isa_chooses_the_instruction_set(isa):
    assert isa_of_a_new_process(isa).stdout.strip() == isa


def test_a_wrong_pyps_isa_is_one_clear_error():
    result = isa_of_a_new_process("bogus")

    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: PYPS_ISA is 'bogus'")
    assert last.endswith("expected one of: " + ", ".join(_kernels.available()))


LONG = 1 << 20
GIL_CALLS = {
    "sgd": lambda x, y, z: _kernels.sgd(x, alone(z), rate=0.0),
    "a sum": lambda x, y, z: _kernels.sgd(x, alone(y) + alone(z), rate=0.0),
    "momentum": lambda x, y, z: _kernels.momentum(x, y, alone(z), rate=0.0, momentum=0.0),
    "heavy_ball": lambda x, y, z: _kernels.heavy_ball(x, y, alone(z), rate=0.0, momentum=0.0),
    "nesterov": lambda x, y, z: _kernels.nesterov(x, y, alone(z), rate=0.0, momentum=0.0),
    "adagrad": lambda x, y, z: _kernels.adagrad(x, y, alone(z), rate=0.0, eps=1.0),
    "rmsprop": lambda x, y, z: _kernels.rmsprop(x, y, alone(z), rate=0.0, decay=0.5, eps=1.0),
    "adam": lambda x, y, z: adam(x, y, np.zeros_like(x), alone(z)),
    "norm": lambda x, y, z: _kernels.norm(z, 1),
    "bandwidth": lambda x, y, z: _kernels.bandwidth([x, y], z),
    "first_non_finite": lambda x, y, z: _kernels.first_non_finite(z, 1),
    "decode": lambda x, y, z: _kernels.decode(z, 1, x),
    "encode": lambda x, y, z: _kernels.encode(x, 1),
    "summary": lambda x, y, z: _kernels.summary(x),
    "a reply": lambda x, y, z: _kernels.sgd(x, alone(z), rate=0.0, reply=(y, 0, 1), guarded=True),
    "encode_into": lambda x, y, z: _kernels.encode_into(x, (y, 0, 1)),
    "join_frame": lambda x, y, z: _kernels.join_frame(b"", 1, x),
}


@pytest.mark.parametrize("call", GIL_CALLS.values(), ids=GIL_CALLS.keys())
def test_another_thread_runs_during_the_call(call):
    """With a switch interval of an hour, the other thread gets the GIL only if the call gives it up."""
    arrays = [np.zeros(LONG, np.float32) for _ in range(3)]
    gate, ran = threading.Lock(), []
    gate.acquire()

    def other():
        with gate:
            ran.append(True)

    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # Before the thread starts: a thread keeps to the interval it met first.
    try:
        thread.start()
        gate.release()
        for _ in range(1000):
            call(*arrays)
            if ran:
                break
        progressed = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()

    assert progressed
