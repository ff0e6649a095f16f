"""Checkpoints of a run that goes on elsewhere: on other servers, and with other shards, to the bit."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps.cli.run import Kept
from pyps.config import ServerConfig
from pyps.core.arrays import Floats
from pyps.core.gradient import Extent, Gradient, PublishedReply, PushPlan
from pyps.core.ledger import Ledger
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.core.shard import Shard
from pyps.core.store import ShardState
from pyps.core.vectors.program import Instruction, Operation
from pyps.run.handshake import Greeting, Opening
from pyps.run.run import Run
from pyps.run_header import Snapshot
from pyps.storage.checkpoint import Checkpoint, CheckpointError
from pyps.storage.checkpoint_set import convert, newest_set
from pyps.storage.disk import Disk
from pyps.storage.folder import CheckpointFolder, newest
from pyps_wire.codecs import FLOAT16, FLOAT32, INT8, TOPK
from pyps_wire.errors import ModelMismatch
from pyps_wire.partition import Model, Tensor, partition
from sandblaster import Driver, fill
from shards import HEADER, data_spec, everything, gradient, make_run, make_shard, nothing, push, roster
from support import shell

# Sixteen shards of two groups, the second of which has a rest.
MODEL = Model((Tensor("a", (40, 5)), Tensor("b", (37,), group=1)), shard_size=16)
PLAN = partition(MODEL, num_servers=2)
WORKERS = ("a", "b")
RULES = {"adagrad": "adagrad:learning_rate=0.1", "adam": "adam:learning_rate=0.01"}


def greet(run: Run, name: str, num_servers: int, server_index: int, settings: RuleSettings) -> int:
    more = ("", "", 0, "")
    return run.hello(Greeting("r", name, 1, 1, "test", False, server_index, num_servers, MODEL, settings, *more))


class Servers:
    """All servers of a run, in this process, and the pushes of its workers."""

    def __init__(self, runs: list[Run], settings: RuleSettings, *, epoch: int) -> None:
        self.runs = runs
        self.epoch = epoch
        self.terms = [greet(run, "a", len(runs), index, settings) for index, run in enumerate(runs)]
        for name in WORKERS[1:]:
            for index, run in enumerate(runs):
                greet(run, name, len(runs), index, settings)

    @classmethod
    def begun(cls, rule: str, protocol: str) -> "Servers":
        settings = RuleSettings.parse(RULES[rule])
        settings = RuleSettings.make(settings.rule, (dict(settings.groups[0]),) * 2)
        flags = {"optimizer": "", "protocol": protocol, "expected_workers": "2"}
        servers = cls([make_run(**flags) for _ in range(2)], settings, epoch=0)
        for index, run in enumerate(servers.runs):
            initialization = run.begin_initialize(Opening("r", "a", 1, servers.terms[0], PLAN, settings, index))
            assert initialization is not None
            for shard in PLAN.of_server(index):
                values = np.linspace(-1, 1, shard.length).astype(np.float32)
                initialization.add(shard.shard_id, FLOAT32, memoryview(values.tobytes()))
            run.commit(initialization)
        return servers

    @classmethod
    def restored(cls, folder: Path, num_servers: int, protocol: str) -> "Servers":
        runs = []
        for index in range(num_servers):
            own = CheckpointFolder(folder / f"server-{index}")
            saved = own.resume()
            assert saved is not None
            runs.append(Run(ServerConfig(protocol=protocol, expected_workers=2)))
            runs[-1].restore(saved)
            own.close()
        return cls(runs, saved.header.optimizer, epoch=saved.header.epoch + 1)

    def shards(self) -> Iterator[tuple[int, Run, Shard]]:
        for run in self.runs:
            for shard_id, shard in run.content.shards.items():
                yield shard_id, run, shard

    def push(self, name: str, step: int) -> list[Receipt]:
        receipts = []
        for shard_id, run, shard in self.shards():
            place = run.content.partition.shard(shard_id)
            whole = np.random.default_rng((step, place.group, ord(name))).standard_normal(200).astype(np.float32)
            payload = whole[place.offset : place.offset + place.length].tobytes()
            gradient = Gradient(name, 1, step, shard.version, self.epoch, FLOAT32, payload, example_count=8)
            # A worker's place in the data goes along to one server.
            position = b"%d" % step if run is self.runs[(step + 1) % len(self.runs)] else b""
            receipts.append(run.push(PushPlan(shard_id, gradient, data_position=position), run_id="r").receipt)
        return receipts

    def save(self, folder: Path) -> None:
        for index, run in enumerate(self.runs):
            own = CheckpointFolder(folder / f"server-{index}")
            own.save(run.snapshot)
            own.close()

    def everything(self) -> dict[int, tuple[object, ...]]:
        """Without what a new epoch changes: receipts name it."""
        states = {shard_id: everything(shard) for shard_id, _, shard in self.shards()}
        return {shard_id: state[:3] + state[4:] for shard_id, state in sorted(states.items())}


def portions_of(servers: Servers) -> dict[str, Any]:
    """Without what each start sets anew by the clock."""
    return {**servers.runs[0].work.state(), "next_lease": 0}


@pytest.mark.parametrize(("rule", "protocol"), [("adagrad", "async"), ("adam", "hardsync")])
def test_a_run_of_two_servers_goes_on_to_the_bit_on_one_three_and_eight(tmp_path, rule, protocol):
    unbroken = Servers.begun(rule, protocol)
    queue = unbroken.runs[0].work
    queue.open(data_spec(), worker_id="a")
    queue.lease("a", 1, now=0.0)
    for step in range(3):
        for name in WORKERS:
            unbroken.push(name, step)
    # Under hardsync this one waits for the other worker's.
    first = unbroken.push("a", 3)
    unbroken.save(tmp_path / "two")
    ledgers = {shard_id: shard.state().ledger for shard_id, _, shard in unbroken.shards()}
    held = unbroken.everything()
    portions = portions_of(Servers.restored(tmp_path / "two", 2, protocol))
    unbroken.push("b", 3)
    unbroken.push("b", 4)
    unbroken.push("a", 4)

    for num_servers in (1, 3, 8):
        into = tmp_path / f"onto {num_servers}"
        convert([tmp_path / "two"], into, num_servers=num_servers)
        servers = Servers.restored(into, num_servers, protocol)
        assert servers.epoch > 2 and servers.everything() == held
        assert {i: shard.state().ledger for i, _, shard in servers.shards()} == ledgers
        assert {shard.epoch for _, _, shard in servers.shards()} == {servers.epoch}
        assert portions_of(servers) == portions
        # Wherever a worker's successor asks: "a" pushed last to server 0, "b" to server 1.
        for name, step in {"a": 3, "b": 2}.items():
            positions = [run.snapshot().positions[name][2][-1] for run in servers.runs]
            assert [position for _, position in positions] == [b"%d" % step] * num_servers
        assert all(run.work.spec is None for run in servers.runs[1:])
        shard = next(iter(servers.runs[0].content.shards.values()))
        reply = PublishedReply(INT8)
        assert shard.pull(reply) == shard.version and reply.since_version is None, "a published copy begins anew"
        # A retry of what the checkpoint has is answered, not applied.
        again = [receipt._replace(duplicate=False) for receipt in servers.push("a", 3)]
        assert sorted(again) == sorted(first)
        servers.push("b", 3)
        servers.push("b", 4)
        servers.push("a", 4)
        assert servers.everything() == unbroken.everything()


def begin(drivers: list[Driver]) -> None:
    for driver in drivers:
        driver.make("one", np.ones(sum(shard.length for shard in driver.shards.values())))
        driver.execute(*(Instruction(Operation.ALLOC, target=name) for name in "xgt"))


def iterate(drivers: list[Driver], k: int) -> None:
    """Iteration k of a coordinator: a trial, then x = k, g = -k, and the k-th pair 1/k, k."""
    for driver in drivers:
        driver.execute(*(Instruction(Operation.ALLOC, target=name) for name in "sy"))
        values = {"t": 1000.0 + k, "s": 1 / k, "y": float(k), "x": float(k), "g": -float(k)}
        driver.execute(
            *(fill(name, value) for name, value in values.items()),
            Instruction(Operation.MOVE, left="t"),
            Instruction(Operation.PUSH_HISTORY, left="s", right="y"),
            commits=k,
            state=f"state {k}",
        )


def drivers_of(servers: Servers) -> list[Driver]:
    return [Driver(run.content.machine, dict(run.content.shards)) for run in servers.runs]


def vectors_of(drivers: list[Driver]) -> dict[tuple[int, str], bytes]:
    of_shards = [(i, vectors.arrays) for driver in drivers for i, vectors in driver.machine._vectors.items()]
    return {(i, name): array.tobytes() for i, arrays in of_shards for name, array in arrays.items()}


def test_a_coordinator_goes_on_at_the_newest_iteration_of_which_all_servers_have_a_checkpoint(tmp_path):
    servers = Servers.begun("adagrad", "async")
    drivers = drivers_of(servers)
    begin(drivers)
    for k in (1, 2):
        iterate(drivers, k)
        servers.save(tmp_path)
    iterate(drivers, 3)
    ahead = CheckpointFolder(tmp_path / "server-1")
    ahead.save(servers.runs[1].snapshot)
    ahead.close()

    for num_servers in (1, 3, 8):
        into = tmp_path / f"onto {num_servers}"
        convert([tmp_path], into, num_servers=num_servers)
        again = Servers.restored(into, num_servers, "async")
        machines = [run.content.machine for run in again.runs]
        assert {(machine.iteration, machine.text) for machine in machines} == {(2, "state 2")}
        more = drivers_of(again)
        assert {driver.epoch for driver in more} == {2}
        for driver in more:
            driver.make("one", np.ones(sum(shard.length for shard in driver.shards.values())))
            driver.execute(Instruction(Operation.ALLOC, target="t"))
        iterate(more, 3)
        assert vectors_of(more) == vectors_of(drivers)
        assert again.everything().keys() == servers.everything().keys()
        assert [state[1] for state in again.everything().values()] == [s[1] for s in servers.everything().values()]


def test_of_no_iteration_is_there_a_checkpoint_of_each_server(tmp_path):
    servers = Servers.begun("adagrad", "async")
    drivers = drivers_of(servers)
    for driver, count in zip(drivers, (1, 2), strict=True):
        begin([driver])
        for k in range(1, count + 1):
            iterate([driver], k)
    servers.save(tmp_path)
    with pytest.raises(CheckpointError, match="are of the coordinator's iterations 1, 2, and of no iteration"):
        newest_set([tmp_path])


def flat(folder: Path) -> dict[str, list[Floats]]:
    """The vectors of the groups, and those of the slots."""
    own = newest_set([folder])
    vectors: dict[str, list[Floats]] = {}
    for shard in own.partition.shards:
        state, _ = own.read_shard(shard.shard_id)
        for name, values in {"parameters": state.parameters, **state.slots}.items():
            vectors.setdefault(name, [np.zeros(0, np.float32)] * 2)
            vectors[name][shard.group] = np.concatenate([vectors[name][shard.group], values])
    return vectors


@pytest.mark.parametrize("shard_size", [16, 48, 64, 1024])
def test_other_shards_hold_and_do_the_same(tmp_path, shard_size):
    servers = Servers.begun("adam", "hardsync")
    for step in range(3):
        for name in WORKERS:
            servers.push(name, step)
    # It waits for the other worker's.
    servers.push("a", 3)
    servers.save(tmp_path / "two")
    convert([tmp_path / "two"], tmp_path / "three", num_servers=3, shard_size=shard_size)
    again = Servers.restored(tmp_path / "three", 3, "hardsync")
    lengths = partition(dataclasses.replace(MODEL, shard_size=shard_size), num_servers=3).lengths
    assert again.runs[0].content.partition.lengths == lengths
    for own, folder in ((servers, "two"), (again, "three")):
        assert all(receipt.duplicate for receipt in own.push("a", 3))
        assert {receipt.outcome for receipt in own.push("b", 3)} == {Outcome.APPLIED}
        own.save(tmp_path / folder)
    before, after = flat(tmp_path / "two"), flat(tmp_path / "three")
    assert before.keys() == after.keys() == {"parameters", "first_moment", "second_moment"}
    for name, vectors in before.items():
        for mine, theirs in zip(vectors, after[name], strict=True):
            assert mine.tobytes() == theirs.tobytes(), name


# One server of three shards, of which others are made.

THREE = partition(Model((Tensor("x", (48,)),), shard_size=16), num_servers=1)
SGD = dataclasses.replace(HEADER, partition=THREE, optimizer=RuleSettings.make("sgd", ({"learning_rate": 1.0},)))


def resliced(tmp_path: Path, shards: Mapping[int, Shard], shard_size: int, **fields: Any) -> dict[int, ShardState]:
    folder = CheckpointFolder(tmp_path / "before")
    folder.save(lambda: Snapshot(dataclasses.replace(SGD, **fields), shards))
    folder.close()
    [written] = convert([folder.path], tmp_path / "after", num_servers=1, shard_size=shard_size)
    return dict(written.load().shards)


def test_shards_of_different_versions_become_one_to_which_nothing_is_applied_twice(tmp_path):
    shards = {i: make_shard(np.zeros(16), shard_id=i) for i in range(3)}
    for sequence in range(12):
        push(shards[0], np.ones(16), sequence=sequence, example_count=1)
    for sequence in (2, 3, 12):
        push(shards[1], np.ones(16), sequence=sequence, example_count=1)
    push(shards[2], np.ones(16), worker_id="b", sequence=7, learning_rate=0.5)
    [state] = resliced(tmp_path, shards, 48).values()
    assert (state.version, state.examples, state.learning_rate) == (12, 12, 1.0)
    assert state.parameters.tolist() == [-12.0] * 16 + [-3.0] * 16 + [-0.5] * 16
    whole = make_shard(state.parameters, version=state.version, ledger=Ledger(state.ledger))
    # Eight are remembered of each life.
    for worker, sequences in (("a", range(5, 13)), ("b", (7,))):
        for sequence in sequences:
            receipt = push(whole, np.ones(48), worker_id=worker, sequence=sequence)
            assert receipt.duplicate and receipt.shard_id == 0
    assert push(whole, np.ones(48), sequence=4).reason == Reason.FORGOTTEN
    assert push(whole, np.ones(48), sequence=13).outcome == Outcome.APPLIED


def test_extents_and_halves_that_wait_are_cut_and_joined(tmp_path):
    """A parameter without a gradient is another thing than one with a gradient of zero."""
    shards = {i: make_shard(np.zeros(16), shard_id=i, protocol="hardsync") for i in range(3)}
    two = roster("a", "b")
    push(shards[0], np.arange(6), extents=(Extent(2, 4), Extent(14, 2)), workers=two)
    half = FLOAT16.encode(np.arange(16, dtype=np.float32))
    shards[1].push(gradient([], codec=FLOAT16, payload=half), roster=two)
    shards[2].push(nothing(), roster=two)
    [state] = resliced(tmp_path, shards, 48).values()
    [waiting] = state.pending
    assert waiting.gradient.extents == (Extent(2, 4), Extent(14, 18))
    assert np.frombuffer(waiting.gradient.payload, np.float32).tolist() == [*range(6), *range(16)]
    [apart] = convert([tmp_path / "after"], tmp_path / "apart", num_servers=1, shard_size=16)
    for i, state in apart.load().shards.items():
        ((mine, *_),), ((theirs, *_),) = state.pending, shards[i].state().pending
        values = theirs.codec.decode(theirs.payload, theirs.count(16) if theirs.payload else 0)
        assert mine == theirs._replace(codec=FLOAT32, payload=values.tobytes())


def test_gradients_that_wait_and_cannot_be_cut_are_refused_with_a_way_out(tmp_path):
    shards = {i: make_shard(np.zeros(16), shard_id=i, protocol="hardsync") for i in range(3)}
    shards[1].push(gradient([], codec=TOPK, payload=TOPK.encode(np.ones(16, np.float32))), roster=roster("a", "b"))
    with pytest.raises(CheckpointError, match=r"gradients of topk wait.*then `pyps save`"):
        resliced(tmp_path / "sparse", shards, 32)
    push(shards[2], np.ones(16), workers=roster("a"))
    with pytest.raises(CheckpointError, match=r"different versions, for which gradients wait.*then `pyps save`"):
        resliced(tmp_path / "versions", shards, 32)


# Which checkpoints are chosen, and what becomes of the others.


def test_a_folder_is_converted_in_place_and_an_end_midway_loses_nothing(tmp_path):
    servers = Servers.begun("adagrad", "async")
    servers.push("a", 0)
    servers.save(tmp_path)
    held = servers.everything()

    class Full(Disk):
        def put(self, path, buffers):
            if path.parent.name == "server-0" and path.name.startswith("checkpoint-00000002"):
                raise OSError(28, "No space left on device")
            super().put(path, buffers)

    with pytest.raises(CheckpointError, match="No space left"):
        convert([tmp_path], tmp_path, num_servers=3, disk=Full())
    # Servers 1 and 2 have theirs; as long as server 0 has not, the old set is the newest that is whole.
    assert newest_set([tmp_path]).num_servers == 2
    for num_servers in (3, 1, 2):
        convert([tmp_path], tmp_path, num_servers=num_servers)
        assert newest_set([tmp_path]).num_servers == num_servers
        assert newest(tmp_path / "server-2") is None or num_servers == 3
    assert Servers.restored(tmp_path, 2, "async").everything() == held
    for path in tmp_path.glob("server-*/forgotten-*"):
        Checkpoint(path).load()


def test_servers_whose_checkpoints_differ_or_that_get_no_shard_are_told(tmp_path, capsys):
    servers = Servers.begun("adagrad", "async")
    servers.push("a", 0)
    servers.save(tmp_path)
    servers.push("a", 1)
    with contextlib.closing(CheckpointFolder(tmp_path / "server-1")) as folder:
        folder.save(servers.runs[1].snapshot)
    words = "the servers' newest checkpoints are of different versions: server 0 at 1, server 1 at 2"
    assert words in shell("checkpoint", "list", str(tmp_path))
    assert words in shell("export", str(tmp_path / "m.pt"), "--checkpoint", str(tmp_path))
    Kept(tmp_path, 2).fit_servers()
    Kept(tmp_path, 18).fit_servers()
    said = capsys.readouterr().out
    assert words in said
    assert "The model has 16 shards, so 2 servers will hold none: " in said


def test_checkpoints_of_two_runs_or_a_folder_that_is_taken_are_refused(tmp_path):
    for name in ("run-1", "run-2"):
        shards = {i: make_shard(np.zeros(16), shard_id=i) for i in range(3)}
        folder = CheckpointFolder(tmp_path / name / "server-0")
        folder.save(lambda: Snapshot(dataclasses.replace(SGD, run_id=name), shards))  # noqa: B023
        folder.close()
    with pytest.raises(ModelMismatch, match=r"is of run 'run-2' on 1 servers.*name checkpoints of one run"):
        newest_set([tmp_path / "run-1", tmp_path / "run-2"])
    with pytest.raises(CheckpointError, match=r"holds checkpoint-00000001.json of run 'run-2'"):
        convert([tmp_path / "run-1"], tmp_path / "run-2", num_servers=1)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        newest_set([tmp_path])
