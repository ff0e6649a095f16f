"""Tables on servers that die: each push of rows counts once, and no bit is lost."""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from client_support import addresses
from pyps.storage.folder import newest
from pyps_client import Embedding, RemoteOptimizer
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.partition import Model, Tensor
from pyps_wire.rows import bucket_of
from support import ROOT, inspect, wait_until
from wire_worker import WireWorker, sgd, values_of

IDS = np.array([-(2**63), -7, 0, 1, 2, 3, 2**40, 2**63 - 1])
RATE = np.float32(0.5)


class RowWorker(WireWorker):
    """Pushes and pulls rows of a table, call by call."""

    def __init__(self, address, dim, num_shards, sender=None):
        table = Tensor("rows", (num_shards, dim), 1, table="sgd:learning_rate=0.5,scale=0.25,seed=3")
        super().__init__(address, model=Model((Tensor("w", (16,)), table)), optimizer=sgd(groups=1))
        self.sender = sender or self.sender
        self.own, self.dim = self.plan.without_tables(), dim
        self.shard_ids = [shard.shard_id for shard in self.plan.shards if shard.group == 1]
        self.buckets = bucket_of(IDS, num_shards)

    def push_rows(self, sequence, gradients):
        """Push the gradients by id, a message to each of the table's shards, as of the version that it has then."""
        requests = []
        for bucket, shard_id in enumerate(self.shard_ids):
            ids = [id for id, of in zip(IDS.tolist(), self.buckets, strict=True) if of == bucket and id in gradients]
            payload = np.array(ids, np.int64).tobytes() + b"".join(gradients[id].tobytes() for id in ids)
            kind = common.PAYLOAD_KIND_GRADIENT if ids else common.PAYLOAD_KIND_NOTHING
            fields = {"sequence": sequence, "kind": kind, "num_rows": len(ids), "num_shards": len(self.shard_ids)}
            request = self.push_request(0.0, shard_id, resent_staleness=0, **fields)
            request.payload = payload
            requests.append(request)
        return self.push(*requests)

    def rows(self):
        rows = np.empty((IDS.size, self.dim), np.float32)
        for bucket, shard_id in enumerate(self.shard_ids):
            at = self.buckets == bucket
            if at.any():
                want = wire.PullRequest.Want(shard_id=shard_id, held_version=-1, ids=IDS[at].tobytes())
                rows[at] = values_of(self.pull([want])[0]).reshape(-1, self.dim)
        return dict(zip(IDS.tolist(), rows, strict=True))


KINDS = st.sampled_from(["push", "push", "repeat", "repeat", "save", "crash"])
EVENTS = st.lists(
    st.tuples(KINDS, st.integers(0, 7), st.sets(st.sampled_from(IDS.tolist()), min_size=1)), min_size=6, max_size=14
)


