"""The safetensors writer: what it writes, the library reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, load_file

from pyps.checkpoint.tensor_file import TensorFile


def test_the_library_reads_what_was_written_in_parts(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["a", "ab", "abc", "x" * 50])
def test_values_begin_at_a_multiple_of_eight(name: str) -> None:
    memory = io.BytesIO()
    TensorFile(memory, {name: (1,)}).write(name, np.ones(1, np.float32))
    assert (len(memory.getvalue()) - 4) % 8 == 0
    assert load(memory.getvalue())[name] == 1
