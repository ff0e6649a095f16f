"""A worker and an observer without torch: named numpy arrays."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyps_client import leave
from pyps_client.data import place
from pyps_client.data.portions import Stepper
from pyps_client.join import Handshake
from pyps_client.launch import Launch, parse_servers
from pyps_client.pull import Holdings, LongPoll, read, receivers
from pyps_client.push import Plan
from pyps_client.transport.connection import Connection, Servers
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.vectors import FiniteGuard, Vector, Vectors, first_non_finite
from pyps_client.worker import ONE_THREAD, Worker
from pyps_wire.codecs import FLOAT32, codec_of
from pyps_wire.common_pb2 import ROLE_OBSERVER, RUN_STATE_READY, GroupSettings, OptimizerSettings, Receipt
from pyps_wire.errors import InvalidArgument, ModelMismatch, RunFinished, ServerUnavailable
from pyps_wire.inspector_pb2 import GetStatusRequest, ListWorkersReply, ListWorkersRequest, Status
from pyps_wire.partition import Model, Tensor, block_index

Arrays = Mapping[str, npt.NDArray[Any]]
Optimizer = tuple[str, Mapping[str, float]]

# Servers' control ports answer at once, however busy they are.
ASK_SECONDS = 20.0


class Client:
    """One worker of a run, over named numpy arrays in one parameter group.

        with Client({"w": w}, ("sgd", {"learning_rate": 0.1}), "host:7610") as client:
            parameters = client.pull()
            while not client.finished:
                parameters = client.exchange({"w": gradient_of(parameters)})

    The constructor connects, and waits for servers and for the run's first parameters: `tensors`, if the servers elect
    this worker to send them. A pull waits as the protocol demands: for the end of a round, a turn, the slowest worker.
    A push is one update: sum minibatches yourself where the protocol demands it (`session.terms.accumulate`).
    Use one thread, or one that pushes and one that pulls.

    Calls raise ServerUnavailable or WaitTimedOut after a wait; a push after the end of the run raises RunFinished.
    """

    def __init__(
        self,
        tensors: Arrays,
        optimizer: Optimizer = ("adagrad", {"learning_rate": 0.05}),
        servers: str | Sequence[str] | None = None,
        *,
        launch: Launch | None = None,
    ) -> None:
        """Join the run.

        `tensors`: float32 arrays by name. `optimizer`: the servers' rule and its settings. `servers`: "host:port",
        several with commas between, or "local" for one that it starts; PYPS_SERVERS by default. `launch`: the servers
        and everything else about the connection, instead of `servers`. Raises a ConfigurationError if one of these is
        wrong, or differs from the run's.
        """
        leave.install_where_asked()
        launch = Launch.of(servers, launch)
        launch.require_one_process("Client")
        self._model = _model_of(tensors, launch.shard_size)
        places = zip(self._model.tensors, self._model.offsets, strict=True)
        self._places = {tensor.name: (tensor, begin) for tensor, begin in places}
        self._codec = codec_of(launch.gradient_codec)
        self._pull_codec = codec_of(launch.parameter_codec)
        self._finite = FiniteGuard()
        self.session = Worker(
            self._model,
            _settings_of(optimizer),
            launch=launch,
            # The first parameters, end to end.
            initial=lambda: [np.concatenate([np.asarray(tensor).reshape(-1) for tensor in tensors.values()])],
            device="cpu",
        )
        # Examples in each batch, unless a push states them; set by portions.
        self.examples_in_batch: int | None = None
        # Where the data stands after the next push, in the script's own words: as of a RemoteOptimizer.
        self.data_position: bytes | None = None
        # The thread that pushes now, or 0.
        self._stepping = 0
        self._border = threading.Lock()
        # Guarded by _border: whether the next step still needs permission.
        self._between_steps = True
        try:
            self.session.connect()
            leave.expect(self.session, of=self)
            # Memory for the pushed gradient and the pulled parameters, in the type in which they are sent.
            lent = self.session.lend()
            [[self._gradient]], [self._parameters] = lent.gradients, lent.parameters
            self.session.pull([self._parameters])
        except BaseException as error:
            self.close(*leave.cause_of(error))
            raise
        place.add(self)

    def push(self, gradients: Arrays, examples: int = 0) -> list[Receipt]:
        """Push gradients by tensor name; return a receipt a shard.

        `gradients`: float32 arrays; a tensor without a gradient stays as it is. `examples`: of the minibatch.

        A gradient with NaN or infinity is skipped with a warning, and there are no receipts. A receipt may refuse a
        shard, with the reason; see `refused`. If a server was restored from a checkpoint, this pulls too, so that the
        servers accept the next gradient.

        Raises ModelMismatch, before anything is sent, for a gradient whose name, shape or type is not the model's, and
        NotFinite after ten skipped gradients in a row.
        """
        receipts = self._hand_in(gradients, examples)
        if self.session.is_behind:
            self.session.pull([self._parameters], min_versions={})
        return receipts or []

    def exchange(self, gradients: Arrays, examples: int = 0) -> dict[str, npt.NDArray[np.float32]]:
        """Push and pull in one call: it takes the arguments of `push` and returns the parameters of `pull`."""
        receipts = self._hand_in(gradients, examples, [self._parameters])
        self._enter_step()
        if receipts is None or self.session.pull_needed:
            self.session.pull([self._parameters])
        return self._pulled()

    def pull(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the newest parameters by tensor name, in new arrays.

        Waits as the protocol demands before the next gradient; WaitTimedOut names the workers that it waits for.
        """
        self._enter_step()
        self.session.pull([self._parameters])
        return self._pulled()

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the present parameters by tensor name, without a wait, for evaluation. No shard mixes versions."""
        vectors = [np.zeros(size, np.float32) for size in self._model.group_sizes]
        self.session.snapshot(vectors)
        return split_tensors(self._model, vectors)

    @property
    def batch_size(self) -> int:
        """Examples in a minibatch by the servers' schedule; 0 without one."""
        return self.session.terms.batch_size

    @property
    def refused(self) -> dict[str, int]:
        """Refused shards of pushes, by reason: {"STALE": 3}."""
        return self.session.refused

    @property
    def global_step(self) -> int:
        """Updates of the whole run."""
        return self.session.global_step

    @property
    def finished(self) -> bool:
        """True when the run is over."""
        return self.session.finished

    @property
    def restored_position(self) -> bytes:
        """The newest `data_position` of the worker whose place this one took; b"" for none."""
        return self.session.restored_position

    @property
    def stepper(self) -> Stepper:
        """The client's steps, for `pyps_client.data.Portions`."""
        return _ClientStepper(self)

    def report(self, **scalars: float) -> None:
        """Send numbers about this worker, such as loss=0.3, with the next heartbeat."""
        self.session.report(**scalars)

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leave the run. A second call does nothing; a client that is freed leaves too."""
        place.discard(self)
        self.session.close(cause, message)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RunFinished):
            error = None
        self.close(*leave.cause_of(error))

    def _hand_in(self, gradients: Arrays, examples: int, parameters: Vectors | None = None) -> list[Receipt] | None:
        """Check the gradients and push them; return None if they are skipped."""
        self._check(gradients)
        thread = threading.get_ident()
        if self._stepping and self._stepping != thread:
            raise InvalidArgument(ONE_THREAD)
        self._stepping = thread
        try:
            self._enter_step()
            self.session.clock += 1
            if not self._write(gradients):
                return None
            present = [name in gradients for name in self._places]
            count = examples or self.examples_in_batch or 0
            plan = Plan([self._gradient], parameters, present=present, example_count=count)
            plan.data_position = place.after_step(self)
            return self.session.exchange(plan)
        finally:
            self._stepping = 0
            with self._border:
                self._between_steps = True

    def _pulled(self) -> dict[str, npt.NDArray[np.float32]]:
        values = self._parameters
        if values.dtype != np.float32:
            values = self._pull_codec.decode(values.view(np.uint8).data, values.size)
        return split_tensors(self._model, [values.copy()])

    def _enter_step(self) -> None:
        """Wait for permission to begin the next step, once a step, under protocols that require it."""
        with self._border:
            if self._between_steps:
                self.session.proceed()
                self._between_steps = False

    def _check(self, gradients: Arrays) -> None:
        if not isinstance(gradients, Mapping):
            raise ModelMismatch(
                f"The gradients are of type {type(gradients).__name__}; expected a dictionary of arrays by name."
            )
        for name, gradient in gradients.items():
            if name not in self._places:
                known = ", ".join(list(self._places)[:10])
                raise ModelMismatch(f"There is no tensor {name!r} in this model; it has {known}.")
            tensor = self._places[name][0]
            if not isinstance(gradient, np.ndarray | np.generic):
                raise ModelMismatch(f"The gradient of {name!r} is a {type(gradient).__name__}; expected a numpy array.")
            if gradient.shape != tensor.shape or gradient.dtype != np.float32:
                raise ModelMismatch(
                    f"The gradient of {name!r} is {gradient.dtype}{list(gradient.shape)}; expected "
                    f"float32{list(tensor.shape)}. If the type differs, use .astype(numpy.float32)."
                )

    def _write(self, gradients: Arrays) -> bool:
        """Write the gradients into the memory that is pushed; return False if one is not finite in its type."""
        for name, gradient in gradients.items():
            tensor, begin = self._places[name]
            place = self._gradient[begin : begin + tensor.size]
            values = np.ascontiguousarray(gradient).reshape(-1)
            place[:] = values if place.dtype == np.float32 else np.frombuffer(self._codec.encode(values), place.dtype)
            flat = first_non_finite(place, self._codec)
            if flat is not None:
                index = tuple(int(i) for i in np.unravel_index(flat, tensor.shape))
                self._finite.skipped(name, index, float(gradient[index]))
                return False
        self._finite.passed()
        return True


class _ClientStepper(Stepper):
    def __init__(self, client: Client) -> None:
        self._client, self.session = client, client.session

    @property
    def steps(self) -> int:
        return self.session.clock

    def tell_examples(self, count: int) -> None:
        self._client.examples_in_batch = count

    def idle(self) -> None:
        with contextlib.suppress(RunFinished):
            self._client.exchange({})

    def tell_over(self) -> None:
        raise RunFinished(f"Run {self.session.run_id!r} is over: leave the loop. Pulls still work.")


class Observer:
    """A reader of a run, which is no worker. It gets the model from the servers.

    with Observer("host:7610") as observer:
        parameters = observer.snapshot()
    """

    def __init__(self, servers: str | Sequence[str] | None = None, *, launch: Launch | None = None) -> None:
        """Connect to all of the run's servers, with the arguments of Client; wait for the run's first parameters."""
        leave.install_where_asked()
        launch = Launch.of(servers, launch)
        own = f"observer-{socket.gethostname()}-{os.getpid()}"
        # parse_servers refuses "local": a new server has no run.
        launch = launch.with_(servers=parse_servers(launch.servers), worker_id=own)
        self._handshake = Handshake(launch)
        self._servers = Servers(launch, rejoin=self._rejoin)
        self._closing = threading.Event()
        try:
            replies = self._handshake.join(self._servers.connections, None, self._closing)
        except BaseException:
            self.close()
            raise
        whole = self._handshake.whole
        assert whole is not None
        # Whose rows only workers ask for, by their ids.
        self.tables = [table.name for table in whole.model.tables.values()]
        whole = whole.without_tables()
        # A restarted server may have another port.
        self._control_ports = [reply.control_address.rpartition(":")[2] for reply in replies]
        self.run_id = self._handshake.sender.run_id
        self.model = whole.model
        self.optimizer: OptimizerSettings = replies[0].optimizer
        self._holdings = Holdings(whole)
        # The last snapshot, one vector a group. The next one reads only shards that are newer.
        self._vectors = [np.zeros(size, np.float32) for size in self.model.group_sizes]
        self._receivers = receivers(self._servers, self._vectors, self._holdings, codec=FLOAT32)

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the newest parameters by tensor name, in new arrays. No shard mixes versions."""
        read(self._servers, self._handshake.sender, ROLE_OBSERVER, self._receivers, poll=LongPoll(0.0))
        return split_tensors(self.model, [vector.copy() for vector in self._vectors])

    def figures(self, every_seconds: float = 10.0) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the number of updates and the run's figures by name (docs/trackers.md), now and after each pause.

        Ends with the run, or when a server was unreachable for `loss_wait_seconds`. Call `snapshot` on the same thread.
        """
        if not 0.0 <= every_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgument(f"every_seconds is {every_seconds}; expected the seconds of a pause, 0 or more.")
        return self._figures(every_seconds)

    def _figures(self, every_seconds: float) -> Iterator[tuple[int, dict[str, float]]]:
        figures, calls = Figures(), [partial(self._ask, connection) for connection in self._servers.connections]
        while not (self._closing.is_set() or figures.over):
            try:
                now = figures.of(self._servers.on_all(calls))
            except (RunFinished, ServerUnavailable):
                return
            yield int(now["updates"]), now
            self._closing.wait(0.0 if figures.over else every_seconds)

    def _ask(self, connection: Connection, _: GrpcChannel, stop: threading.Event) -> Answer:
        host, launch = connection.address.rpartition(":")[0], self._handshake.launch
        address = f"{host}:{self._control_ports[connection.index]}"
        channel = GrpcChannel(address, launch.credentials, use_proxy=launch.use_proxy)
        try:
            status = channel.call("GetStatus", GetStatusRequest(), Status, timeout_seconds=ASK_SECONDS)
            workers = channel.call("ListWorkers", ListWorkersRequest(), ListWorkersReply, timeout_seconds=ASK_SECONDS)
            return Answer(status, workers)
        finally:
            channel.close()

    def _rejoin(self, connection: Connection, channel: GrpcChannel, timeout_seconds: float) -> None:
        reply = self._handshake.rejoin(connection, channel, timeout_seconds)
        self._control_ports[connection.index] = reply.control_address.rpartition(":")[2]

    @property
    def global_step(self) -> int:
        """The largest shard version of the last snapshot."""
        return max(self._holdings.versions.values(), default=0)

    def close(self) -> None:
        """Close the connections."""
        self._closing.set()
        self._servers.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Answer(NamedTuple):
    status: Status
    workers: ListWorkersReply


class Figures:
    """Computes a run's figures, numbers by name that users log; speeds and means are since the previous answers."""

    def __init__(self) -> None:
        # The previous sums, and their time, "at".
        self._before: Mapping[str, float] = {}
        # Whether a server no longer trains.
        self.over = False

    def of(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the figures by name; the first ones have no speeds and means."""
        statuses = [answer.status for answer in answers]
        self.over = any(status.state != RUN_STATE_READY for status in statuses)
        sums = defaultdict(float, at=time.monotonic())
        for status in statuses:
            tally, taken = status.tally, status.tally.pushes_applied + status.tally.pushes_pending
            sums["updates"] = max(sums["updates"], status.version_max)
            sums["examples"] = max(sums["examples"], status.examples)
            sums["taken"] += taken
            sums["staleness"] += tally.staleness_mean * taken
            sums["step_lost"] += tally.step_lost * taken
            sums["refused"] += tally.pushes_rejected - tally.pushes_dropped
        figures = {"updates": sums["updates"], "refused": sums["refused"]}
        figures["workers"] = float(max(status.workers_alive for status in statuses))
        if self._before:
            grown = {name: max(1e-9 if name == "at" else 0.0, sums[name] - self._before[name]) for name in sums}
            figures |= {f"{name}_per_second": grown[name] / grown["at"] for name in ("updates", "examples")}
            if grown["taken"]:
                figures |= {name: grown[name] / grown["taken"] for name in ("staleness", "step_lost")}
        self._before = sums
        figures |= {
            f"learning_rate/{rate.group}": rate.current for status in statuses for rate in status.learning_rates
        }
        # Reports of live workers, as "loss/worker-0", and their mean, as "loss".
        reports: dict[str, dict[str, float]] = defaultdict(dict)
        for worker in (worker for answer in answers for worker in answer.workers.workers if worker.state == "alive"):
            for name, value in worker.scalars.items():
                reports[name][f"{name}/{worker.worker_id}"] = value
        # A report cannot replace a figure of the same name.
        for name, values in reports.items():
            figures = {name: sum(values.values()) / len(values)} | values | figures
        return figures


def split_tensors(model: Model, vectors: Sequence[Vector]) -> dict[str, npt.NDArray[np.float32]]:
    """Return a model's tensors by name, as views of its groups' vectors.

    The blocks of a split tensor are copied into one, with NaN in place of missing blocks.
    """
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for tensor, begin in zip(model.tensors, model.offsets, strict=True):
        values = vectors[tensor.group][begin : begin + tensor.size].reshape(tensor.shape)
        if tensor.whole_shape:
            whole = tensors.setdefault(tensor.name, np.full(tensor.whole_shape, np.nan, np.float32))
            whole[block_index(tensor.offset, tensor.shape)] = values
        else:
            tensors[tensor.name] = values
    return tensors


def _settings_of(optimizer: Optimizer) -> OptimizerSettings:
    try:
        rule, hyperparameters = optimizer
        return OptimizerSettings(rule=rule, groups=[GroupSettings(hyperparameters=hyperparameters)])
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"optimizer is {optimizer!r}; expected a rule and its settings, as ('sgd', {{'learning_rate': 0.1}})."
        ) from None


def _model_of(tensors: Arrays, shard_size: int) -> Model:
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise InvalidArgument(
            f"tensors is of type {type(tensors).__name__}; expected a dictionary of float32 arrays by their names."
        )
    if not tensors:
        raise InvalidArgument("No tensors were given: pass the model's first parameters by name.")
    for name, tensor in tensors.items():
        try:
            dtype = np.asarray(tensor).dtype
        except (TypeError, ValueError) as error:
            raise ModelMismatch(f"Tensor {name!r} is no array: {error}.") from None
        if dtype != np.float32:
            raise ModelMismatch(f"Tensor {name!r} is {dtype}; servers hold float32: use .astype(numpy.float32).")
    return Model(tuple(Tensor(name, np.shape(tensor)) for name, tensor in tensors.items()), shard_size)