# Each example takes a server or more: it is short, and not made shorter.
@settings(
    max_examples=20, phases=[Phase.reuse, Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(dim=st.sampled_from([1, 3, 16, 70]), num_shards=st.integers(1, 2), events=EVENTS)
def test_a_server_does_with_rows_what_a_dictionary_does(crashing, dim, num_shards, events):
    doomed = crashing("--run-id", "run-1")
    worker = RowWorker(doomed.server.data, dim, num_shards)
    worker.join()
    worker.hello()
    rows, applied, pushed = worker.rows(), set(), []
    assert all((np.abs(row) <= 0.25).all() and row.any() for row in rows.values())

    def push(sequence):
        receipts = worker.push_rows(sequence, pushed[sequence - 1])
        assert {receipt.outcome for receipt in receipts} == {common.OUTCOME_APPLIED}
        assert {receipt.duplicate for receipt in receipts} == {sequence in applied}
        if sequence not in applied:
            rows.update({id: rows[id] - RATE * gradient for id, gradient in pushed[sequence - 1].items()})
        applied.add(sequence)

    doomed.save()
    saved = dict(rows), set(applied)
    for kind, age, ids in events:
        # A server remembers the last eight pushes of a worker.
        if kind == "push" and len(pushed) < 8:
            random = np.random.default_rng(len(pushed))
            pushed.append({id: random.normal(size=dim).astype(np.float32) for id in sorted(ids)})
            push(len(pushed))
        elif kind == "repeat" and pushed:
            push(len(pushed) - age % len(pushed))
        elif kind == "save":
            doomed.save()
            saved = dict(rows), set(applied)
        elif kind == "crash":
            doomed.crash()
            rows, applied = dict(saved[0]), set(saved[1])
            with worker:
                worker = RowWorker(doomed.server.data, dim, num_shards, worker.sender)
            worker.hello()
    found = worker.rows()
    for id, row in rows.items():
        np.testing.assert_array_equal(found[id], row, err_msg=f"row {id}")
    worker.channel.close()
    doomed.server.stop()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users = Embedding("users", 8, optimizer="rowwise_adagrad", lr=0.1)
        self.items = Embedding("items", 4, optimizer="adam", lr=0.01, bfloat16=True)
        self.linear = torch.nn.Linear(12, 1)

    def forward(self, ids):
        return self.linear(torch.cat([self.users(ids), self.items(ids // 3)], dim=1))


def trained(servers, count, at=lambda number: None):
    """Train one worker for so many steps; return all rows."""
    model, random = Net(), np.random.default_rng(1)
    known = torch.from_numpy(random.integers(-(2**62), 2**62, 60))
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), servers) as optimizer:
        for number in range(count):
            at(number)
            optimizer.zero_grad()
            (model(known[random.choice(60, 20)]) - 1).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            return np.hstack([model.users(known).numpy(), model.items(known // 3).numpy()])


def test_rows_have_the_bits_of_an_unbroken_run_when_servers_are_killed_amid_pushes(
    start_server, start_server_process, tmp_path
):
    expected = trained(addresses([start_server(), start_server()]), 70)
    flags = [("--checkpoint-dir", str(tmp_path / f"server-{number}")) for number in range(2)]
    servers = [start_server_process(*each) for each in flags]
    lives = itertools.count()

    def die_and_come_back():
        number = next(lives) % 2
        servers[number].kill()
        port = servers[number].data.rpartition(":")[2]
        servers[number] = start_server_process(*flags[number], "--resume", "--port", port)

    with ThreadPoolExecutor(1) as pool:
        ends = []

        def at(number):
            if number in (10, 40):
                for server in servers:
                    inspect(server.control, "SaveCheckpoint")
            elif number % 20 == 15:
                # The next one waits for it.
                ends.append(pool.submit(die_and_come_back))

        found = trained(addresses(servers), 70, at)
        for end in ends:
            end.result()
    np.testing.assert_array_equal(found, expected)


def test_the_example_ends_well_when_a_worker_and_a_server_are_killed_amid_it(start_python, tmp_path):
    flags = ("--servers", "2", "--workers", "3", "--checkpoint-dir", str(tmp_path), "--max-restarts", "1")
    example = ("python", str(ROOT / "examples" / "dlrm.py"), "--steps", "110", "--batch-size", "32")
    launcher = start_python("-m", "pyps", "run", *flags, "--", *example)
    launcher.wait_for_output("worker-1 | step 100", 100)
    wait_until(lambda: newest(tmp_path / "server-0"), what="a checkpoint")
    for process in psutil.Process(launcher.pid).children(recursive=True):
        if process.environ().get("PYPS_WORKER_ID") == "worker-1" or str(tmp_path / "server-0") in process.cmdline():
            process.kill()
    assert launcher.wait(200) == 0, launcher.output()
    said = launcher.output()
    assert re.search(r"worker-1 was killed by SIGKILL after \S+ s and is started again", said)
    assert "server-0 was killed by SIGKILL; started again from its newest checkpoint" in said
    scores = dict(re.findall(r"^worker-(\d) +\| AUC ([\d.]+)", said, re.M))
    assert scores.keys() == {"0", "1", "2"} and min(map(float, scores.values())) > 0.6
