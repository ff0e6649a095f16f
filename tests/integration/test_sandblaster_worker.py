"""Workers that compute portions for a coordinator (pyps_client.sandblaster), over real servers, led by hand."""

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import pyps_client
from client_support import CuttingProxy, addresses, start_servers
from pyps.core.arrays import Floats
from pyps_client import Launch, Observer, SandblasterResult
from pyps_client.lbfgs import worker as coordinated
from pyps_wire import vector_machine_pb2 as machine
from pyps_wire import work_pb2 as work
from pyps_wire.errors import InvalidArgument, ServerUnavailable
from sandblaster import FLAGS, WireCoordinator, instruction
from support import ServerThread, Start, compensated_sum, inspect, wait_until
from training import NUM_EXAMPLES, make_dataset, make_model, mean_loss_and_gradient
from wire_worker import CHANNEL_OPTIONS

# Room for the passes of a small data set.
PLAN = {"history_pairs": 1, "vectors": 5, "stages": 64, "num_portions": 64}


class Conductor:
    """A coordinator by hand, on the generated stubs: leads workers through passes over their data set.

    Made once a worker has opened the data set. The vector "g" is the mean gradient of the last pass that was folded.
    """

    def __init__(self, servers: Sequence[ServerThread]) -> None:
        self.servers = addresses(servers)
        self._channels = [grpc.insecure_channel(server.data, options=CHANNEL_OPTIONS) for server in servers]
        self._of_servers = [WireCoordinator(SimpleNamespace(channel=each), run_id="blast") for each in self._channels]
        self.queue = self._of_servers[0]
        self.pass_ = 0

    def opened(self) -> bool:
        try:
            return self.state().progress.HasField("data")
        except grpc.RpcError:
            return False

    def attach(self) -> None:
        for each in self._of_servers:
            each.attach(self.queue.epoch, **PLAN)
        self.execute(instruction("ALLOC", target="g"))

    def execute(self, *instructions: machine.Instruction) -> None:
        for each in self._of_servers:
            each.execute(*instructions)

    def begin(self, *, portions: int, copies: int = 1, per_stage: int = 1) -> None:
        self.pass_ += 1
        self.execute(instruction("BEGIN_PASS", count=self.pass_))
        self.queue.begin(self.pass_, num_portions=portions, copies_max=copies, portions_per_stage=per_stage)

    def state(self, *, wait_seconds: float = 0.0) -> work.AwaitPassReply:
        return self.queue.wait(self.pass_, wait_seconds)

    def outcome(self) -> work.AwaitPassReply:
        def complete() -> work.AwaitPassReply | None:
            reply = self.state(wait_seconds=1)
            return reply if reply.complete else None

        reply = wait_until(complete, what="the end of the pass")
        assert reply is not None
        return reply

    def run_pass(self, **described: Any) -> work.AwaitPassReply:
        """Begins a pass, awaits its end, and folds its stages into "g"."""
        self.begin(**described)
        outcome = self.outcome()
        if outcome.stage_ids:
            folded = {"stage_ids": outcome.stage_ids, "count": outcome.example_count}
            self.execute(instruction("FOLD", target="g", **folded))
        return outcome

    def step(self, length: float) -> None:
        self.execute(instruction("MOVE", left="parameters", right="g", scalar=-length))

    def parameters(self) -> dict[str, Floats]:
        with Observer(launch=Launch(self.servers, run_id="blast")) as observer:
            return observer.snapshot()

    def end(self) -> None:
        self.queue.end("enough")

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class Job:
    """Workers in threads of this process, each with a session of its own, and their conductor."""

    def __init__(self, servers: list[ServerThread]) -> None:
        self.servers = servers
        self.conductor = Conductor(servers)
        self.models: list[nn.Module] = []
        self._pool = ThreadPoolExecutor(8)
        self._workers: list[Future[SandblasterResult]] = []

    def hire(self, count: int = 1, *, loss: Any = functional.cross_entropy, **options: Any) -> None:
        """Starts workers; the first of all is waited for until it has opened the data set."""
        names = options.keys() & Launch.__dataclass_fields__.keys()
        settings = {"servers": addresses(self.servers), "run_id": "blast", "shard_size": 32} | {
            name: options.pop(name) for name in names
        }
        for _ in range(count):
            model = make_model()
            launch = Launch(worker_id=f"worker-{len(self.models)}", **settings)
            self.models.append(model)
            worker = self._pool.submit(
                *(pyps_client.sandblaster, model, loss, make_dataset()), **({"batch_size": 4} | options), launch=launch
            )
            self._workers.append(worker)
        if self._workers and self.conductor.queue.epoch == 0:
            wait_until(self._opened, what="a data set's opening")
            self.conductor.attach()

    def end(self) -> list[SandblasterResult]:
        self.conductor.end()
        return [worker.result(60) for worker in self._workers]

    def result(self, index: int) -> SandblasterResult:
        return self._workers[index].result(60)

    def close(self) -> None:
        # Workers of a test that failed would wait for more.
        with contextlib.suppress(grpc.RpcError):
            self.conductor.end()
        self.conductor.close()
        self._pool.shutdown(wait=False)

    def _opened(self) -> bool:
        failed = next((worker for worker in self._workers if worker.done()), None)
        if failed is not None:
            failed.result()
        return self.conductor.opened()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are left over do not look for servers that are gone."""
    monkeypatch.setenv("PYPS_LOSS_WAIT_SECONDS", "30")


@pytest.fixture
def hire(start_server: Start) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(count: int = 1, **options: Any) -> Job:
        job = Job(start_servers(start_server, 2, *FLAGS))
        jobs.append(job)
        job.hire(count, **options)
        return job

    yield make
    for job in jobs:
        job.close()


def flat(parameters: dict[str, Floats]) -> Floats:
    return np.concatenate([values.reshape(-1) for values in parameters.values()])


def values_of(model: nn.Module) -> Floats:
    return np.asarray(nn.utils.parameters_to_vector(model.parameters()).detach().numpy())


def test_two_workers_compute_the_whole_data_sets_loss_and_gradient_pass_after_pass(hire):
    seen: list[tuple[int, Floats]] = []
    job = hire(1)
    job.hire(1, on_pass=lambda number: seen.append((number, values_of(job.models[1]).copy())))
    conductor = job.conductor
    model = make_model()
    wanted: dict[int, Floats] = {}
    for number in (1, 2, 3):
        before = wanted[number] = flat(conductor.parameters())
        np.testing.assert_array_equal(before, values_of(model))
        loss, gradient = mean_loss_and_gradient(model)
        outcome = conductor.run_pass(portions=7)
        assert outcome.example_count == NUM_EXAMPLES
        assert outcome.loss_sum / outcome.example_count == pytest.approx(loss, rel=1e-6)
        conductor.step(0.5)
        moved = flat(conductor.parameters())
        np.testing.assert_allclose(before - moved, 0.5 * gradient, rtol=1e-3, atol=1e-6)
        nn.utils.vector_to_parameters(torch.from_numpy(moved.copy()), model.parameters())
    results = job.end()
    assert len(seen) == results[1].num_passes == len({number for number, _ in seen})
    for number, values in seen:
        np.testing.assert_array_equal(values, wanted[number])
    assert {result.message for result in results} == {"enough"}
    assert sum(result.num_examples for result in results) == 3 * NUM_EXAMPLES
    assert sum(result.num_portions for result in results) == 3 * 7
    for worker in job.models:
        np.testing.assert_array_equal(values_of(worker), flat(conductor.parameters()))
        assert all(parameter.grad is None for parameter in worker.parameters())


def test_portions_may_be_summed_before_they_are_staged(hire):
    job = hire(1)
    _, gradient = mean_loss_and_gradient(make_model())
    before = flat(job.conductor.parameters())
    outcome = job.conductor.run_pass(portions=10, per_stage=4)
    assert len(outcome.stage_ids) == 3, "4, 4 and the 2 that were left"
    job.conductor.step(1.0)
    np.testing.assert_allclose(before - flat(job.conductor.parameters()), gradient, rtol=1e-3, atol=1e-6)
    # From the next pass on each goes alone.
    assert len(job.conductor.run_pass(portions=10, per_stage=1).stage_ids) == 10
    job.end()


def test_stages_travel_in_the_codec_of_pushes(hire):
    _, gradient = mean_loss_and_gradient(make_model())
    for codec, transport, tolerance in (("float16", "grpc", 1e-3), ("bfloat16", "shm", 8e-3)):
        job = hire(1, gradient_codec=codec, parameter_codec="float32", transport=transport)
        before = flat(job.conductor.parameters())
        job.conductor.run_pass(portions=5)
        job.conductor.step(1.0)
        moved = before - flat(job.conductor.parameters())
        np.testing.assert_allclose(moved, gradient, rtol=2 * tolerance, atol=tolerance / 4, err_msg=codec)
        assert not np.allclose(moved, gradient, rtol=1e-6, atol=1e-8)
        job.end()


def test_an_infinite_loss_is_delivered_without_a_gradient(hire):
    broken = [True]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets) * (math.nan if broken[0] else 1.0)

    job = hire(1, loss=loss)
    outcome = job.conductor.run_pass(portions=5)
    assert math.isnan(outcome.loss_sum) and not outcome.stage_ids
    broken[0] = False
    outcome = job.conductor.run_pass(portions=5)
    expected, _ = mean_loss_and_gradient(make_model())
    assert outcome.loss_sum / NUM_EXAMPLES == pytest.approx(expected, rel=1e-6)
    assert len(outcome.stage_ids) == 5
    job.end()


def test_a_gradient_too_large_for_its_codec(hire, caplog):
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets) * 1e6

    job = hire(1, loss=loss, gradient_codec="float16")
    with caplog.at_level("WARNING", logger="pyps"):
        outcomes = [job.conductor.run_pass(portions=5) for _ in range(2)]
    assert all(math.isnan(outcome.loss_sum) and not outcome.stage_ids for outcome in outcomes)
    told = [message for message in caplog.messages if "reported as NaN" in message]
    assert [message.partition(" is reported as NaN")[0] for message in told] == [
        "the loss of pass 1",
        "the loss of pass 2",
    ]
    assert "exceeds 65504, the most that float16 holds, in which it is sent" in told[0]
    assert "gradient_codec='bfloat16' or 'float32'" in told[0]
    job.end()


def test_a_loss_has_the_same_bits_in_every_python(hire, monkeypatch):
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Sums of a few losses of float32 would be exact.
        return functional.cross_entropy(outputs.double(), targets)

    job = hire(1, loss=loss, batch_size=2)
    before = job.conductor.run_pass(portions=9, per_stage=9).loss_sum
    monkeypatch.setattr(coordinated, "sum", compensated_sum, raising=False)
    assert job.conductor.run_pass(portions=9, per_stage=9).loss_sum == before
    job.end()


class Gate:
    """A loss that stops, once, at a batch of some worker until it is let through."""

    def __init__(self, *, batches_before: int = 0) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._batches_before = batches_before

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self._batches_before -= 1
        if self._batches_before < 0 and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(60)
        return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(("per_stage", "claimed"), [(1, 0), (3, 0), (3, 1)])
def test_work_for_an_ended_pass_is_thrown_away(hire, per_stage, claimed):
    # The first portion is computed, and kept for the stage of three, where the second one's first batch stops.
    gate = Gate(batches_before=claimed * math.ceil(NUM_EXAMPLES // 5 / 4))
    job = hire(1, loss=gate)
    job.conductor.begin(portions=5, per_stage=per_stage)
    assert gate.reached.wait(60)
    job.conductor.begin(portions=6, per_stage=per_stage)
    gate.opened.set()
    outcome = job.conductor.outcome()
    assert outcome.example_count == NUM_EXAMPLES
    assert len(outcome.stage_ids) == math.ceil(6 / per_stage)
    (result,) = job.end()
    assert result.num_thrown_away == claimed + 1
    assert result.num_portions == 6


def test_a_worker_whose_loss_raises_leaves_and_another_computes_its_portions(hire):
    calls: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the third batch is odd")
        return functional.cross_entropy(outputs, targets)

    job = hire(1, loss=loss)
    job.conductor.begin(portions=4)
    with pytest.raises(ValueError, match="the third batch is odd"):
        job.result(0)
    assert not any(parameter.grad is not None for parameter in job.models[0].parameters())
    job.hire(1)
    assert job.conductor.outcome().example_count == NUM_EXAMPLES


def test_a_stage_whose_connection_is_cut_is_sent_again(start_server):
    (server,) = start_servers(start_server, 1, *FLAGS)
    proxy = CuttingProxy(server.data)
    job = Job([server])
    try:
        job.hire(1, servers=proxy.address, transport="grpc")
        first = job.conductor.run_pass(portions=5)
        # Amid the passes to come: wherever it is, the same thing is said again.
        for after in (200, 900, 1700):
            proxy.cut_after(after)
            outcome = job.conductor.run_pass(portions=5)
            assert outcome.loss_sum == first.loss_sum
            assert len(outcome.stage_ids) == 5
        assert proxy.num_cuts == 3
        job.end()
    finally:
        job.close()
        proxy.close()


def test_servers_of_another_protocol_are_told_of(start_server):
    server = start_server("--run-id", "blast")
    with pytest.raises(
        InvalidArgument, match=r"run the protocol 'async.*need servers started with --protocol sandblaster"
    ):
        pyps_client.sandblaster(make_model(), functional.cross_entropy, make_dataset(), servers=server.data)


def test_a_wrong_call_is_refused_before_any_server_hears_of_it():
    call = {"model": make_model(), "loss": functional.cross_entropy, "dataset": make_dataset()}
    for wrong, words in (
        ({"dataset": (n for n in range(3))}, "^The data set, a generator, has no length"),
        ({"dataset": []}, "^The data set, a list, is empty"),
        ({"model": nn.ReLU()}, r"^The model \(ReLU\) has no parameters that require a gradient"),
        ({"batch_size": 0}, r"^batch_size is 0; expected 1 or more\.$"),
        ({"threads": 0}, r"^threads is 0; expected 1 or more, or None\.$"),
        ({"loss": None}, r"^Neither of loss and loss_of were given"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            pyps_client.sandblaster(**(call | wrong), servers="127.0.0.1:1")


def test_a_process_with_a_part_of_the_model_is_refused(monkeypatch):
    monkeypatch.setenv("PYPS_PARTS", "2")
    monkeypatch.setenv("PYPS_WORKER_ID", "worker-0")
    monkeypatch.setenv("PYPS_SERVERS", "127.0.0.1:1")
    call = {"model": make_model(), "loss": functional.cross_entropy, "dataset": make_dataset()}
    with pytest.raises(InvalidArgument, match=r"one of the 2 parts of worker-0 .* sandblaster\(\) replica=Replica\(\)"):
        pyps_client.sandblaster(**call)
    words = "needs the whole model in each process, and .* 2 parts of worker-0 .*: start the workers without --parts"
    with pytest.raises(InvalidArgument, match=f"^Client {words}"):
        pyps_client.Client({"weights": np.zeros(3)}, optimizer=("sgd", {"learning_rate": 0.1}))


def test_layers_that_change_the_loss_warn(caplog, monkeypatch):
    monkeypatch.setenv("PYPS_START_WAIT_SECONDS", "0")
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ServerUnavailable):
        pyps_client.sandblaster(model, functional.cross_entropy, make_dataset(), servers="127.0.0.1:1")
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("2: in training mode that draws at random, and the line") for message in messages)
    assert any(message.startswith("1: in training mode that depends on the batch, and the") for message in messages)
    assert any(message.startswith("0.weight: the parameters are not trained and not shared") for message in messages)
    assert any(message.startswith("1.running_mean and 1 more: the buffers are not trained") for message in messages)


WORKER = """
import sys, torch
from torch import nn
import pyps_client
from training import make_dataset, make_model

