"""A server that is killed or suspended beside its standby: nothing acknowledged is lost, and one of them serves."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from client_support import gradients_like, make_client, small_model
from pyps_wire.common_pb2 import OUTCOME_REJECTED, REASON_EPOCH, REASON_REPEATED
from support import checksums, status_of, wait_until

FLAGS = ("--run-id", "r", "--staleness", "none", "--heartbeat-seconds", "0.2", "--lease-seconds", "5")
MODEL = {"w": np.zeros(100_000, np.float32)}
SGD = ("sgd", {"learning_rate": 1.0})


@pytest.fixture
def pair(start_server_process):
    def start(*flags, lease="1", own=()):
        primary = start_server_process(*FLAGS, *flags)
        standby = start_server_process("--standby-of", primary.data, "--standby-lease-seconds", lease, *FLAGS, *own)
        return primary, standby

    return start


class Pushing:
    """A worker in a thread, which pushes ones and counts what was taken of each shard."""

    def __init__(self, name, address, **options):
        self.client = make_client(
            address,
            tensors=MODEL,
            optimizer=SGD,
            run_id="r",
            worker_id=name,
            shard_size=20_000,
            loss_wait_seconds=60,
            **options,
        )
        self.taken = dict.fromkeys(range(self.client.session.partition.num_shards), 0)
        self.refused = 0
        self.longest_seconds = 0.0
        self._ended = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()
        return self

    def _run(self):
        try:
            while not self._ended.is_set():
                began = time.monotonic()
                for receipt in self.client.push({"w": np.ones(100_000, np.float32)}):
                    if receipt.outcome == OUTCOME_REJECTED:
                        # Repeated: the standby had got some shards of a push whose others were refused.
                        assert receipt.reason in (REASON_EPOCH, REASON_REPEATED), receipt
                        self.refused += 1
                    else:
                        self.taken[receipt.shard_id] += 1
                self.client.pull()
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        except BaseException as error:
            self._error = error

    def wait_for(self, more):
        goal = min(self.taken.values()) + more
        wait_until(lambda: self._error or min(self.taken.values()) >= goal, what=f"{more} more pushes")
        if self._error:
            raise self._error

    def end(self):
        self._ended.set()
        self._thread.join(60)
        if self._error:
            raise self._error


def both_know(primary, standby, *clients):
    wait_until(lambda: "follows" in status_of(primary).standby, what="a standby that follows")
    for client in clients:
        connection = client.session._servers.connections[0]
        wait_until(lambda known=connection: standby.data in known._elsewhere, what="a worker that knows the standby")


@pytest.mark.parametrize(("transport", "folder"), [("grpc", "new"), ("tcp", "file/in it"), ("shm", "")])
def test_no_acknowledged_push_is_lost_with_a_killed_server(pair, tmp_path, transport, folder):
    """Whether the standby can write checkpoints or not."""
    (tmp_path / "file").touch()
    own = ("--checkpoint-dir", str(tmp_path / folder), "--checkpoint-seconds", "0.5") if folder else ()
    primary, standby = pair(own=own)
    workers = [Pushing(name, primary.data, transport=transport).start() for name in "ab"]
    both_know(primary, standby, *(worker.client for worker in workers))
    for worker in workers:
        worker.wait_for(20)
    primary.kill()
    for worker in workers:
        worker.wait_for(20)
    for worker in workers:
        worker.end()
        print(transport, worker.longest_seconds, worker.refused)

    versions = {shard_id: version for shard_id, (version, _) in checksums(standby.control).items()}
    assert versions == {shard_id: sum(worker.taken[shard_id] for worker in workers) for shard_id in versions}
    parameters = workers[0].client.snapshot()["w"]
    assert set(-parameters) <= set(map(float, versions.values()))
    for worker in workers:
        worker.client.close()


def test_adam_under_a_schedule_comes_to_the_same_bits_as_without_a_kill(pair, start_server_process):
    flags = ("--schedule", "step:every=4,factor=0.5", "--protocol", "softsync:n=1")
    primary, standby = pair(*flags)
    alone = start_server_process(*FLAGS, *flags)

    def train(address, at_half):
        adam = ("adam", {"learning_rate": 0.1})
        with make_client(address, optimizer=adam, run_id="r", loss_wait_seconds=60) as client:
            for step in range(12):
                if step == 6:
                    at_half(client)
                gradients = gradients_like(small_model(), step)
                if {receipt.reason for receipt in client.push(gradients)} == {REASON_EPOCH}:
                    client.pull()
                    client.push(gradients)
            return client.pull()

    def kill(client):
        both_know(primary, standby, client)
        primary.kill()

    undisturbed, taken_over = train(alone.data, lambda client: None), train(primary.data, kill)
    for name, expected in undisturbed.items():
        np.testing.assert_array_equal(taken_over[name], expected, err_msg=name, strict=True)


def test_a_suspended_server_gives_way_when_it_wakes(pair):
    primary, standby = pair()
    worker = Pushing("a", primary.data).start()
    both_know(primary, standby, worker.client)
    worker.wait_for(10)
    primary.signal(signal.SIGSTOP)
    worker.wait_for(10)
    assert status_of(standby).epoch == 1

    primary.signal(signal.SIGCONT)
    assert primary.wait() == 0
    assert f"{standby.data} has taken over run 'r' under epoch 1" in primary.output()
    worker.wait_for(10)
    worker.end()
    versions = {shard_id: version for shard_id, (version, _) in checksums(standby.control).items()}
    assert versions == worker.taken
