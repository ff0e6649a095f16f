"""A worker without pyps_client: gRPC, numpy and the classes that protoc generates from proto/.

    pyps serve                                   # in another terminal
    python examples/stock_client.py 127.0.0.1:7610

It trains to the bits of a worker of pyps_client, and shows what a worker in any language has to say: Hello, the first
parameters where it is elected, pushes and pulls in one by Exchange, heartbeats that keep its lease, Leave.
proto/pyps_wire/parameter_server.proto explains every field.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np

from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import PARAMETER_SERVER, stub_of

# A group's tensors, end to end, are one vector, which the first worker slices into shards. Here each is one.
TENSORS = {"weight": np.zeros((20, 5), np.float32), "bias": np.zeros(5, np.float32)}
RULE, HYPERPARAMETERS = "adagrad", {"learning_rate": 0.1, "eps": 1e-10}
EXAMPLES = 32


def gradients_of(parameters: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """Return the gradients of a softmax regression: the class is the largest of the first five inputs."""
    inputs = np.random.default_rng(step).standard_normal((EXAMPLES, 20), np.float32)
    scores = np.exp(inputs @ parameters["weight"] + parameters["bias"])
    errors = scores / scores.sum(axis=1, keepdims=True)
    errors[np.arange(EXAMPLES), inputs[:, :5].argmax(axis=1)] -= 1
    return {"weight": inputs.T @ errors / EXAMPLES, "bias": errors.mean(axis=0)}


class Worker:
    """One worker of one server."""

    def __init__(self, address: str, worker_id: str) -> None:
        self.parameters, self.versions = dict(TENSORS), [-1] * len(TENSORS)
        # A later life of the same worker has a larger incarnation.
        self.sender = common.Sender(worker_id=worker_id, incarnation=time.time_ns())
        self.metadata = [("authorization", f"Bearer {os.environ.get('PYPS_TOKEN', '')}")]
        self.stub = stub_of(PARAMETER_SERVER, grpc.insecure_channel(address))
        model = common.ModelSpec()
        for group, (name, values) in enumerate(TENSORS.items()):
            model.tensors.add(name=name, shape=values.shape, group=group)
        groups = [common.GroupSettings(hyperparameters=HYPERPARAMETERS)] * len(TENSORS)
        optimizer = common.OptimizerSettings(rule=RULE, groups=groups)
        self.run = {"model": model, "optimizer": optimizer, "num_servers": 1}

    def join(self) -> None:
        """Say Hello until the run has parameters; send the first ones if elected."""
        while (hello := self.hello()).state in (common.RUN_STATE_EMPTY, common.RUN_STATE_INITIALIZING):
            if hello.initialize:
                # The sender of the first parameters names the run, unless the server's --run-id does.
                self.sender.run_id = hello.run_id or "stock"
                self.stub.Initialize(self.first_parameters(hello.term), metadata=self.metadata, timeout=60)
            else:
                time.sleep(0.1)
        self.sender.run_id, self.epoch = hello.run_id, hello.epoch
        self.ended = threading.Event()
        threading.Thread(target=self.keep_lease, args=[hello.heartbeat_seconds], daemon=True).start()
        # One stream for all rounds; None ends it.
        self.pushes: queue.SimpleQueue[wire.PushRequest | None] = queue.SimpleQueue()
        self.replies = self.stub.Exchange(iter(self.pushes.get, None), metadata=self.metadata)
        self.pull({})

    def hello(self) -> wire.HelloReply:
        request = wire.HelloRequest(sender=self.sender, protocol_version=1, role=common.ROLE_WORKER, **self.run)
        reply = self.stub.Hello(request, metadata=self.metadata, timeout=60)
        # From now on the server requires it in calls in this worker's name.
        self.sender.secret = reply.secret
        return reply

    def first_parameters(self, term: int) -> Iterator[wire.InitializeRequest]:
        # How the model is sliced, and the server of each shard.
        tables = {"shard_lengths": [values.size for values in TENSORS.values()], "placement": [0] * len(TENSORS)}
        yield wire.InitializeRequest(sender=self.sender, term=term, **self.run, **tables)
        for shard_id, values in enumerate(TENSORS.values()):
            shard = {"shard_id": shard_id, "codec": common.CODEC_FLOAT32, "payload": values.tobytes()}
            yield wire.InitializeRequest(sender=self.sender, term=term, **shard)

    def keep_lease(self, seconds: float) -> None:
        """Renew the lease: others wait no longer for a worker that is silent beyond it."""
        while not self.ended.wait(seconds):
            self.stub.Heartbeat(wire.HeartbeatRequest(sender=self.sender), metadata=self.metadata, timeout=60)

    def exchange(self, gradients: dict[str, np.ndarray], step: int) -> None:
        """Push gradients and receive the updated parameters, a message a shard in each direction."""
        for shard_id, values in enumerate(gradients.values()):
            push = {"sequence": step + 1, "shard_id": shard_id, "num_shards": len(gradients), "epoch": self.epoch}
            push |= {"base_version": self.versions[shard_id], "held_version": self.versions[shard_id]}
            push |= {"codec": common.CODEC_FLOAT32, "kind": common.PAYLOAD_KIND_GRADIENT}
            push |= {"clock": step + 1, "example_count": EXAMPLES, "payload": values.tobytes()}
            self.pushes.put(wire.PushRequest(sender=self.sender, **push))
        awaited = {}
        for reply in (next(self.replies) for _ in gradients):
            receipt = reply.receipt
            if receipt.outcome == common.OUTCOME_REJECTED:
                raise SystemExit(f"shard {receipt.shard_id}: {receipt.message}")
            self.take(receipt.shard_id, reply)
            # Under a barrier the update waits for other workers, and its parameters are pulled.
            if receipt.min_version > self.versions[receipt.shard_id]:
                awaited[receipt.shard_id] = receipt.min_version
        if awaited:
            self.pull(awaited)

    def pull(self, min_versions: dict[int, int]) -> None:
        """Pull newer shards, once they have the wanted versions."""
        request = wire.PullRequest(sender=self.sender, role=common.ROLE_WORKER, epoch=self.epoch)
        request.codec, request.wait_milliseconds = common.CODEC_FLOAT32, 30_000
        for shard_id, version in enumerate(self.versions):
            request.wants.add(shard_id=shard_id, held_version=version, min_version=min_versions.get(shard_id, 0))
        for shard in self.stub.Pull(request, metadata=self.metadata, timeout=60):
            self.take(shard.shard_id, shard)

    def take(self, shard_id: int, shard: wire.ExchangeReply | wire.Parameters) -> None:
        # Without a codec there are no parameters.
        if shard.codec:
            name = list(TENSORS)[shard_id]
            self.parameters[name] = np.frombuffer(shard.payload, np.float32).reshape(TENSORS[name].shape)
            self.versions[shard_id] = shard.version

    def leave(self) -> None:
        """Leave as finished: no other worker waits for the lease's end."""
        self.ended.set()
        self.pushes.put(None)
        request = wire.LeaveRequest(sender=self.sender, cause=wire.LeaveRequest.CAUSE_FINISHED)
        self.stub.Leave(request, metadata=self.metadata, timeout=60)


def train(address: str, *, steps: int, worker_id: str = "stock") -> dict[str, np.ndarray]:
    """Return the parameters after so many steps."""
    worker = Worker(address, worker_id)
    worker.join()
    for step in range(steps):
        worker.exchange(gradients_of(worker.parameters, step), step)
    worker.leave()
    return worker.parameters


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} HOST:PORT")
    print("bias:", train(sys.argv[1], steps=200)["bias"])
