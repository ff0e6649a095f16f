import io

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, load_file, save

from pyps.storage.checkpoint import TensorFile, TensorReader


def test_the_library_reads_what_was_written_in_parts(tmp_path):
    values = np.arange(12, dtype=np.float32)
    with (tmp_path / "file").open("wb") as file:
        tensors = TensorFile(file, {"a": (3, 2), "none": (0, 4), "scalar": (), "b": (5,)}, metadata={"run_id": "run-1"})
        tensors.write("a", values[:4])
        tensors.write("a", values[4:6])
        tensors.write("scalar", values[6:7])
        assert not tensors.complete
        tensors.write("b", values[7:])
        assert tensors.complete
    read = load_file(tmp_path / "file")
    assert {name: array.shape for name, array in read.items()} == {"a": (3, 2), "none": (0, 4), "scalar": (), "b": (5,)}
    assert (read["a"].ravel() == values[:6]).all() and read["scalar"] == 6 and (read["b"] == values[7:]).all()
    with safe_open(str(tmp_path / "file"), framework="np") as opened:
        assert opened.metadata() == {"run_id": "run-1"}


def test_values_begin_at_a_multiple_of_eight():
    for name in ("a", "ab", "abc", "x" * 50):
        memory = io.BytesIO()
        TensorFile(memory, {name: (1,)}).write(name, np.ones(1, np.float32))
        assert (len(memory.getvalue()) - 4) % 8 == 0
        assert load(memory.getvalue())[name] == 1


def test_the_reader_reads_what_the_library_wrote_into_aligned_arrays():
    values = {"a": np.arange(7, dtype=np.float32), "b": np.ones((2, 3), np.float32), "none": np.zeros(0, np.float32)}
    reader = TensorReader(io.BytesIO(save(values)))
    for name in ("b", "a", "none", "b"):
        read = reader.read(name)
        assert read.flags.writeable and (not read.size or read.ctypes.data % 64 == 0)
        np.testing.assert_array_equal(read, values[name].ravel())


def test_a_tensor_that_is_not_float32_is_refused():
    reader = TensorReader(io.BytesIO(save({"double": np.ones(3)})))
    with pytest.raises(ValueError, match="not float32"):
        reader.read("double")


def test_what_is_no_header_is_refused():
    for whole, words in [
        (b"", "Expecting value"),
        (b"\x05", "Expecting value"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        (b"\x02" + bytes(7) + b"[]", "no object"),
        (b"\x09" + bytes(7) + b"{}garbage", "Extra data"),
    ]:
        with pytest.raises(ValueError, match=words):
            pytest.fail(f"{TensorReader(io.BytesIO(whole))} of {whole!r}")


def test_tensors_that_the_file_does_not_hold_are_refused():
    whole = save({"a": np.arange(7, dtype=np.float32), "half": np.zeros(4, np.float16)})
    reader = TensorReader(io.BytesIO(whole))
    with pytest.raises(ValueError, match="no such tensor"):
        reader.read("b")
    with pytest.raises(ValueError, match="not float32"):
        reader.read("half")
    with pytest.raises(ValueError, match="the file ends before it"):
        TensorReader(io.BytesIO(whole[:-20])).read("a")
