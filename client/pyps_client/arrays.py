"""A worker and an observer without torch: named numpy arrays."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client import leave
from pyps_client.data.portions import Stepper, others_wait
from pyps_client.figures import Answer, Figures, ask
from pyps_client.join import Handshake
from pyps_client.launch import Launch, parse_servers
from pyps_client.pull import Holdings, LeaseCall, LongPoll, read, receivers
from pyps_client.push import Plan
from pyps_client.transport.connection import Connection, Servers
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.vectors import FiniteGuard, Vector, Vectors, first_non_finite
from pyps_client.worker import ONE_THREAD, Worker
from pyps_wire.blocks import place
from pyps_wire.codecs import FLOAT32, codec_of
from pyps_wire.common_pb2 import REASON_EPOCH, ROLE_OBSERVER, GroupSettings, OptimizerSettings, Receipt
from pyps_wire.errors import InvalidArgument, ModelMismatch, RunFinished, ServerUnavailable
from pyps_wire.partition import Model, Tensor
from pyps_wire.work_pb2 import LeaseReply

Arrays = Mapping[str, npt.NDArray[Any]]
Optimizer = tuple[str, Mapping[str, float]]


class Client:
    """One worker of a run, over named numpy arrays: all in one parameter group, in the order given.

    Connects when made, waiting for servers and for the run's first parameters: `tensors` are those, where this worker
    is elected to send them. Then in turn: pull, compute, push; or compute and exchange. Whatever the servers' protocol
    makes workers wait for (a round's end, a turn, the slowest), it is the pull that waits. A push is one update:
    to sum several minibatches in one, as asgd:accumulate= asks of workers (`session.accumulate`), is yours to do.
    Use one thread, or one that pushes and one that pulls.

    Whatever waits for servers or workers in vain raises ServerUnavailable or WaitTimedOut; a push after the run's end
    raises RunFinished.
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
        and everything else about the connection, instead of `servers`. Raises a ConfigurationError where one of these
        is wrong, or differs from the run's.
        """
        leave.install_where_asked()
        launch = Launch.of(servers, launch)
        launch.require_one_process("Client")
        self._model = _model_of(tensors, launch.shard_size)
        self._places = {tensor.name: (tensor, begin) for tensor, begin in _places(self._model)}
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
        # Examples in each batch from now on, where a push does not say; portions do.
        self.examples_in_batch: int | None = None
        # The thread that hands in a gradient now, or 0.
        self._stepping = 0
        self._border = threading.Lock()
        # Guarded by _border: whether a step has ended, and the next was not allowed yet.
        self._between_steps = True
        try:
            self.session.connect()
            leave.expect(self.session, of=self)
            # Pushed gradients and pulled parameters, as they travel, in the one group's vectors.
            lent = self.session.lend()
            [[self._gradient]], [self._parameters] = lent.gradients, lent.parameters
            self.session.pull([self._parameters])
        except BaseException as error:
            self.close(*leave.cause_of(error))
            raise

    def push(self, gradients: Arrays, examples: int = 0) -> list[Receipt]:
        """Pushes gradients by tensor name, returns a receipt a shard; a tensor left out is left alone.

        All is checked before anything is sent. A gradient with NaN or infinity is skipped with a warning: no
        receipts; ten in a row raise NotFinite. ModelMismatch names a gradient of another name, shape or type than the
        model's. `examples`: how many stand behind the gradient. A receipt may say that it was not taken and why; see
        `refused`. After a server's restore from a checkpoint the client pulls by itself, so that the next
        gradient is taken.
        """
        receipts = self._hand_in(gradients, examples)
        if any(receipt.reason == REASON_EPOCH for receipt in receipts or ()):
            self.session.pull([self._parameters])
        return receipts or []

    def exchange(self, gradients: Arrays, examples: int = 0) -> dict[str, npt.NDArray[np.float32]]:
        """Pushes and pulls in one: half the way there and back. Takes what `push` does, returns what `pull` does."""
        receipts = self._hand_in(gradients, examples, [self._parameters])
        self._enter_step()
        if receipts is None or self.session.pull_needed:
            self.session.pull([self._parameters])
        return self._pulled()

    def pull(self) -> dict[str, npt.NDArray[np.float32]]:
        """The newest parameters, by tensor name, in arrays of the caller's own.

        Waits for what the protocol in force wants before the next gradient; WaitTimedOut names those who were
        waited for in vain.
        """
        self._enter_step()
        self.session.pull([self._parameters])
        return self._pulled()

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """The parameters as they are now, by tensor name, each shard of one version: for evaluation.

        Waits for nobody, and changes nothing about this worker's training.
        """
        vectors = [np.zeros(size, np.float32) for size in self._model.group_sizes]
        self.session.snapshot(vectors)
        return split_tensors(self._model, vectors)

    @property
    def batch_size(self) -> int:
        """Examples in a minibatch, as the servers' schedule asks for them now; 0 where they have none."""
        return self.session.batch_size

    @property
    def refused(self) -> dict[str, int]:
        """Pushed shards that servers did not take, by reason: {"STALE": 3}."""
        return self.session.refused

    @property
    def global_step(self) -> int:
        """Updates of the whole run, as far as this worker has seen."""
        return self.session.global_step

    @property
    def finished(self) -> bool:
        """True when the run is over."""
        return self.session.finished

    @property
    def stepper(self) -> Stepper:
        """What `pyps_client.data.Portions` asks of it."""
        return _ClientStepper(self)

    def report(self, **scalars: float) -> None:
        """Sets figures of this worker (loss=0.3) that the next heartbeat carries to the servers."""
        self.session.report(**scalars)

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leaves the run, as the client's end does once nobody holds it any more. A second call does nothing."""
        self.session.close(cause, message)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RunFinished):
            error = None
        self.close(*leave.cause_of(error))

    def _hand_in(self, gradients: Arrays, examples: int, parameters: Vectors | None = None) -> list[Receipt] | None:
        """Ends a step: checks the gradients and pushes them; None where they are of no use."""
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
            return self.session.exchange(Plan([self._gradient], parameters, present=present, example_count=count))
        finally:
            self._stepping = 0
            with self._border:
                self._between_steps = True

    def _pulled(self) -> dict[str, npt.NDArray[np.float32]]:
        """What was pulled last, in arrays of the caller's own."""
        values = self._parameters
        if values.dtype != np.float32:
            values = self._pull_codec.decode(values.view(np.uint8).data, values.size)
        return split_tensors(self._model, [values])

    def _enter_step(self) -> None:
        """Asks whether the next step may begin, once, where the protocol wants to be asked."""
        with self._border:
            if self._between_steps:
                self.session.proceed()
                self._between_steps = False

    def _check(self, gradients: Arrays) -> None:
        """Refuse unknown names, shapes and types, before anything is changed."""
        if not isinstance(gradients, Mapping):
            raise ModelMismatch(f"The gradients are {_kind(gradients)}; expected a dictionary of arrays by name.")
        for name, gradient in gradients.items():
            if name not in self._places:
                known = ", ".join(list(self._places)[:10])
                raise ModelMismatch(f"There is no tensor {name!r} in this model; it has {known}.")
            tensor = self._places[name][0]
            if not isinstance(gradient, np.ndarray | np.generic):
                raise ModelMismatch(f"The gradient of {name!r} is a {type(gradient).__name__}; expected a numpy array.")
            if gradient.shape != tensor.shape:
                raise ModelMismatch(
                    f"The gradient of {name!r} has shape {list(gradient.shape)}; expected {list(tensor.shape)}."
                )
            if gradient.dtype != np.float32:
                raise ModelMismatch(
                    f"The gradient of {name!r} is {gradient.dtype}; expected float32: use .astype(numpy.float32)."
                )

    def _write(self, gradients: Arrays) -> bool:
        """Puts gradients, in the wire's type, into their places in the vector; False where one is not finite there.

        Float16 may have made an infinity of a large number.
        """
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


