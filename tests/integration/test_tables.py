"""Tables of rows on real servers: what workers train, and what becomes of it when servers end."""

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import load_file

from client_support import addresses
from pyps.storage.checkpoint_set import convert
from pyps.storage.replay import log_paths, replay
from pyps_client import Embedding, Launch, LocalTraining, RemoteOptimizer
from pyps_client.data import Portions
from pyps_wire.errors import InvalidArgument, LimitExceeded, ModelMismatch, NoRoom, NotFinite
from support import inspect, shell, status_of

DIM = 8


class Net(torch.nn.Module):
    def __init__(self, **table):
        super().__init__()
        torch.manual_seed(0)
        self.rows = Embedding("users", DIM, **table)
        self.linear = torch.nn.Linear(DIM, 1)

    def forward(self, ids, offsets):
        return self.linear(self.rows.bag(ids, offsets, mode="mean")).squeeze(1)


def bags(seed, count=30, ids_max=2**62):
    random = np.random.default_rng(seed)
    known = random.integers(-ids_max, ids_max, 40)
    for _ in range(count):
        ids, offsets = torch.from_numpy(random.choice(known, 20)), torch.arange(0, 20, 4)
        yield ids, offsets, torch.from_numpy(random.normal(size=5).astype(np.float32))


def step(model, optimizer, batch):
    ids, offsets, targets = batch
    optimizer.zero_grad()
    loss = (model(ids, offsets) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


class Twin(torch.nn.Module):
    """The same model with all rows in memory."""

    def __init__(self, model, ids):
        super().__init__()
        self.places = {id: place for place, id in enumerate(ids.tolist())}
        with torch.no_grad():
            self.weight = torch.nn.Parameter(model.rows(ids).clone())
        self.linear = torch.nn.Linear(DIM, 1)
        self.linear.load_state_dict(model.linear.state_dict())

    def forward(self, ids, offsets):
        places = torch.tensor([self.places[id] for id in ids.tolist()])
        return self.linear(torch.nn.functional.embedding_bag(places, self.weight, offsets, mode="mean")).squeeze(1)


@pytest.mark.parametrize(
    ("rule", "settings", "make"),
    [
        ("sgd", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ("adagrad", {"lr": 0.1, "eps": 1e-10}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)
def test_one_worker_trains_rows_as_torch_does(start_server, rule, settings, make):
    servers = [start_server() for _ in range(2)]
    model, batches = Net(optimizer=rule, **settings), list(bags(1))
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), addresses(servers)) as optimizer:
        optimizer.join()
        ids = torch.unique(torch.cat([ids for ids, _, _ in batches]))
        twin = Twin(model, ids)
        local = [make([twin.weight]), torch.optim.SGD(twin.linear.parameters(), lr=0.1)]
        for batch in batches:
            mine = step(model, optimizer, batch)
            for each in local:
                each.zero_grad()
            loss = (twin(*batch[:2]) - batch[2]).square().mean()
            loss.backward()
            for each in local:
                each.step()
            assert mine == pytest.approx(loss.item(), rel=1e-4)
        with torch.no_grad():
            np.testing.assert_allclose(model.rows(ids).numpy(), twin.weight.detach().numpy(), rtol=1e-4, atol=1e-6)


def trained(servers, batches, *, between=lambda number: None, **table):
    """Train one worker, and return all rows of the ids."""
    model = Net(optimizer="rowwise_adagrad", lr=0.1, **table)
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), servers) as optimizer:
        for number, batch in enumerate(batches):
            between(number)
            step(model, optimizer, batch)
        with torch.no_grad():
            ids = torch.unique(torch.cat([ids for ids, _, _ in batches]))
            return model.rows(ids).numpy().copy()


@pytest.mark.parametrize("protocol", ["async", "hardsync"])
def test_rows_have_the_bits_of_a_run_without_crashes(start_server, crashing, protocol):
    batches, flags = list(bags(2)), ("--protocol", protocol)
    expected = trained(start_server(*flags).data, batches)
    doomed = crashing(*flags)
    events = {5: doomed.save, 9: doomed.crash, 13: doomed.crash, 17: doomed.save, 19: doomed.crash}
    found = trained(doomed.server.data, batches, between=lambda number: events.get(number, lambda: None)())
    np.testing.assert_array_equal(found, expected)


