"""The gradient of a portion: a sum over its examples, of the same bits whoever computes it, and in little memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pyps_client.lbfgs import gradient
from pyps_client.lbfgs.gradient import PortionGradient, loss_function
from pyps_client.replica.group import Group
from pyps_client.torch.gradients import Gradients
from pyps_client.torch.layout import Layout, plan
from pyps_wire.errors import InvalidArgument
from support import compensated_sum

Batches = list[tuple[Any, int]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


def examples(count: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 7, generator=random).to(dtype), torch.randint(4, (count,), generator=random)


def batches(inputs: torch.Tensor, targets: torch.Tensor, size: int) -> Batches:
    pairs = zip(inputs.split(size), targets.split(size), strict=True)
    return [([x, y], len(y)) for x, y in pairs]


class Worker:
    def __init__(
        self, model: nn.Module, loss_of: Callable[[nn.Module, Any], Any] | None = None, *, keep_apart: bool = False
    ) -> None:
        self.model = model
        self.layout: Layout = plan(model, [{"params": [p for p in model.parameters() if p.requires_grad]}])
        self.vectors = [np.full(size, 9, np.float32) for size in self.layout.model.group_sizes]
        self.gathered = Gradients(self.layout, self.vectors)
        loss = functional.cross_entropy if loss_of is None else None
        self.gradient = PortionGradient(self.layout, self.gathered, loss_function(model, loss, loss_of))
        self.gradient.begin_pass(keep_apart=keep_apart)

    def portion(self, *portions: Batches) -> np.ndarray:
        for portion in portions:
            self.gradient.compute_batches(portion)
            self.gradient.keep()
        sealed = self.gradient.sealed()
        sent = sealed[0].copy()
        self.gradient.clear()
        return sent


def reference(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """The gradient of the summed loss, in float64 at once."""
    twin = make_model(torch.float64)
    twin.load_state_dict(model.state_dict())
    functional.cross_entropy(twin(inputs.double()), targets, reduction="sum").backward()
    return torch.cat([p.grad.reshape(-1) for p in twin.parameters() if p.grad is not None]).numpy()


def test_it_is_the_gradient_of_the_loss_summed_over_examples_whatever_the_sizes_of_batches():
    worker = Worker(make_model())
    inputs, targets = examples(50)
    expected = reference(worker.model, inputs, targets)
    for size in (50, 16, 7, 1):
        np.testing.assert_allclose(worker.portion(batches(inputs, targets, size)), expected, rtol=1e-4, atol=1e-5)
    loss_sum = worker.gradient.compute_batches(batches(inputs, targets, 16))
    with torch.no_grad():
        summed = functional.cross_entropy(worker.model(inputs), targets, reduction="sum").item()
    assert loss_sum == pytest.approx(summed, rel=1e-6)


def test_a_portions_loss_has_the_same_bits_in_every_version_of_python(monkeypatch):
    # Sums of a few losses of float32 would be exact.
    worker = Worker(make_model(), lambda model, batch: functional.cross_entropy(model(batch[0]).double(), batch[1]))
    portions = [batches(*examples(200, seed=seed), 1) for seed in range(4)]
    before = [worker.gradient.compute_batches(portion) for portion in portions]
    monkeypatch.setattr(gradient, "sum", compensated_sum, raising=False)
    assert [worker.gradient.compute_batches(portion) for portion in portions] == before


def test_a_portion_has_the_same_bits_whoever_computes_it_and_after_whatever():
    first, other = (batches(*examples(40, seed=seed), 16) for seed in (1, 2))
    expected = Worker(make_model()).portion(first)
    for keep_apart in (False, True):
        worker = Worker(make_model(), keep_apart=keep_apart)
        for before in ([other], [other, other]):
            worker.portion(*before)
            np.testing.assert_array_equal(worker.portion(first), expected)


def test_a_portion_that_another_was_first_with_leaves_no_trace():
    first, second, lost = (batches(*examples(40, seed=seed), 16) for seed in (1, 2, 3))
    worker = Worker(make_model(), keep_apart=True)
    expected = worker.portion(first) + worker.portion(second)

    worker.gradient.compute_batches(first)
    worker.gradient.keep()
    worker.gradient.compute_batches(lost)
    worker.gradient.compute_batches(second)
    worker.gradient.keep()
    sealed = worker.gradient.sealed()

    np.testing.assert_array_equal(sealed[0], expected)


def test_a_portion_that_goes_alone_is_computed_right_where_it_is_sent_from():
    worker = Worker(make_model())
    worker.gradient.compute_batches(batches(*examples(40), 16))
    begin, end = worker.vectors[0].ctypes.data, worker.vectors[0].ctypes.data + worker.vectors[0].nbytes
    places = [p.grad.data_ptr() for p in worker.model.parameters() if p.grad is not None]
    assert len(places) == 4 and all(begin <= place < end for place in places)


def test_from_one_pass_to_the_next_portions_may_be_summed_or_go_alone():
    first, second = (batches(*examples(40, seed=seed), 16) for seed in (1, 2))
    worker = Worker(make_model())
    alone = [worker.portion(first), worker.portion(second)]
    worker.gradient.begin_pass(keep_apart=True)
    np.testing.assert_array_equal(worker.portion(first, second), alone[0] + alone[1])
    worker.gradient.begin_pass(keep_apart=False)
    np.testing.assert_array_equal(worker.portion(second), alone[1])


def test_batches_of_a_narrow_model_are_summed_in_float32():
    worker = Worker(make_model(torch.bfloat16))
    portion = batches(*examples(64, torch.bfloat16), 1)
    expected = np.zeros_like(worker.vectors[0])
    for batch in portion:
        expected += worker.portion([batch])
    np.testing.assert_array_equal(worker.portion(portion), expected)


def test_a_tied_weight_counts_once_with_both_its_uses_and_an_unused_one_is_zero():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5, bias=False)
            self.b = nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight
            self.unused = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    model = Tied()
    worker = Worker(model, lambda m, batch: m.b(m.a(batch) * m.frozen).square().mean())
    assert [tensor.name for tensor in worker.layout.model.tensors] == ["unused", "a.weight"]
    inputs = torch.randn(6, 5)
    sent = worker.portion([(inputs, 6)])

    model.zero_grad()
    (model.b(model.a(inputs) * model.frozen).square().mean() * 6).backward()
    np.testing.assert_allclose(sent[3:], model.a.weight.grad.reshape(-1), rtol=1e-6)
    np.testing.assert_array_equal(sent[:3], 0)
    assert model.frozen.grad is None


def test_a_useless_loss_is_refused_in_one_sentence():
    portion = batches(*examples(40, torch.bfloat16), 16)

    def summed(model: nn.Module, batch: Any, **options: str) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], **options)

    useless: list[tuple[Callable[[nn.Module, Any], Any], str]] = [
        (lambda model, batch: 0.5, "The loss is a float; expected a torch tensor with one number"),
        (
            lambda model, batch: summed(model, batch, reduction="none"),
            r"The loss is a tensor of shape \[16\]; expected one number",
        ),
        (lambda model, batch: summed(model, batch).detach(), "The loss does not depend on the model's parameters"),
        (lambda model, batch: (model.zero_grad(), summed(model, batch))[1], "The loss cleared the model's gradients"),
    ]
    for loss_of, words in useless:
        with pytest.raises(InvalidArgument, match=words):
            Worker(make_model(torch.bfloat16), loss_of).portion(portion, portion)


def test_exactly_one_loss_is_required_and_batches_that_are_no_pairs_need_loss_of():
    for loss, loss_of, words in (
        (None, None, "Neither of loss and loss_of were given"),
        (functional.cross_entropy, lambda model, batch: 0, "Both of loss and loss_of were given"),
        ("cross_entropy", None, "The loss is a str; expected a function"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            loss_function(make_model(), loss, loss_of)  # type: ignore[arg-type]
    of_batch = loss_function(make_model(), functional.cross_entropy, None)
    with pytest.raises(
        InvalidArgument, match=r"gives batches that are a Tensor; expected \(input, target\) pairs: give loss_of="
    ):
        of_batch(torch.zeros(4, 7))


class OthersOverflow(Group):
    """A replica of which another process has a sum that is not finite."""

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        return [number + 1.0 for number in numbers]


def test_a_sum_that_another_process_of_the_replica_cannot_send_is_not_sent() -> None:
    worker = Worker(make_model())
    loss_of = loss_function(worker.model, functional.cross_entropy, None)
    gradient = PortionGradient(worker.layout, worker.gathered, loss_of, peers=OthersOverflow())
    gradient.compute_batches(batches(*examples(6), 3))
    gradient.keep()

    assert gradient.sealed() is None
    assert "another process of the replica" in gradient.why_not_sealed()