class _ClientStepper:
    """A client's steps as portions of data see them: each is answered when it returns."""

    def __init__(self, client: Client) -> None:
        self.session = client.session
        self._client = client

    @property
    def steps(self) -> int:
        return self.session.clock

    @property
    def steps_answered(self) -> int:
        return self.session.clock

    @property
    def finished(self) -> bool:
        return self.session.finished

    def lease(self, ask: Callable[[LeaseCall | None], LeaseReply]) -> LeaseReply:
        # What a pull returns is the caller's own: parameters that came with a portion would reach nobody.
        return ask(None)

    def tell_examples(self, count: int) -> None:
        self._client.examples_in_batch = count

    def end_portion_after(self, step: int) -> None:
        """A push is the caller's to make; `Portions.ends_portion` tells when."""

    def flush(self) -> None:
        """Nothing gathers."""

    def idle(self) -> None:
        if others_wait(self.session) and not self.finished:
            with contextlib.suppress(RunFinished):
                self._client.exchange({})

    def finish(self) -> None:
        """Pulls are the caller's."""

    def tell_over(self) -> None:
        raise RunFinished(f"Run {self.session.run_id!r} is over: leave the loop. Pulls still work.")


class Observer:
    """A reader of a run, which learns the model from the servers. It never counts as a worker."""

    def __init__(self, servers: str | Sequence[str] | None = None, *, launch: Launch | None = None) -> None:
        """Connect to all of the run's servers, waiting for them and for the run's first parameters.

        The arguments are those of Client.
        """
        leave.install_where_asked()
        launch = Launch.of(servers, launch)
        # "local" is refused: a server of its own would never have a run.
        own = f"observer-{socket.gethostname()}-{os.getpid()}"
        launch = launch.with_(servers=parse_servers(launch.servers), worker_id=own)
        self._handshake = Handshake(launch)
        self._servers = Servers(launch, rejoin=self._rejoin)
        self._closing = threading.Event()
        try:
            replies = self._handshake.join(self._servers.connections, None, self._closing)
            first, whole = replies[0], self._handshake.whole
            assert whole is not None
        except BaseException:
            self.close()
            raise
        # The ports of the servers' inspection, which a server that comes back may have changed.
        self._control_ports = [reply.control_address.rpartition(":")[2] for reply in replies]
        self.model = whole.model
        self.optimizer: OptimizerSettings = first.optimizer
        self._holdings = Holdings(whole)
        # What was last read, one vector a group; only what is newer is read again.
        self._vectors = [np.zeros(size, np.float32) for size in self.model.group_sizes]
        self._receivers_into = receivers(self._servers, self._vectors, self._holdings, codec=FLOAT32)

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """The newest parameters, by tensor name, in arrays of the caller's own; each shard of one version."""
        read(self._servers, self._handshake.sender, ROLE_OBSERVER, self._receivers_into, poll=LongPoll(0.0))
        return split_tensors(self.model, self._vectors)

    def figures(self, every_seconds: float = 10.0) -> Iterator[tuple[int, dict[str, float]]]:
        """The run's update and its figures by name, now and again after each pause, for whatever logs them.

        Ends with the run, or once a server has been gone for `loss_wait_seconds`. The names are those of
        docs/trackers.md. Beside `snapshot`, use one thread.
        """
        if not 0.0 <= every_seconds < threading.TIMEOUT_MAX:
            raise InvalidArgument(
                f"every_seconds is {every_seconds}; expected the seconds between two looks, 0 or more."
            )
        return self._figures(every_seconds)

    def _figures(self, every_seconds: float) -> Iterator[tuple[int, dict[str, float]]]:
        figures, looks = Figures(), [partial(self._look, connection) for connection in self._servers]
        while not (self._closing.is_set() or figures.over):
            try:
                now = figures.of(self._servers.on_all(looks))
            except (RunFinished, ServerUnavailable):
                return
            yield int(now["updates"]), now
            self._closing.wait(0.0 if figures.over else every_seconds)

    def _look(self, connection: Connection, _: GrpcChannel, stop: threading.Event) -> Answer:
        host = connection.address.rpartition(":")[0]
        return ask(f"{host}:{self._control_ports[connection.index]}", self._handshake.launch)

    def _rejoin(self, connection: Connection, channel: GrpcChannel, timeout_seconds: float) -> None:
        reply = self._handshake.rejoin(connection, channel, timeout_seconds)
        self._control_ports[connection.index] = reply.control_address.rpartition(":")[2]

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._handshake.sender.run_id

    @property
    def global_step(self) -> int:
        """Updates of the run in the last snapshot: its largest shard version."""
        return max(self._holdings.versions.values(), default=0)

    def close(self) -> None:
        """Frees the connections."""
        self._closing.set()
        self._servers.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split_tensors(model: Model, vectors: Sequence[Vector]) -> dict[str, npt.NDArray[np.float32]]:
    """Copies of a model's tensors out of its groups' vectors, by name; blocks of a cut tensor joined into the whole.

    Of a tensor of which the model has not all blocks, the others are NaN.
    """
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for tensor, begin in _places(model):
        values = vectors[tensor.group][begin : begin + tensor.size].reshape(tensor.shape)
        if not tensor.whole_shape:
            tensors[tensor.name] = values.copy()
            continue
        whole = tensors.setdefault(tensor.name, np.full(tensor.whole_shape, np.nan, np.float32))
        whole[place(tensor.offset, tensor.shape)] = values
    return tensors


def _places(model: Model) -> Iterator[tuple[Tensor, int]]:
    """Each tensor, and where it begins in its group's vector."""
    ends = [0] * model.num_groups
    for tensor in model.tensors:
        yield tensor, ends[tensor.group]
        ends[tensor.group] += tensor.size


def _settings_of(optimizer: Optimizer) -> OptimizerSettings:
    try:
        rule, hyperparameters = optimizer
        return OptimizerSettings(rule=rule, groups=[GroupSettings(hyperparameters=hyperparameters)])
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"optimizer is {optimizer!r}; expected a rule and its settings, as ('sgd', {{'learning_rate': 0.1}})."
        ) from None


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def _model_of(tensors: Arrays, shard_size: int) -> Model:
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise InvalidArgument(f"tensors is {_kind(tensors)}; expected a dictionary of float32 arrays by their names.")
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
