"""What people do around an optimizer in torch: each loop trains here as it does with torch's own, number for number."""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional
from torch.optim import swa_utils

from replicas import ReplicaJob, serve
from training import batches, joined, mlp, parameters_of, train

Loop = Callable[[torch.nn.Module, torch.optim.Optimizer], None]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def assert_trains_as_torch(start_server, loop: Loop, make_optimizer=sgd, make_model=mlp, **options: str):
    """Runs the same loop with torch's own optimizer and with servers'; returns the second model and its snapshot."""
    model, twin = make_model(), make_model()
    loop(twin, make_optimizer(twin))
    with joined(model, make_optimizer(model), start_server().data, **options) as optimizer:
        loop(model, optimizer)
        snapshot = optimizer.snapshot()
    np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=1e-6)
    return model, snapshot


def test_groups_with_decays_and_betas_of_their_own(start_server):
    def grouped(model: torch.nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "betas": (0.8, 0.99)},
                {"params": others, "weight_decay": 0.0, "lr": 0.02, "eps": 1e-6},
            ],
            lr=0.01,
        )

    assert_trains_as_torch(start_server, lambda model, optimizer: train(batches(5), (model, optimizer)), grouped)


def test_a_channels_last_network_keeps_its_format(start_server):
    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)

    images = torch.randn(5, 2, 3, 8, 8)

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in images:
            optimizer.zero_grad()
            model(batch.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()

    model, snapshot = assert_trains_as_torch(start_server, loop, sgd, network)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert tuple(snapshot["0.weight"].shape) == (8, 3, 3, 3)


def test_a_tied_embedding_is_trained_once_with_both_gradients(start_server):
    def network() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False))
        model[1].weight = model[0].weight
        return model

    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 3])).square().mean().backward()
            optimizer.step()

    model, snapshot = assert_trains_as_torch(start_server, loop, sgd, network)
    assert list(snapshot) == ["0.weight", "1.weight"]
    evaluated = network()
    evaluated.load_state_dict(snapshot)
    np.testing.assert_array_equal(parameters_of(evaluated), parameters_of(model))
    assert model[1].weight is model[0].weight


def test_gradients_that_are_clipped_by_norm_or_value_wherever_they_lie(start_server):
    for transport in ("grpc", "shm"):
        for in_place in (False, True):

            def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, in_place=in_place) -> None:
                for number, batch in enumerate(batches(6)):
                    optimizer.zero_grad(set_to_none=not in_place)
                    loss_of(model, batch).backward()
                    if number % 2:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    else:
                        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                    optimizer.step()

            assert_trains_as_torch(start_server, loop, transport=transport)


def test_a_layer_that_is_frozen_amid_training_rests_until_it_thaws(start_server):
    def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step, batch in enumerate(batches(9)):
            model[0].requires_grad_(not 3 <= step < 6)
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            assert torch.equal(model[0].weight, before) == (3 <= step < 6)

    assert_trains_as_torch(start_server, loop)


def test_a_moving_average_of_the_model(start_server):
    for transport in ("grpc", "shm"):
        averages = []

        def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer, averages=averages) -> None:
            average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
            for batch in batches(5):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                average.update_parameters(model)
            averages.append(parameters_of(average))

        assert_trains_as_torch(start_server, loop, transport=transport)
        np.testing.assert_allclose(*averages, atol=1e-6, err_msg=transport)


def test_two_networks_against_each_other_each_on_a_server_of_its_own(start_server):
    """A generative adversarial network."""

    def networks() -> tuple[torch.nn.Module, torch.nn.Module]:
        torch.manual_seed(0)
        return torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def loop(
        networks: tuple[torch.nn.Module, torch.nn.Module], optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> list[float]:
        (generator, critic), (of_generator, of_critic) = networks, optimizers
        noise = torch.Generator().manual_seed(1)
        ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
        for _ in range(6):
            real = torch.randn(16, 8, generator=noise) + 1
            fake = generator(torch.randn(16, 4, generator=noise))
            of_critic.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(critic(real), ones)
            (loss + functional.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)).backward()
            of_critic.step()
            of_generator.zero_grad()
            functional.binary_cross_entropy_with_logits(critic(fake), ones).backward()
            of_generator.step()
        return [value for network in networks for value in parameters_of(network)]

    twins = networks()
    expected = loop(twins, tuple(adam(network) for network in twins))
    for transport in ("grpc", "shm"):
        players = networks()
        of_generator, of_critic = (
            joined(network, adam(network), start_server().data, transport=transport) for network in players
        )
        with of_generator, of_critic:
            found = loop(players, (of_generator, of_critic))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=transport)


# One of two processes, of which the second holds nothing of the last layer. An evaluation leaves whole parameters in
# the model.
FULLY_SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from pyps_client.data import Portions
from pyps_client.torch import RemoteOptimizer, Replica

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

dist.init_process_group("gloo")
model, twin = network(), network()
mesh = init_device_mesh("cpu", (2,))
for part in (model[0], model):
    fully_shard(part, mesh=mesh)
adam, its = (torch.optim.Adam(of.parameters(), lr=0.01) for of in (model, twin))
with RemoteOptimizer(model, adam, replica=Replica()) as optimizer:
    data = torch.randn(15, 5, generator=torch.Generator().manual_seed(1))
    portions = Portions(data, optimizer, batch_size=6)
    for epoch in range(2):
        for numbers in portions:
            for module, by in ((model, optimizer), (twin, its)):
                by.zero_grad()
                module(data[list(numbers)]).square().mean().backward()
                by.step()
        with torch.no_grad():
            model(data)
    assert optimizer.steps == 6
    found = optimizer.snapshot()
for name, expected in twin.state_dict().items():
    for values in (found[name], model.get_parameter(name).full_tensor()):
        torch.testing.assert_close(values.detach(), expected, rtol=0, atol=1e-6)
dist.destroy_process_group()
"""


def test_a_model_that_is_fully_sharded_over_more_processes_than_a_layer_has_rows(start_server, start_python):
    ReplicaJob(start_python, serve(start_server, 1), FULLY_SHARDED, script="-c").ended_well()
