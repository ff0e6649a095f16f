"""The vectors that lie on one shard, and the arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyps import _kernels
from pyps.core.arrays import CACHE_LINE_BYTES, Floats
from pyps.core.shard import Shard
from pyps.core.vectors.program import PARAMETERS, Instruction, Operation, Precision, names_read

# Float32 or float64.
Vector: TypeAlias = npt.NDArray[Any]
# What an instruction answers with, nothing for most.
Answer: TypeAlias = list[float]

_DTYPES: Mapping[Precision, np.dtype[Any]] = {
    Precision.FLOAT32: np.dtype(np.float32),
    Precision.FLOAT64: np.dtype(np.float64),
}


def make_vector(length: int, precision: Precision) -> Vector:
    """Returns zeros that begin on a cache line."""
    dtype = _DTYPES[precision]
    memory = np.zeros(length * dtype.itemsize + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[start : start + length * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Script:
    """Instructions that are known to be possible on every shard, and what they need."""

    instructions: Sequence[Instruction]
    # The pairs of the history before the first of them.
    oldest: int
    newest: int
    # The stages of each FOLD, in their order, the parts of each by shard.
    folds: Sequence[Sequence[Mapping[int, Floats]]]


class ShardVectors:
    """The vectors of one shard by name. Called under its machine's lock."""

    def __init__(self, shard: Shard, vectors: Mapping[str, Vector] | None = None) -> None:
        self.shard = shard
        self.arrays: dict[str, Vector] = dict(vectors or {})

    def prepare(self, script: Script) -> list[Vector]:
        """Returns the memory of the vectors that the script makes, in their order."""
        return [
            make_vector(self.shard.length, instruction.precision)
            for instruction in script.instructions
            if instruction.operation == Operation.ALLOC
        ]

    def execute(self, script: Script, memory: Sequence[Vector]) -> list[Answer]:
        """Executes the instructions in order, in the memory prepared; returns what each answers with."""
        oldest, newest = script.oldest, script.newest
        free_memory, folds = iter(memory), iter(script.folds)
        answers: list[Answer] = []
        for instruction in script.instructions:
            answer: Answer = []
            match instruction.operation:
                case Operation.ALLOC:
                    self.arrays[instruction.target] = next(free_memory)
                case Operation.FREE:
                    del self.arrays[instruction.target]
                case Operation.PUSH_HISTORY:
                    newest += 1
                    self.arrays[f"s{newest}"] = self.arrays.pop(instruction.left)
                    self.arrays[f"y{newest}"] = self.arrays.pop(instruction.right)
                case Operation.DROP_OLDEST:
                    del self.arrays[f"s{oldest}"], self.arrays[f"y{oldest}"]
                    oldest += 1
                case Operation.FOLD:
                    parts = [stage[self.shard.shard_id] for stage in next(folds)]
                    _kernels.vector_fold(self.arrays[instruction.target], parts, float(instruction.count))
                case Operation.MOVE:
                    self._move(instruction)
                case Operation.BEGIN_PASS:
                    answer = []  # The server's, not the shard's.
                case _:
                    answer = self._compute(instruction)
            answers.append(answer)
        return answers

    def _compute(self, instruction: Instruction) -> Answer:
        compute = _COMPUTATIONS[instruction.operation]
        if PARAMETERS not in names_read(instruction):
            return compute(instruction, self.arrays) or []
        return self.shard.read(
            lambda _, parameters: compute(instruction, {**self.arrays, PARAMETERS: parameters}) or []
        )

    def _move(self, instruction: Instruction) -> None:
        def write(parameters: Floats) -> None:
            arrays = {**self.arrays, PARAMETERS: parameters}
            right = arrays[instruction.right] if instruction.right else None
            _kernels.vector_move(parameters, arrays[instruction.left], instruction.scalar, right)

        self.shard.rewrite(write)


Arrays: TypeAlias = Mapping[str, Vector]


def _combine(i: Instruction, arrays: Arrays) -> None:
    _kernels.vector_combine(arrays[i.target], list(i.scalars), [arrays[name] for name in i.names])


def _gram(i: Instruction, arrays: Arrays) -> Answer:
    rows, columns = [arrays[name] for name in i.names], [arrays[name] for name in i.others]
    answer: Answer = _kernels.vector_gram(rows, columns).ravel().tolist()
    return answer


_COMPUTATIONS: Mapping[Operation, Callable[[Instruction, Arrays], Answer | None]] = {
    Operation.FILL: lambda i, arrays: _kernels.vector_fill(arrays[i.target], i.scalar),
    Operation.COPY: lambda i, arrays: _kernels.vector_copy(arrays[i.target], arrays[i.left]),
    Operation.SCALE: lambda i, arrays: _kernels.vector_scale(arrays[i.target], i.scalar),
    Operation.ADD: lambda i, arrays: _kernels.vector_add(arrays[i.target], arrays[i.left], arrays[i.right]),
    Operation.SUB: lambda i, arrays: _kernels.vector_subtract(arrays[i.target], arrays[i.left], arrays[i.right]),
    Operation.MUL: lambda i, arrays: _kernels.vector_multiply(arrays[i.target], arrays[i.left], arrays[i.right]),
    Operation.AXPY: lambda i, arrays: _kernels.vector_axpy(arrays[i.target], i.scalar, arrays[i.left]),
    Operation.DOT: lambda i, arrays: [_kernels.vector_dot(arrays[i.left], arrays[i.right])],
    Operation.NORM1: lambda i, arrays: [_kernels.vector_norm1(arrays[i.left])],
    Operation.NORM_INF: lambda i, arrays: [_kernels.vector_norm_inf(arrays[i.left])],
    Operation.COMBINE: _combine,
    Operation.GRAM: _gram,
}