def test_rows_are_the_same_on_another_number_of_servers(start_server, tmp_path):
    batches = list(bags(3))
    servers = [start_server("--checkpoint-dir", str(tmp_path / f"server-{index}")) for index in range(2)]
    expected = trained(addresses(servers), batches)
    for server in servers:
        inspect(server.control, "SaveCheckpoint")
        server.stop()
    for index, checkpoint in enumerate(convert([tmp_path], tmp_path / "three", num_servers=3)):
        assert checkpoint.header.server_index == index
    restored = [
        start_server("--checkpoint-dir", str(tmp_path / "three" / f"server-{index}"), "--resume") for index in range(3)
    ]
    model = Net(optimizer="rowwise_adagrad", lr=0.1)
    launch = Launch(servers=addresses(restored), run_id=status_of(restored[0]).run_id)
    dense = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    with RemoteOptimizer(model, dense, launch=launch) as optimizer:
        optimizer.join()
        ids = torch.unique(torch.cat([ids for ids, _, _ in batches]))
        with torch.no_grad():
            np.testing.assert_array_equal(model.rows(ids).numpy(), expected)


@pytest.mark.parametrize("protocol", ["async", "hardsync", "ssp:s=1"])
def test_workers_train_one_table(start_server, protocol):
    server, batches = start_server("--protocol", protocol, "--expected-workers", "2"), list(bags(4, count=12))

    def worker(index):
        launch = Launch(servers=server.data, worker_id=f"worker-{index}", worker_index=index, transport="tcp")
        model = Net(optimizer="sgd", lr=0.05)
        dense = torch.optim.SGD(model.linear.parameters(), lr=0.05)
        with RemoteOptimizer(model, dense, launch=launch) as optimizer:
            return [step(model, optimizer, batch) for batch in batches[index::2]]

    with ThreadPoolExecutor(2) as pool:
        for losses in pool.map(worker, range(2)):
            assert np.isfinite(losses).all()
    versions = {shard.version for shard in inspect(server.control, "ListShards").shards}
    assert versions == {6 if protocol == "hardsync" else 12}


@pytest.mark.parametrize("protocol", ["hardsync", "backup:b=0"])
def test_rounds_of_two_workers_go_on_after_a_crash(crashing, protocol):
    doomed, batches = crashing("--protocol", protocol, "--expected-workers", "2"), list(bags(14, count=16))
    events = {3: doomed.save, 6: doomed.crash, 11: doomed.crash}

    def worker(index):
        launch = Launch(servers=doomed.server.data, worker_id=f"worker-{index}", worker_index=index)
        model = Net(optimizer="sgd", lr=0.05, cache_rows=32, cache_versions=2)
        dense = torch.optim.SGD(model.linear.parameters(), lr=0.05)
        with RemoteOptimizer(model, dense, launch=launch) as optimizer:
            for number, (batch, after) in enumerate(pairwise([*batches, batches[0]])):
                if index == 0:
                    events.get(number, lambda: None)()
                optimizer.zero_grad()
                loss = (model(*batch[:2]) - batch[2]).square().mean()
                model.rows.prefetch(after[0])
                loss.backward()
                optimizer.step()

    with ThreadPoolExecutor(2) as pool:
        assert len([*pool.map(worker, range(2))]) == 2
    assert {shard.version for shard in inspect(doomed.server.control, "ListShards").shards} == {16}


def test_what_no_table_can_take_is_refused_with_its_name(start_server):
    server = start_server("--max-table-bytes", str(2**20))
    model = Net(optimizer="sgd", lr=0.1)
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), server.data) as optimizer:
        optimizer.join()
        with pytest.raises(InvalidArgument, match=r"table 'users' are of type torch.float32; expected torch.int64"):
            model.rows(torch.ones(3))
        other = Net(optimizer="adagrad", lr=0.1)
        with pytest.raises(ModelMismatch, match=r"table 'users' is sgd:.* in the run, but adagrad:"):
            RemoteOptimizer(
                other,
                torch.optim.SGD(other.linear.parameters(), lr=0.1),
                launch=Launch(servers=server.data, worker_id="other", run_id=status_of(server).run_id),
            ).join()
        with pytest.raises(NotFinite, match=r"table 'users'\[5, 0\] is nan; 10 gradients in a row"):
            for _ in range(10):
                optimizer.zero_grad()
                (model.rows(torch.tensor([5, 7])).sum() * float("nan")).backward()
                optimizer.step()
        with pytest.raises(
            LimitExceeded, match=r"rows of table 'users' to server 0 have \d+ bytes; it takes messages of"
        ):
            model.rows(torch.arange(600_000)).sum().backward()
            optimizer.step()
        with pytest.raises(NoRoom, match=r"table 'users' would grow to \d+ bytes .* raise --max-table-bytes"):
            model.rows(torch.arange(100_000)).sum().backward()
            optimizer.step()


def test_a_log_replays_to_the_same_rows(start_server, tmp_path):
    server = start_server("--update-log", str(tmp_path), "--log-gradients")
    trained(server.data, list(bags(5, count=6)), min_count=2)
    server.stop()
    found = [replay(path) for path in log_paths(tmp_path)]
    assert [(each.difference, each.ended) for each in found] == [("", True)] * 2


