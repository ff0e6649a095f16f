"""The gradient of a portion of the data set: a sum over its examples, the same bits from every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader

from pyps_client.data.samplers import length_of
from pyps_client.replica.group import ALONE, Group
from pyps_client.retry import SIGNAL_SECONDS
from pyps_client.torch.gradients import Gradients
from pyps_client.torch.joining import Joining
from pyps_client.torch.layout import Layout
from pyps_client.vectors import Vectors
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import Portion

if TYPE_CHECKING:
    from pyps_client.replica.dtensor import ModelCut

# The number of batches to load ahead.
BATCHES_AHEAD = 4


class MapDataset(Protocol):
    """A data set whose examples are numbered."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PortionGradient:
    """Sums of a loss's gradients: over the examples of one portion, and over the claimed portions.

    The loss is a mean over a batch. Backward starts with the number of the batch's examples, so that autograd adds to
    `grad` the sum over them. Batches are added in their order, in float32, or in float64 for such parameters. So the
    bits depend only on the portion, the parameters, the size of a batch, torch's number of threads, and the processor.

    It owns the model's `grad` until `release`. The sum over portions has memory of its own only if they are kept apart,
    on a device, or of a model that is cut: then each batch's gradients are brought together by the replica's processes.
    """

    def __init__(
        self,
        layout: Layout,
        gathered: Gradients,
        loss_of: Callable[[Any], Any],
        *,
        cut: ModelCut | None = None,
        peers: Group = ALONE,
    ) -> None:
        """`gathered`: the memory of the sum, which is sent. `loss_of(batch)`: the mean loss of a batch."""
        self._layout = layout
        self._gathered = gathered
        self._loss_of = loss_of
        self._cut = cut
        self._peers = peers
        self._keeps_apart = False
        if cut is None:
            for parameter in layout.parameters:
                parameter.grad = torch.empty_like(parameter, memory_format=torch.preserve_format)
        else:
            self.release()
        # By index, for parameters whose type is too narrow for the sum over batches, or that are cut: that sum.
        self._wide = {
            index: torch.empty_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for index, parameter in enumerate(layout.parameters)
            if cut is not None or parameter.dtype.itemsize < torch.float32.itemsize
        }

    def begin_pass(self, *, keep_apart: bool) -> None:
        """Start a pass; with `keep_apart` the sum does not change while the next portion is computed."""
        self._keeps_apart = keep_apart
        if keep_apart:
            self._gathered.take_back()

    def compute_batches(self, batches: Iterable[tuple[Any, int]]) -> float:
        """Compute the gradient over batches, each with its number of examples; return the float64 sum of their losses.

        The gradient that was computed before is lost, unless it was kept. In a replica the losses are the leader's.
        """
        if not self._keeps_apart and self._cut is None:
            # Compute it in the memory that is sent.
            self._gathered.hand_out()
        with torch.no_grad():
            torch._foreach_zero_([*self._own(), *self._wide.values()])
        losses: list[tuple[torch.Tensor, int]] = []
        for batch, count in batches:
            with torch.enable_grad():
                loss = _checked(self._loss_of(batch))
            gradients = self._own()
            loss.backward(gradient=torch.full_like(loss, count))  # type: ignore[no-untyped-call]
            self._widen(gradients)
            losses.append((loss.detach(), count))
        # At the end, since each float() waits for the device. Not by sum(), which rounds otherwise from Python 3.12 on:
        # the same portion must have the same loss from every worker.
        loss_sum = 0.0
        for loss, count in losses:
            loss_sum += float(loss) * count
        return self._peers.broadcast(loss_sum)

    def keep(self) -> None:
        sums: dict[int, torch.Tensor] = dict(enumerate(self._own())) | self._wide
        self._gathered.add([sums[index] for index in range(len(sums))], versions={})

    def sealed(self) -> Vectors | None:
        """Return the sum in the type in which it is sent, valid until `clear`; None if it is not finite in it.

        In a replica None on all processes if it is not finite on one.
        """
        if self._peers.all_reduce([float(not self._gathered.seal())])[0]:
            return None
        self._gathered.ready()
        return self._gathered.vectors

    def why_not_sealed(self) -> str:
        if not self._gathered.are_finite():
            return "the gradient is not finite. If every step's is not, look at the loss and at the data."
        if self._gathered.seal():
            return "the gradient of another process of the replica cannot be sent, which says why."
        narrow = self._gathered.wire_dtype
        others = "'bfloat16' or 'float32'" if narrow == torch.float16 else "'float32'"
        return (
            f"the gradient, a sum over the examples, exceeds {torch.finfo(narrow).max:g}, the most that "
            f"{str(narrow).removeprefix('torch.')} holds, in which it is sent. Use gradient_codec={others}."
        )

    def clear(self) -> None:
        self._gathered.clear()

    def release(self) -> None:
        for parameter in self._layout.parameters if self._cut is None else self._cut.claimed.parameters:
            parameter.grad = None

    def _own(self) -> list[torch.Tensor]:
        """Return the model's gradients, one a tensor; zeros for tensors that the loss does not use.

        Of a model that is cut none: they go to the wide sums after each batch.
        """
        gradients: list[torch.Tensor] = []
        if self._cut is not None:
            return gradients
        for parameter in self._layout.parameters:
            if parameter.grad is None:
                raise InvalidArgument(
                    "The loss cleared the model's gradients (zero_grad), which are summed over the batches of a "
                    "portion: let it only compute and return the loss."
                )
            gradients.append(parameter.grad)
        return gradients

    def _widen(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._wide:
            return
        if self._cut is not None:
            gradients = self._cut.gradients()
        pairs = [(wide, narrow) for index, wide in self._wide.items() if (narrow := gradients[index]) is not None]
        with torch.no_grad():
            for wide, narrow in pairs:
                wide.add_(narrow)
            if self._cut is not None:
                self.release()
            else:
                torch._foreach_zero_([narrow for _, narrow in pairs])


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise InvalidArgument(
            f"The loss is a {type(loss).__name__}; expected a torch tensor with one number, the mean over the batch's "
            "examples."
        )
    if loss.numel() != 1:
        raise InvalidArgument(
            f"The loss is a tensor of shape {list(loss.shape)}; expected one number, the mean over the batch's "
            "examples (reduction='mean')."
        )
    if not loss.requires_grad:
        raise InvalidArgument(
            "The loss does not depend on the model's parameters, so it has no gradient: compute it from the model's "
            "output, without detach(), item() or no_grad()."
        )
    return loss


class PortionLoader:
    """Reads a data set by torch's loader, on one thread: a portion in order, and ahead into the likely next portion."""

    def __init__(
        self, dataset: MapDataset, *, batch_size: int, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        """`collate` makes a batch of a list of examples; torch's by default."""
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = collate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pyps-portion-loader")
        # Batches by their examples.
        self._ahead: dict[range, Future[Any]] = {}

    def batches(self, portion: Portion, upcoming: Portion | None = None) -> Iterator[tuple[Any, int]]:
        """Yield the portion's batches, each with its number of examples; the last may have fewer."""
        own = self._ranges(portion)
        order = own + (self._ranges(upcoming) if upcoming is not None else [])
        # These were expected, and are not needed.
        for examples in self._ahead.keys() - set(order):
            self._ahead.pop(examples).cancel()
        for place, examples in enumerate(own):
            for wanted in order[place : place + 1 + BATCHES_AHEAD]:
                if wanted not in self._ahead:
                    self._ahead[wanted] = self._thread.submit(self._read, wanted)
            batch = self._ahead.pop(examples)
            while not batch.done():
                wait([batch], SIGNAL_SECONDS)
            yield batch.result(), len(examples)

    def close(self) -> None:
        """End the thread, after the batch that it reads now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ranges(self, portion: Portion) -> list[range]:
        begins = range(portion.start, portion.stop, self._batch_size)
        return [range(begin, min(begin + self._batch_size, portion.stop)) for begin in begins]

    def _read(self, examples: range) -> Any:
        # Without a generator it would draw from the program's.
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]
            batch_sampler=[list(examples)],
            collate_fn=self._collate,
            generator=torch.Generator(),
        )
        [batch] = loader
        return batch


def checked_length(dataset: Any) -> int:
    length = length_of(dataset)
    if not hasattr(dataset, "__getitem__"):
        raise InvalidArgument(
            f"The data set, a {type(dataset).__name__}, cannot be read by index; expected one with __len__ and "
            "__getitem__, such as torch.utils.data.TensorDataset."
        )
    return length


class PortionComputation(PortionGradient):
    """Computes a worker's portions, in the session's memory."""

    def __init__(self, joined: Joining, loss_of: Callable[[Any], Any], loader: PortionLoader) -> None:
        self._loader = loader
        # Only its memory and its pulls: the coordinator makes the steps.
        self._steps = joined.steps()
        super().__init__(joined.layout, self._steps.gradients, loss_of, cut=joined.cut, peers=joined.replica)

    def begin_pass(self, *, keep_apart: bool) -> None:
        super().begin_pass(keep_apart=keep_apart)
        self.pull()

    def pull(self) -> None:
        """Pull the servers' parameters into the model."""
        steps = self._steps
        # The pull leaves shards that are not newer as they are.
        steps.written.spoiled = steps.written.changed()
        steps.bring()
        steps.note_pulled()
        steps.take_pulled()
        steps.send_copies()
        steps.written.note()

    def compute(self, portion: Portion, upcoming: Portion | None) -> float:
        """Compute a portion and return the sum of its examples' losses. `upcoming`: the likely next one, to load."""
        return self.compute_batches(self._loader.batches(portion, upcoming))

    def close(self) -> None:
        """Stop using the session's memory; the model keeps its parameters."""
        self.release()
        self._steps.close()


def loss_function(
    model: torch.nn.Module, loss: Callable[..., Any] | None, loss_of: Callable[[Any, Any], Any] | None
) -> Callable[[Any], Any]:
    """Return a function of a batch's loss, from one of the two forms that a user may give."""
    if (loss is None) == (loss_of is None):
        given = "neither" if loss is None else "both"
        raise InvalidArgument(
            f"{given.capitalize()} of loss and loss_of were given; expected one: loss(outputs, targets), or "
            "loss_of(model, batch) with loss=None."
        )
    if not callable(loss or loss_of):
        raise InvalidArgument(f"The loss is a {type(loss or loss_of).__name__}; expected a function.")
    if loss_of is not None:
        return lambda batch: loss_of(model, to_device(batch, device_of(model)))
    assert loss is not None

    def of_pair(batch: Any) -> Any:
        if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or len(batch) < 2:
            raise InvalidArgument(
                f"The data set gives batches that are a {type(batch).__name__}; expected (input, target) pairs: give "
                "loss_of=, a function of the model and the batch, for any other."
            )
        inputs, *targets = batch
        outputs = model(to_device(inputs, device_of(model)))
        # The last layer may lie on another device than the first.
        device = outputs.device if isinstance(outputs, torch.Tensor) else device_of(model)
        return loss(outputs, *to_device(targets, device))

    return of_pair


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