def loss(outputs, targets):
    if sys.argv[2] == "vector":
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
    if sys.argv[2] == "hangs":
        print("computes", flush=True)
        import threading
        threading.Event().wait(120)
    return nn.functional.cross_entropy(outputs, targets)

pyps_client.sandblaster(
    make_model(), loss, make_dataset(), batch_size=4,
    launch=pyps_client.Launch(sys.argv[1], run_id="blast", worker_id="apart", shard_size=32),
)
"""


def test_a_loss_of_a_wrong_shape_ends_in_one_sentence(hire, start_python):
    job = hire(1)
    worker = start_python("-c", WORKER, addresses(job.servers), "vector")
    wait_until(lambda: len(inspect(job.servers[0].control, "ListWorkers").workers) == 2, what="the second worker")
    # One portion is not given to the same worker pass after pass.
    wait_until(lambda: not worker.running or job.conductor.run_pass(portions=20) is None, what="the worker's end")
    assert worker.wait() == 1
    assert "pyps: The loss is a tensor of shape [4]; expected one number, the mean over the batch's" in worker.output()
    assert "Traceback" not in worker.output()
    assert job.conductor.run_pass(portions=5).example_count == NUM_EXAMPLES
    job.end()


def test_an_interrupted_worker_costs_nothing_but_time(hire, start_python):
    """B8; one that is killed is in test_sandblaster_coordinator.py."""
    job = hire(1)
    expected = job.conductor.run_pass(portions=6).loss_sum
    worker = start_python("-c", WORKER, addresses(job.servers), "hangs")
    wait_until(lambda: len(inspect(job.servers[0].control, "ListWorkers").workers) == 2, what="the second worker")

    def computes() -> bool:
        if "computes" in worker.output():
            return True
        if job.conductor.state().complete:
            job.conductor.begin(portions=6)
        return False

    wait_until(computes, what="the second worker's portion")
    worker.signal(signal.SIGINT)
    worker.wait()
    assert "interrupted: leaving run blast; its portions go to other workers" in worker.output()
    outcome = job.conductor.outcome()
    assert outcome.loss_sum == expected
    assert outcome.example_count == NUM_EXAMPLES
    assert len(outcome.stage_ids) == 6
    job.end()