def test_an_export_has_ids_and_rows(start_server, tmp_path):
    server, batches = start_server("--checkpoint-dir", str(tmp_path)), list(bags(6, count=5))
    rows = trained(server.data, batches, bfloat16=True)
    file = tmp_path / "model.safetensors"
    assert "tables of rows are exported from a --checkpoint only" in shell(
        "export", str(file), "--servers", server.data
    )
    assert set(load_file(file)) == {"linear.weight", "linear.bias"}
    server.stop()
    shell("export", str(file), "--checkpoint", str(tmp_path))
    exported = load_file(file)
    np.testing.assert_array_equal(exported["users.ids"], np.unique(np.concatenate([ids for ids, _, _ in batches])))
    np.testing.assert_array_equal(exported["users.rows"], rows)


def test_a_cache_brings_the_same_rows_where_they_may_not_be_older(start_server):
    servers, batches = [start_server(), start_server()], list(bags(7))
    expected = trained(addresses([start_server(), start_server()]), batches)
    np.testing.assert_array_equal(trained(addresses(servers), batches, cache_rows=64), expected)
    tables = [shard.table for server in servers for shard in inspect(server.control, "ListShards").shards]
    assert sum(table.lookups for table in tables) > 0


def test_rows_that_may_be_older_are_asked_for_less_often(start_server):
    counts = []
    for versions in (0, 5):
        server = start_server()
        trained(server.data, list(bags(8)), cache_rows=4096, cache_versions=versions)
        counts.append(sum(shard.table.lookups for shard in inspect(server.control, "ListShards").shards))
    assert counts[1] < 0.6 * counts[0]


def test_a_standby_goes_on_with_the_same_rows(start_server):
    batches, quick = list(bags(9)), ("--heartbeat-seconds", "0.1")
    expected = trained(start_server().data, batches)
    primary = start_server(*quick)

    def between(number):
        if number == 8:
            standby = start_server("--standby-of", primary.data, "--standby-lease-seconds", "2", *quick)
            standby.wait_for_output("all shards are here")
        if number == 20:
            shell("drain", "--servers", primary.control)

    np.testing.assert_array_equal(trained(primary.data, batches, between=between), expected)


def test_an_export_as_parquet_has_a_file_a_table(start_server, tmp_path):
    server, batches = start_server("--checkpoint-dir", str(tmp_path)), list(bags(6, count=5))
    rows = trained(server.data, batches)
    server.stop()
    shell("export", str(tmp_path / "model.parquet"), "--checkpoint", str(tmp_path))
    exported = parquet.read_table(tmp_path / "model.parquet" / "users.parquet")
    np.testing.assert_array_equal(exported["id"], np.unique(np.concatenate([ids for ids, _, _ in batches])))
    np.testing.assert_array_equal(np.stack(exported["row"].to_numpy()), rows)


def test_a_copy_of_a_model_looks_up_the_same_rows_and_a_pickled_one_has_to_join(start_server):
    model, batches = Net(optimizer="sgd", lr=0.1, cache_rows=64), list(bags(10, count=3))
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), start_server().data) as optimizer:
        for batch in batches:
            step(model, optimizer, batch)
        with torch.no_grad():
            ids = batches[0][0]
            np.testing.assert_array_equal(copy.deepcopy(model).rows(ids).numpy(), model.rows(ids).numpy())
            with pytest.raises(InvalidArgument, match="'users' is of no run yet"):
                pickle.loads(pickle.dumps(model)).rows(ids)


def test_gradients_that_are_cleared_are_not_pushed(start_server):
    model, ids = Net(optimizer="sgd", lr=1.0), torch.arange(4)
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), start_server().data) as optimizer:
        optimizer.join()
        before = model.rows(ids).detach().clone()
        model.rows(ids).sum().backward()
        rows = model.rows(ids)
        optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
        np.testing.assert_allclose(model.rows(ids).detach().numpy(), before.numpy() - 1.0, atol=1e-6)


def test_a_lookup_without_a_backward_pass_leaves_nothing_behind(start_server):
    model, ids = Net(optimizer="sgd", lr=1.0), torch.arange(4)
    with RemoteOptimizer(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), start_server().data) as optimizer:
        optimizer.join()
        model.rows.prefetch(ids)
        copy.deepcopy(model)
        leaf = weakref.ref(model.rows(ids).grad_fn.next_functions[0][0].variable)
        assert leaf() is None
        for _ in range(2):
            model.linear(torch.ones(DIM)).sum().backward()
            optimizer.step()
        assert not (model.rows._prefetched or model.rows._prefetched_before)


