"""A user's model, loss and data as a function of one flat vector: what the simulator trains."""

from __future__ import annotations

import argparse
import logging
import os
import random
import runpy
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from pyps_client.launch import Launch
from pyps_client.torch.remote_optimizer import RemoteOptimizer
from pyps_wire.errors import InvalidArgument

Floats = npt.NDArray[np.float32]

# The examples whose mean loss is the figure, where a script has no evaluate(model).
FIGURE_EXAMPLES = 512

EXAMPLE = """
    import torch
    def model(): return torch.nn.Linear(8, 1)
    def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
    data = torch.randn(4096, 8), torch.randn(4096, 1)           # or a Dataset, or a function that returns one
    def evaluate(model): return float(loss(model, data))        # may be left out; lower is better
"""


class Problem:
    """Gradients of a model whose parameters are views of one buffer, so that a step copies it once."""

    def __init__(self, defined: MutableMapping[str, Any], *, script: str, seed: int) -> None:
        """Take what a script defines, and make its model; InvalidArgument, in words, for one that cannot be taken.

        Data that a function returns take its place among what is defined: it is called once.
        """
        for name, what in (("model", "model()"), ("loss", "loss(model, batch)"), ("data", "data")):
            if not (name in defined if name == "data" else callable(defined.get(name))):
                raise InvalidArgument(
                    f"{script} defines no {what}; a script to simulate defines model(), loss(model, batch) and data, "
                    f"for example:\n{EXAMPLE}"
                )
        if isinstance(defined["model"], torch.nn.Module):
            raise InvalidArgument(f"model of {script} is no function; expected one that returns a new torch.nn.Module")
        seed_all(seed)
        self.model = defined["model"]()
        if not isinstance(self.model, torch.nn.Module):
            raise InvalidArgument(
                f"model() of {script} returns {type(self.model).__name__}; expected a torch.nn.Module"
            )
        self._loss: Callable[[Any, Any], torch.Tensor] = defined["loss"]
        if callable(defined["data"]) and not hasattr(defined["data"], "__getitem__"):
            defined["data"] = defined["data"]()
        self._data = defined["data"]
        if not _is_data(self._data):
            raise InvalidArgument(
                f"data of {script} is {_described(self._data)}; expected a tuple of tensors with as many rows each, "
                "or a Dataset with __len__ and __getitem__, and not empty"
            )
        tensors = self._data.tensors if isinstance(self._data, TensorDataset) else self._data
        self._tensors: Sequence[torch.Tensor] | None = tensors if isinstance(tensors, tuple | list) else None
        self.num_examples = len(self._tensors[0] if self._tensors is not None else self._data)
        self._flatten(script)
        self._buffers = [buffer for buffer in self.model.buffers() if buffer is not None]
        self._first_buffers = [buffer.clone() for buffer in self._buffers]
        self._buffers_of: dict[str, list[torch.Tensor]] = {}
        self._evaluate: Callable[[Any], Any] | None = defined.get("evaluate")
        sample = np.random.default_rng(0).permutation(self.num_examples)[:FIGURE_EXAMPLES]
        self._sample = None if self._evaluate else self._batch(sample)
        self.model.train()

    def _flatten(self, script: str) -> None:
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        if not parameters:
            raise InvalidArgument(f"model() of {script} returns a model without parameters to train")
        for each in parameters:
            if each.dtype != torch.float32 or each.device.type != "cpu":
                raise InvalidArgument(
                    f"model() of {script} has parameters of {each.dtype} on {each.device}; expected float32 on cpu"
                )
        self.num_parameters = sum(each.numel() for each in parameters)
        flat, gradient = torch.empty(self.num_parameters), torch.zeros(self.num_parameters)
        end = 0
        for each in parameters:
            place = slice(end, end := end + each.numel())
            flat[place] = each.detach().reshape(-1)
            each.data = flat[place].view(each.shape)
            each.grad = gradient[place].view(each.shape)
        self._gradient = gradient
        self._script, self._places = script, self._memory()
        # The memory of both is torch's.
        self.parameters: Floats = flat.numpy()
        self._gradient_values: Floats = gradient.numpy()

    def gradient(self, worker_id: str, examples: npt.NDArray[Any]) -> Floats:
        """Return the gradient of the mean loss of these examples at `parameters`; the next call writes over it.

        Buffers such as BatchNorm's are the worker's own. NaN where the loss is not finite.
        """
        own = self._buffers_of.setdefault(worker_id, self._first_buffers) if self._buffers else []
        for buffer, value in zip(self._buffers, own, strict=True):
            buffer.copy_(value)
        self._gradient.zero_()
        value = self._loss(self.model, self._batch(examples))
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InvalidArgument(f"loss(model, batch) returns {_described(value)}; expected a number with a gradient")
        value.backward()  # type: ignore[no-untyped-call]
        if self._buffers:
            self._buffers_of[worker_id] = [buffer.clone() for buffer in self._buffers]
        return self._gradient_values

    def figure(self) -> float:
        """Return what the script's evaluate says of `parameters`, or the loss of a fixed sample of the data.

        The buffers are those of the worker that computed last.
        """
        self.model.eval()
        with torch.no_grad():
            value = self._evaluate(self.model) if self._evaluate else self._loss(self.model, self._sample)
        self.model.train()
        if self._memory() != self._places:
            raise InvalidArgument(
                f"{self._script} gives its model other parameters, or gradients of its own, while it trains; expected "
                "a loss and an evaluate that only compute, without zero_grad() and without a change of layers"
            )
        try:
            return float(value.__float__())
        except (AttributeError, TypeError, ValueError, RuntimeError):
            what = "evaluate(model)" if self._evaluate else "loss(model, batch)"
            raise InvalidArgument(f"{what} returns {_described(value)}; expected a number") from None

    def _memory(self) -> list[tuple[int, int]]:
        """Return where the values and the gradients of all that is trained lie."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        return [(each.data_ptr(), 0 if each.grad is None else each.grad.data_ptr()) for each in trained]

    def _batch(self, examples: npt.NDArray[Any]) -> Any:
        if self._tensors is not None:
            index = torch.from_numpy(examples)
            return tuple(tensor[index] for tensor in self._tensors)
        return default_collate([self._data[int(each)] for each in examples])


def use_threads(count: int) -> None:
    """Compute in so many threads: another number may change the last bits."""
    torch.set_num_threads(count)


def seed_all(seed: int) -> None:
    """Let all that scripts draw from give the same numbers: first values, dropout, augmentation."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _described(value: Any) -> str:
    """Return what something is, in words for a refusal."""
    name = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    items = list(dict.fromkeys(map(_described, value)))[:4] if isinstance(value, tuple | list) else []
    return f"{name} of {', '.join(items)}" if items else name


def _is_data(data: Any) -> bool:
    if isinstance(data, tuple | list):
        rows = {len(each) if isinstance(each, torch.Tensor) and each.dim() else 0 for each in data}
        return len(rows) == 1 and 0 not in rows
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data) > 0


def main() -> None:
    """Train a script as a real worker, for `pyps advise --check`, until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    for name, kind in (("--batch-size", int), ("--rate", float), ("--codec", str), ("--threads", int)):
        parser.add_argument(name, type=kind, required=True)
    options = parser.parse_args()
    logging.getLogger("pyps.client").setLevel(logging.WARNING)
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    use_threads(options.threads)
    seed_all(0)
    problem = Problem(runpy.run_path(options.script, run_name="__pyps_simulate__"), script=options.script, seed=0)
    optimizer = RemoteOptimizer(
        problem.model,
        torch.optim.SGD(problem.model.parameters(), lr=options.rate),
        launch=Launch(gradient_codec=options.codec, parameter_codec=options.codec),
    )
    drawn = np.random.default_rng(int(os.environ["PYPS_WORKER_INDEX"]))
    while True:
        problem.gradient("", drawn.integers(problem.num_examples, size=options.batch_size))
        optimizer.step()


if __name__ == "__main__":
    main()
