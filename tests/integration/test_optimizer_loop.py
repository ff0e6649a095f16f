"""Ordinary torch training loops run unchanged on RemoteOptimizer, through real servers."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from pyps_client import Client, Launch, RemoteOptimizer
from pyps_client.torch.joining import Joining
from pyps_wire.errors import InvalidArgument, SettingsChanged, UnsupportedOptimizer
from support import status_of, wait_until, workers_of
from training import backward, batches, joined, mlp, parameters_of, remote, train


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_a_closure_is_called_with_gradients_on_and_its_loss_is_reported(start_server):
    server = start_server("--heartbeat-seconds", "0.2")
    model = mlp()
    with remote(model, server, worker_id="me") as optimizer:
        (batch,) = batches(1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        first, second = optimizer.step(closure).item(), optimizer.step(closure).item()
        assert second < first
        assert optimizer.global_step == 2
        reported = wait_until(lambda: workers_of(server.control)["me"].scalars.get("loss"), what="the reported loss")
        assert reported == pytest.approx(second)


def test_another_setting_slots_and_a_later_group_are_refused(start_server):
    server = start_server()
    model = mlp()
    with remote(model, server) as optimizer:
        changed = copy.deepcopy(optimizer.state_dict())
        changed["param_groups"][0]["weight_decay"] = 0.2
        with pytest.raises(SettingsChanged, match=r"weight_decay of parameter group 0 was changed from 0 to 0\.2"):
            optimizer.load_state_dict(changed)
        assert optimizer.param_groups[0]["weight_decay"] == 0
        with pytest.raises(SettingsChanged, match="slots live on the servers"):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"sum": torch.zeros(1)}}})
        with pytest.raises(SettingsChanged, match="cannot be added to a RemoteOptimizer"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(SettingsChanged, match="momentum of parameter group 0 was changed to"):
            optimizer.step()
        assert optimizer.global_step == 0


def test_every_setting_is_explained_where_help_shows_it():
    made = inspect.signature(RemoteOptimizer.__init__).parameters
    for name in [*made][3:]:
        assert f"`{name}`" in (RemoteOptimizer.__init__.__doc__ or ""), name
    assert len(made) - 1 <= 14
    for name in [*inspect.signature(Launch.__init__).parameters][1:-1]:
        assert f"`{name}`" in (Launch.__doc__ or ""), name


def test_a_launch_is_given_whole_or_as_servers(start_server):
    server, model = start_server(), mlp()
    launch = Launch(server.data, gradient_codec=torch.float16, transport="grpc")
    with RemoteOptimizer(model, sgd(model), launch=launch, push_every=2, pull_every=2) as optimizer:
        train(batches(4), (model, optimizer))
        assert (optimizer.transport, optimizer.global_step) == ("grpc", 2)
        assert optimizer.stepper.session.launch.gradient_codec == "float16"
    for client in (RemoteOptimizer, Client):
        arguments = (model, sgd(model)) if client is RemoteOptimizer else ({"w": np.zeros(3, np.float32)}, ("sgd", {}))
        with pytest.raises(InvalidArgument, match=r"servers were given beside launch: name them in launch=Launch\("):
            client(*arguments, "127.0.0.1:1", launch=launch)
        with pytest.raises(InvalidArgument, match="launch is of type dict"):
            client(*arguments, launch={})


def test_a_compiled_step_leaves_the_client_to_python_and_trains_as_torch(start_server, monkeypatch):
    traced: set[str] = set()
    run = InstructionTranslatorBase.run

    def watched(translator: InstructionTranslatorBase) -> None:
        traced.add(f"{translator.f_globals['__name__']}.{translator.f_code.co_name}")
        run(translator)

    monkeypatch.setattr(InstructionTranslatorBase, "run", watched)
    model, twin = mlp(), mlp()
    local = sgd(twin)
    with remote(model, start_server()) as optimizer:

        @torch.compile(backend="eager")
        def step(inputs: torch.Tensor, classes: torch.Tensor) -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()

        for batch in batches(3):
            step(*batch)
            backward(twin, batch)
            local.step()
        np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=1e-6)
    torch._dynamo.reset()
    assert any(name.endswith(".step") for name in traced)
    assert not [name for name in traced if name.startswith("pyps_")]


def test_what_no_server_could_do_is_refused_before_any_connection():
    model = mlp()
    with pytest.raises(UnsupportedOptimizer, match=r"no update rule for torch\.optim\.Adamax"):
        RemoteOptimizer(model, torch.optim.Adamax(model.parameters()), "127.0.0.1:1")
    with pytest.raises(UnsupportedOptimizer, match=r"SGD is a class: make an optimizer of it first"):
        RemoteOptimizer(model, torch.optim.SGD, "127.0.0.1:1")
    for options, message in (
        ({"push_every": True}, "push_every is True; expected a whole number, or None"),
        ({"pull_every": 1.5}, "pull_every is 1.5; expected a whole number, or None"),
        ({"push_every": 0}, "push_every is 0; expected a whole number of minibatches, 1 or more"),
        ({"overlap": True}, "overlap is True; expected a string"),
        ({"overlap": "on"}, "overlap is 'on'; expected one of off, step, backward"),
        ({"compat": "tf"}, "compat is 'tf'; expected one of None, paper"),
        ({"owns_schedule": "yes"}, "owns_schedule is 'yes'; expected True or False, or None"),
        ({"local_learning_rate": "x"}, "local_learning_rate is 'x'; expected a number, or None"),
        ({"buffers": "mine"}, "buffers is 'mine'; expected one of local, average, first"),
        ({"replica": "mine"}, "replica is 'mine'; expected a pyps_client.torch.Replica"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            RemoteOptimizer(model, sgd(model), "127.0.0.1:1", **options)


@pytest.mark.parametrize(
    ("protocol", "pace", "words"),
    [
        ("async", {"pull_every": 4}, "every 4 minibatches (pull_every=4)"),
        ("asgd:accumulate=4", {}, "every 4 minibatches (asgd:accumulate=4)"),
        ("asgd:accumulate=4", {"local_learning_rate": 0.0}, ""),
        ("async", {}, ""),
    ],
)
def test_rest_between_pulls_is_reported_once(start_server, caplog, protocol, pace, words):
    model = mlp()
    adagrad = torch.optim.Adagrad(model.parameters())
    with joined(model, adagrad, start_server("--protocol", protocol).data, **pace) as worker:
        first = parameters_of(model)
        train(batches(2), (model, worker))
        assert (parameters_of(model) == first).all() == (protocol != "async" or "pull_every" in pace)
    warnings = [text for text in caplog.messages if "this worker's model stays as it is" in text]
    assert [words in text for text in warnings] == [True] * bool(words)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_local_steps_take_the_rate_that_the_servers_schedule_gives_now(start_server, transport):
    server = start_server("--schedule", "step:every=1,factor=0.5")
    for worker_id, expected in (("first", [-0.1, -0.1, -0.05, -0.05, -0.025, -0.025]), ("later", [-0.0125])):
        model = torch.nn.Linear(4, 1, bias=False)
        options = {"transport": transport, "push_every": 2, "pull_every": 2, "run_id": "run"}
        with remote(model, server, worker_id=worker_id, **options) as worker:
            seen = [parameters_of(model)[0]]
            for _ in expected:
                model.weight.grad = torch.ones_like(model.weight)
                worker.step()
                seen.append(parameters_of(model)[0])
        assert np.diff(seen) == pytest.approx(expected, abs=1e-6)


def test_steps_after_a_runs_end_do_nothing_and_warn_once(start_server, caplog):
    server = start_server("--stop-after", "updates=3")
    model = mlp()
    optimizer = remote(model, server)
    last = None
    for batch in batches(10):
        loss = backward(model, batch)
        assert optimizer.step(lambda loss=loss: loss) == loss
        last = parameters_of(model) if optimizer.finished and last is None else last
    np.testing.assert_array_equal(parameters_of(model), last)
    assert optimizer.global_step == 3
    assert optimizer.steps <= 5
    assert sum("is over: steps do nothing" in text for text in caplog.messages) == 1
    optimizer.close()


def test_a_loop_over_batches_ends_with_the_run(start_server, caplog):
    model = mlp()
    with remote(model, start_server("--stop-after", "updates=3")) as optimizer:
        seen = [0, 0, 0, 0]
        for epoch in range(4):
            for batch in optimizer.until_finished(batches(2)):
                backward(model, batch)
                optimizer.step()
                seen[epoch] += 1
        assert 3 <= sum(seen) <= 5
        assert seen[-1] == 0
    assert "is over" not in caplog.text


def test_a_script_that_just_ends_is_finished_with_all_its_gradients(start_server, start_python):
    server = start_server()
    script = (
        "import torch\n"
        "from pyps_client import RemoteOptimizer\n"
        "def main():\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    optimizer = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), push_every=4)\n"
        "    for _ in range(6):\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(1, 4)).sum().backward()\n"
        "        optimizer.examples_in_batch = 1; optimizer.step()\n"
        "main()\n"
    )
    process = start_python("-c", script, env={"PYPS_SERVERS": server.data, "PYPS_WORKER_ID": "script"})
    assert process.wait() == 0, process.output()
    assert workers_of(server.control)["script"].state == "finished"
    assert status_of(server).examples == 6


def test_a_state_dict_says_once_that_it_is_no_checkpoint_and_changes_nothing_in_the_run(start_server, caplog):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    server = start_server()
    model = mlp()
    with remote(model, server) as optimizer:
        changed = copy.deepcopy(optimizer.state_dict())
        changed["param_groups"][0]["lr"] = 0.2
        optimizer.load_state_dict(changed)
        assert optimizer.state_dict() == changed
        # A scheduler of the torch optimizer would still move the groups.
        assert optimizer._wrapped.param_groups[0] is optimizer.param_groups[0]
        saved = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, saved)
        assert not saved["state"]
        assert status_of(server).version_max == 0
        train(batches(1), (model, optimizer))
        assert optimizer.receipts[0].rate == pytest.approx(0.2)
    warnings = [text for text in caplog.messages if "--checkpoint-dir" in text]
    assert len(warnings) == 1


def test_a_state_dict_of_another_update_warns_that_the_runs_parameters_are_used(start_server, caplog):
    server = start_server()
    with remote(mlp(seed=1), server) as first:
        saved = first.state_dict() | {"pyps_update": 7}
        with (
            remote(mlp(seed=1), server, worker_id="alike") as alike,
            remote(mlp(seed=2), server, worker_id="other") as other,
        ):
            for optimizer in (first, alike, other):
                optimizer.load_state_dict(optimizer.state_dict())
                assert "a state dict of update" not in caplog.text
            first.load_state_dict(saved)
            alike.load_state_dict(saved)
            assert "a state dict of update" not in caplog.text
            other.load_state_dict(saved)
    assert (
        "a state dict of update 7 was loaded in a run that is at update 0: this worker trains the run's" in caplog.text
    )


def test_a_copy_or_pickle_of_an_optimizer_is_refused_at_once(start_server):
    with remote(mlp(), start_server()) as optimizer:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InvalidArgument, match="no copy can be made or saved"):
                copied(optimizer)


def test_a_second_optimizer_as_of_a_notebooks_cell_run_twice_is_refused(start_server):
    server = start_server()
    words = (
        r"open RemoteOptimizer on .* already, .* cell is run twice, close\(\) the first.* servers for each; .* groups"
    )
    with remote(mlp(), server) as first:
        for second in (torch.nn.Linear(4, 1), mlp()):
            with pytest.raises(InvalidArgument, match=words):
                remote(second, server)
        backward(first._model, next(batches(1)))
        first.step()
    with pytest.raises(InvalidArgument, match=r"The model is a generator; expected a torch.nn.Module"):
        RemoteOptimizer(mlp().parameters(), torch.optim.SGD(mlp().parameters(), lr=0.1), servers=server.data)


def test_an_optimizer_that_failed_while_joining_blocks_no_other(start_server, monkeypatch):
    server = start_server()

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    # As a notebook does, it holds the error, and by its traceback the optimizer.
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as held:
        patch.setattr(Joining, "steps", fails)
        remote(mlp(), server)
    with remote(mlp(), server) as optimizer:
        backward(optimizer._model, next(batches(1)))
        optimizer.step()
    assert held.tb


def test_a_number_of_examples_that_cannot_be_is_refused_before_its_step(start_server):
    with remote(mlp(), start_server()) as optimizer:
        backward(optimizer._model, next(batches(1)))
        for wrong in (-5, "x", 1.5, True):
            with pytest.raises(InvalidArgument, match="expected a whole number, 0 to"):
                optimizer.examples_in_batch = wrong
        optimizer.examples_in_batch = np.int64(16)
        optimizer.step()
        assert optimizer.steps == optimizer.global_step == 1


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_closed_optimizers_properties_keep_their_last_values(start_server, transport):
    def properties() -> dict[str, object]:
        kind = RemoteOptimizer
        names = [name for name in vars(kind) if isinstance(getattr(kind, name), property)]
        assert {"transport", "global_step", "receipts"} <= set(names)
        return {name: getattr(optimizer, name) for name in names}

    model = mlp()
    with remote(model, start_server(), transport=transport) as optimizer:
        train(batches(1), (model, optimizer))
        before = properties()
    assert properties() == before
    assert before["transport"] == transport


def test_the_torch_optimizers_own_step_is_refused_until_the_remote_one_is_closed(start_server):
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with joined(model, own, servers=start_server().data) as optimizer:
        backward(model, next(batches(1)))
        with pytest.raises(
            InvalidArgument, match=r"This SGD would train this worker's copy of the model alone: .* call step\(\)"
        ):
            own.step()
        optimizer.step()
        assert optimizer.global_step == 1
        with pytest.raises(InvalidArgument, match=r"Another RemoteOptimizer was made of this SGD and is open"):
            RemoteOptimizer(model, own, servers="local")
        # As torch.distributed.checkpoint takes a step to learn an optimizer's state.
        own.param_groups[0]["lr"] = 0.0
        own.step()
        own.param_groups[0]["lr"] = 0.1
    own.step()


def test_the_next_optimizer_waits_until_one_that_nobody_closed_has_left_the_run(start_server):
    server = start_server("--staleness", "none")
    model = torch.nn.Linear(1, 1, bias=False)
    begin = model.weight.item()
    for _ in range(5):
        optimizer = remote(model, server, lr=1.0, run_id="r", worker_id="w", overlap="step")
        for _ in range(4):
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()
        del optimizer
    with remote(model, server, lr=1.0, run_id="r", worker_id="w"):
        assert model.weight.item() == pytest.approx(begin - 20)