def test_rows_of_several_minibatches_are_pushed_with_their_push(start_server):
    server, batches = start_server("--protocol", "hardsync"), list(bags(11, count=7))
    model = Net(optimizer="sgd", lr=0.1)
    dense = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    with RemoteOptimizer(model, dense, server.data, push_every=3, pull_every=3) as optimizer:
        for batch in batches:
            step(model, optimizer, batch)
    # The last one's when the worker leaves.
    assert {shard.version for shard in inspect(server.control, "ListShards").shards} == {3}


def test_what_trains_no_tables_says_so(start_server):
    model = Net(optimizer="sgd", lr=0.1)
    with pytest.raises(InvalidArgument, match=r"LocalTraining trains no tables of rows \('users'\): use RemoteOptim"):
        LocalTraining(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), start_server().data)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_rows_go_with_pushes_beside_the_computation(start_server, overlap):
    server, batches, model = start_server(), list(bags(12, count=3)), Net(optimizer="adagrad", lr=0.2)
    dense = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    with RemoteOptimizer(model, dense, server.data, overlap=overlap) as optimizer:
        losses = [step(model, optimizer, batch) for batch in batches * 20]
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    shards = inspect(server.control, "ListShards").shards
    assert {shard.version for shard in shards} <= set(range(20, 61))
    assert sum(shard.table.rows for shard in shards) == torch.unique(torch.cat([ids for ids, _, _ in batches])).numel()


def test_a_round_of_rows_ends_where_a_worker_has_no_data_left(start_server):
    server, batches = start_server("--protocol", "hardsync", "--expected-workers", "2"), list(bags(13, count=7))

    def worker(index):
        launch = Launch(servers=server.data, worker_id=f"worker-{index}", worker_index=index)
        model = Net(optimizer="sgd", lr=0.05)
        dense = torch.optim.SGD(model.linear.parameters(), lr=0.05)
        with RemoteOptimizer(model, dense, launch=launch) as optimizer:
            portions = Portions(batches, optimizer, batch_size=1, epochs=1, portion_batches=1)
            return [step(model, optimizer, batches[number]) for (number,) in portions]

    with ThreadPoolExecutor(2) as pool:
        assert sum(len(losses) for losses in pool.map(worker, range(2))) == 7
    assert {shard.version for shard in inspect(server.control, "ListShards").shards} <= set(range(4, 8))


@pytest.mark.parametrize(("codec", "dim"), [("bfloat16", 8), ("int8", 32), ("int4", 64), ("int8", 40)])
def test_what_an_encoding_of_gradients_lacks_comes_with_the_next(start_server, codec, dim):
    table, weight = Embedding("users", dim, optimizer="sgd", lr=1.0), torch.nn.Linear(1, 1)
    model, ids = torch.nn.ModuleList([table, weight]), torch.tensor([3, -7, 2**60])
    gradient, count = torch.from_numpy(np.random.default_rng(3).normal(size=(3, dim)).astype(np.float32)), 40
    launch = Launch(servers=start_server("--staleness", "none").data, gradient_codec=codec)
    with RemoteOptimizer(model, torch.optim.SGD(weight.parameters(), lr=0.1), launch=launch) as optimizer:
        optimizer.join()
        before = table(ids).detach().clone()
        for _ in range(count):
            optimizer.zero_grad()
            (table(ids) * gradient).sum().backward()
            optimizer.step()
        lacking = (before - count * gradient - table(ids).detach()).abs().max().item()
    # Half of a step between two numbers of the encoding; of bfloat16, which keeps nothing back, in each push.
    assert lacking < {"bfloat16": 0.01 * count, "int8": 0.02 if dim == 32 else 1e-4, "int4": 0.7}[codec]


def test_rows_of_a_life_that_went_further_do_not_end_their_worker(crashing):
    doomed, batches, optimizers, models = crashing(), list(bags(15, count=9)), [], []
    for index in range(2):
        launch = Launch(servers=doomed.server.data, worker_id=f"worker-{index}", worker_index=index)
        models.append(Net(optimizer="sgd", lr=0.05))
        dense = torch.optim.SGD(models[index].linear.parameters(), lr=0.05)
        optimizers.append(RemoteOptimizer(models[index], dense, launch=launch))
    with optimizers[0], optimizers[1]:
        optimizers[0].join()
        for number, batch in enumerate(batches):
            if number == 2:
                doomed.save()
            step(models[1], optimizers[1], batch)
        models[0].rows.prefetch(batches[0][0])
        next(iter(models[0].rows._prefetched.values())).wait()
        doomed.crash()
        # The other worker has not sent again what the checkpoint lacks.
        step(models[0], optimizers[0], batches[1])
        step(models[0], optimizers[0], batches[0])
    assert {shard.version for shard in inspect(doomed.server.control, "ListShards").shards} >= {4}
