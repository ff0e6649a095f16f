import io

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from pyps.storage.checkpoint import TensorReader, tensors_header


@pytest.mark.parametrize("name", ["a", "ab", "abc", "x" * 50])
def test_the_library_reads_what_was_written_and_values_begin_at_a_multiple_of_eight(tmp_path, name):
    values = np.arange(12, dtype=np.float32)
    header = tensors_header({name: 7, "none": 0, "b": 5}, {"run_id": "run-1"})
    assert len(header) % 8 == 0
    (tmp_path / "file").write_bytes(header + values.tobytes())
    read = load_file(tmp_path / "file")
    assert {name: array.tolist() for name, array in read.items()} == {
        name: values[:7].tolist(),
        "none": [],
        "b": values[7:].tolist(),
    }
    with safe_open(str(tmp_path / "file"), framework="np") as opened:
        assert opened.metadata() == {"run_id": "run-1"}


def test_the_reader_reads_what_the_library_wrote_into_aligned_arrays():
    values = {"a": np.arange(7, dtype=np.float32), "b": np.ones((2, 3), np.float32), "none": np.zeros(0, np.float32)}
    reader = TensorReader(io.BytesIO(save(values)))
    for name in ("b", "a", "none", "b"):
        read = reader.read(name)
        assert read.flags.writeable and (not read.size or read.ctypes.data % 64 == 0)
        np.testing.assert_array_equal(read, values[name].ravel())


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        (b"", "Expecting value"),
        (b"\x05", "Expecting value"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        (b"\x02" + bytes(7) + b"[]", "no object"),
        (b"\x09" + bytes(7) + b"{}garbage", "Extra data"),
    ],
)
def test_what_is_no_header_is_refused(whole, words):
    with pytest.raises(ValueError, match=words):
        TensorReader(io.BytesIO(whole))


def test_tensors_that_the_file_does_not_hold_are_refused():
    whole = save({"a": np.arange(7, dtype=np.float32), "half": np.zeros(4, np.float16)})
    for held, name, words in [
        (whole, "b", "no such tensor"),
        (whole, "half", "not float32"),
        (whole[:-20], "a", "the file ends before it"),
    ]:
        with pytest.raises(ValueError, match=words):
            TensorReader(io.BytesIO(held)).read(name)
