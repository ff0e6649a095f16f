"""A model's parameters in a file of others: the first of a run, from safetensors or torch; an export, for torch."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from zipfile import is_zipfile

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pyps import logs
from pyps.core.arrays import Floats, aligned_zeros
from pyps_wire.codecs import BFLOAT16
from pyps_wire.errors import InvalidArgument, ModelMismatch
from pyps_wire.partition import Model, Partition, Tensor, block_index

# The kinds of numbers that are read, as safetensors and numpy name them; numpy has no bfloat16, of which it gets words.
_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Under these names files with more than a model hold its state dict.
_MODELS = ("model", "state_dict", "model_state_dict")
_LISTED = 8
# Characters of a name or a reason in a message.
_TEXT_MAX = 200

log = logs.get("pyps.storage")


class Stored(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    # In the file's own kind, mapped; None where that is not read.
    numbers: npt.NDArray[Any] | None


class ParameterFile:
    """A file with the values of a model's tensors by their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A block of a split tensor, end to end.
        self._block: tuple[Tensor | None, npt.NDArray[Any]] = (None, np.zeros(0))
        try:
            self._tensors = _of_safetensors(path) if path.suffix == ".safetensors" else _of_torch(path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"--init-from {path} cannot be read: {reason!s:.{_TEXT_MAX}}") from None

    def check(self, model: Model) -> None:
        """Raise ModelMismatch where the file lacks a tensor of the model, or has it in another shape or kind."""
        wanted = {tensor.name: tensor.whole_shape or tensor.shape for tensor in model.tensors}
        shared = [(name, shape, self._tensors[name]) for name, shape in wanted.items() if name in self._tensors]
        faults = {
            "not in the file": [name for name in wanted if name not in self._tensors],
            "of another shape": [
                f"{name} (the model's is {list(shape)}, the file's {list(stored.shape)})"
                for name, shape, stored in shared
                if shape != stored.shape
            ],
            "of another kind": [f"{name} ({one.kind})" for name, _, one in shared if one.numbers is None],
        }
        found = [f"{what}: {_listed(names)}" for what, names in faults.items() if names]
        if found:
            alone = self._tensors.keys() - wanted.keys()
            found += [f"in the file alone: {_listed(alone)}"] if alone else []
            raise ModelMismatch(f"--init-from {self.path} does not fit the worker's model; {'; '.join(found)}")

    def values(self, partition: Partition, shard_id: int) -> Floats:
        """Return a shard's values; raise InvalidArgument for NaN or infinity."""
        values = aligned_zeros(partition.shard(shard_id).length)
        for piece in partition.pieces(shard_id):
            tensor = partition.model.tensors[piece.tensor_index]
            numbers = self._numbers(tensor)[piece.tensor_offset : piece.tensor_offset + piece.length]
            place = values[piece.shard_offset : piece.shard_offset + piece.length]
            if self._tensors[tensor.name].kind == "BF16":
                BFLOAT16.decode_into(numbers.tobytes(), place)
            else:
                with np.errstate(over="ignore"):
                    place[:] = numbers
            if not np.isfinite(place).all():
                raise InvalidArgument(
                    f"--init-from {self.path} holds NaN or infinity, in tensor {tensor.name!r:.{_TEXT_MAX}}"
                )
        return values

    def log_unused(self, model: Model) -> None:
        """Log which tensors of the file are none of the model's."""
        if unused := self._tensors.keys() - {tensor.name for tensor in model.tensors}:
            log.warning(
                "not of the shared model, so left to the workers' script", file=self.path, tensors=_listed(unused)
            )

    def _numbers(self, tensor: Tensor) -> npt.NDArray[Any]:
        numbers = self._tensors[tensor.name].numbers
        assert numbers is not None
        if not tensor.whole_shape:
            return numbers.reshape(-1)
        if self._block[0] != tensor:
            self._block = tensor, numbers[block_index(tensor.offset, tensor.shape)].reshape(-1)
        return self._block[1]


def save_for_torch(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]], *, distributed: bool) -> None:
    """Write a state dict as torch.save does, or as a folder of torch.distributed.checkpoint. Raises OSError."""
    try:
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
    except ImportError:
        raise InvalidArgument("this format takes torch, which is not installed here: write safetensors") from None
    state = {name: torch.from_numpy(np.array(values)) for name, values in tensors.items()}
    try:
        if not distributed:
            torch.save(state, path)
            return
        with NamedTemporaryFile(dir=path.parent) as file:
            torch.save(state, file.name)
            torch_save_to_dcp(file.name, path)
    except (RuntimeError, CheckpointException) as error:
        # So torch says that a disk is full.
        raise OSError(errno.EIO, str(error).partition("\n")[0]) from None


def _of_safetensors(path: Path) -> dict[str, Stored]:
    # The library checks the file, but reads no bfloat16 without torch.
    with path.open("rb") as file, safe_open(path, framework="np"):
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r")[8 + length :]
    tensors = {}
    for name, entry in header.items():
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = data[begin:end].view(_KINDS[kind]).reshape(shape) if kind in _KINDS else None
        tensors[name] = Stored(kind, shape, numbers)
    return tensors


def _of_torch(path: Path) -> dict[str, Stored]:
    if path.is_dir():
        raise InvalidArgument(
            f"--init-from {path} is a folder; expected a file: `python -m torch.distributed.checkpoint.format_utils "
            "dcp_to_torch FOLDER FILE` makes one of a distributed checkpoint"
        )
    try:
        import torch
    except ImportError:
        raise InvalidArgument(
            f"--init-from {path} is no .safetensors file, and to read another takes torch, which is not installed "
            "beside this server: save it by safetensors.torch.save_file"
        ) from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0] if is_zipfile(path) else "it is no zip file"
        raise InvalidArgument(f"--init-from {path} is no state dict that torch saved: {reason:.{_TEXT_MAX}}") from None
    inner = [loaded[name] for name in _MODELS if name in loaded] if isinstance(loaded, Mapping) else []
    state = inner[0] if inner and isinstance(inner[0], Mapping) else loaded
    kinds = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in state.items()
    ):
        raise InvalidArgument(
            f"--init-from {path} holds more than tensors by their names: save model.state_dict() alone"
        )
    tensors = {}
    for name, tensor in state.items():
        kind = kinds.get(tensor.dtype, str(tensor.dtype))
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            form = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
            tensors[name] = Stored(f"{kind}, {form}", () if tensor.is_nested else tuple(tensor.shape), None)
            continue
        # Torch may keep a sign, or a view, apart from the numbers.
        values = tensor.detach().resolve_neg()
        words = values.view(torch.uint16) if kind == "BF16" else values
        tensors[name] = Stored(kind, tuple(tensor.shape), words.numpy() if kind in _KINDS else None)
    return tensors


def _listed(names: Iterable[str]) -> str:
    ordered = [name if len(name) <= _TEXT_MAX else f"{name[:_TEXT_MAX]}..." for name in sorted(names)]
    return ", ".join(ordered[:_LISTED]) + (f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else "")
