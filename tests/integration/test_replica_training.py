"""Model-parallel replicas over servers: they step as the unpartitioned model does, each part on its own shards.

Dean et al. 2012, sections 3 and 4.1; the processes are real, cut by torch's own parallelize_module.
"""

import json
import re
import signal
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from pyps.cli.export import from_checkpoints
from pyps_wire.work_pb2 import GetWorkRequest
from replica_script import EXAMPLES, RULES, batches, groups_of, network
from replicas import DEADLINE, SCRIPT, ReplicaJob, serve, shards_of, wait_for_pushes
from support import AnyServer, inspect, wait_until, workers_of


def kept(servers: list[AnyServer], folder: Path) -> dict[str, torch.Tensor]:
    """The model that servers leave in their checkpoints as they end."""
    for server in servers:
        server.stop()
    return {name: torch.from_numpy(values) for name, values in from_checkpoints([folder]).items()}


def reference(steps: int, *, rule: str = "adagrad", without: int = -1, schedule: bool = False) -> nn.Module:
    """The unpartitioned model after so many steps of torch's own optimizer, one of them left out."""
    model = network()
    optimizer = RULES[rule](groups_of(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if schedule else None
    for step, (x, y) in enumerate(batches(steps, index=0, count=1)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step != without:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def assert_close(found: dict[str, torch.Tensor], model: nn.Module, tolerance: float = 1e-6) -> None:
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].shape == values.shape
        error = (found[name] - values).norm() / values.norm()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.extended
def test_a_job_of_pyps_run_takes_the_steps_of_the_whole_model(start_python, tmp_path):
    """P1, by the command that people type."""
    flags = ("--servers", "1", "--parts", "2", "--checkpoint-dir", str(tmp_path))
    script = ("--steps", "10", "--save", str(tmp_path / "state.pt"))
    job = start_python("-m", "pyps", "run", *flags, "--", "python", SCRIPT, *script)

    assert job.wait(DEADLINE) == 0, job.output()
    found = {name: torch.from_numpy(values) for name, values in from_checkpoints([tmp_path]).items()}
    assert_close(found, reference(10))
    snapshot = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(snapshot[name], values) for name, values in found.items())


@pytest.mark.parametrize(
    ("rule", "num_servers", "extra"), [("adam", 1, ("--schedule",)), ("sgd", 2, ("--cut", "pipeline"))]
)
def test_a_replica_of_two_processes_takes_the_steps_of_the_whole_model(
    start_server, start_python, tmp_path, rule, num_servers, extra
):
    """P1, through the servers: columns and rows, and the stages of a pipeline."""
    servers = serve(start_server, num_servers, checkpoints=tmp_path)
    ReplicaJob(start_python, servers, "--steps", "10", "--rule", rule, *extra).ended_well()
    assert_close(kept(servers, tmp_path), reference(10, rule=rule, schedule="--schedule" in extra))


def test_a_replica_sends_again_what_a_server_had_not_saved(start_server, start_python, tmp_path):
    flags, go_on = ("--checkpoint-seconds", "1000"), tmp_path / "go on"
    [server] = serve(start_server, 1, *flags, checkpoints=tmp_path)
    script = ("--steps", "10", "--rule", "adam", "--pause-at", "6", "--pause", str(go_on))
    job = ReplicaJob(start_python, [server], *script)
    wait_until(lambda: any(shard.version >= 5 for shard in shards_of(job.addresses)), DEADLINE, "five steps")
    server.stop()
    _, *later = sorted(tmp_path.glob("server-0/checkpoint-*.json"))
    for checkpoint in later:
        checkpoint.unlink()
    port = server.data.rpartition(":")[2]
    again = serve(start_server, 1, *flags, "--resume", "--port", port, checkpoints=tmp_path)
    go_on.touch()
    job.ended_well()
    assert_close(kept(again, tmp_path), reference(10, rule="adam"))


@pytest.mark.parametrize(("rule", "flags"), [("sgd", ("--clip-norm", "0.5")), ("adagrad", ())])
def test_an_overlapped_replica_takes_the_steps_of_an_overlapped_worker_of_one_process(
    start_server, start_python, tmp_path, rule, flags
):
    """Pushes and pulls of process 0 are over sooner than those of process 1, which are over when the one worker's are.

    Plain SGD steps between pulls, too. Gradients gather while a push is under way: 0, 1 to 3, 4 to 6, 7 to 9.
    """
    found = []
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        servers = serve(start_server, 2, *flags, checkpoints=folder)
        script = ("--steps", "10", "--rule", rule, "--overlap", "held")
        job = ReplicaJob(start_python, servers, *script, parts=parts)
        job.ended_well()
        assert {shard.version for shard in shards_of(job.addresses)} == {4}
        found.append(kept(servers, folder))
    whole = network()
    whole.load_state_dict(found[0])
    assert_close(found[1], whole)


def test_overlapped_replicas_push_each_example_once(start_server, start_python):
    """Here pushes and pulls take the time they take, another on each process."""
    servers = serve(start_server, 2, replicas=2)
    job = ReplicaJob(start_python, servers, "--portions", "2", "--overlap", "step", replicas=2)
    outputs = job.ended_well()
    epochs = [json.loads(text) for output in outputs for text in re.findall("trained on (.+)", output)]
    assert (epochs[0], epochs[2]) == (epochs[1], epochs[3])
    for of_replicas in zip(epochs[0], epochs[2], strict=True):
        assert sorted(chain(*of_replicas)) == list(range(EXAMPLES))
    assert {shard.examples for shard in shards_of(job.addresses)} == {2 * EXAMPLES}

    servers = serve(start_server, 2, "--stop-after", "updates=9")
    job = ReplicaJob(start_python, servers, "--steps", "1000", "--overlap", "step")
    first, second = (re.findall(r"after (\d+) steps", output) for output in job.ended_well())
    assert first == second != ["1000"]
    assert {shard.version for shard in shards_of(job.addresses)} == {9}


def test_nan_in_one_process_is_left_out_by_all(start_server, start_python, tmp_path):
    servers = serve(start_server, 2, checkpoints=tmp_path)
    for output in ReplicaJob(start_python, servers, "--steps", "6", "--nan-at", "3").ended_well():
        assert "after 6 steps, 1 left out" in output
    assert_close(kept(servers, tmp_path), reference(6, without=3))


def test_each_part_contacts_its_own_shards(start_server, start_python, tmp_path):
    """P3 and D4, as the servers saw it."""
    release = tmp_path / "release"
    servers = serve(start_server, 2, replicas=2)
    job = ReplicaJob(start_python, servers, "--steps", "3", "--hold", str(release), replicas=2)
    names = {"replica-0/0", "replica-0/1", "replica-1/0", "replica-1/1"}
    wait_for_pushes(job, names)
    for address in job.addresses:
        parts = {shard.shard_id: shard.part for shard in inspect(address, "ListShards").shards}
        assert parts
        workers = workers_of(address)
        for name, worker in workers.items():
            part = int(name[-1])
            assert (worker.replica, list(worker.parts)) == (name[:-2], [part])
            own = [shard_id for shard_id, of_shard in sorted(parts.items()) if of_shard == part]
            assert list(worker.shards_pushed) == own
            assert list(worker.shards_pulled) == own
        # A process whose part lies elsewhere is known to server 0 alone.
        holders = {name for name in names if int(name[-1]) in parts.values()}
        assert holders <= workers.keys() <= (names if address == job.addresses[0] else holders)
        assert {shard.num_workers for shard in inspect(address, "ListShards").shards} == {2}
    release.touch()
    job.ended_well()


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_barrier_takes_replicas_for_workers(start_server, start_python, overlap):
    """A round is an update of both replicas; nothing goes on beside the computation then."""
    servers = serve(start_server, 2, "--protocol", "hardsync", replicas=2)
    job = ReplicaJob(start_python, servers, "--steps", "12", "--overlap", overlap, replicas=2)
    job.ended_well()
    assert {shard.version for shard in shards_of(job.addresses)} == {12}


def test_p5_no_step_goes_before_all_finish_it(start_server, start_python, tmp_path):
    """Process 1 of replica 0 is held before a step that process 0 has begun; each push is an update."""
    steps = 4
    files = ("--pause-at", str(steps), "--pause", str(tmp_path / "go"), "--hold", str(tmp_path / "release"))
    servers = serve(start_server, 2, replicas=2)
    job = ReplicaJob(start_python, servers, "--steps", str(steps + 1), *files, replicas=2)
    for rank in range(2):
        job.processes[0, rank].wait_for_output(f"about to step 0/{rank} after {steps} steps", DEADLINE)

    def pushed(replica: int) -> Counter[str]:
        """Shards that became updates, by process, over all servers."""
        counts: Counter[str] = Counter()
        for address in job.addresses:
            counts.update({name: worker.tally.pushes_applied for name, worker in workers_of(address).items()})
        return Counter({name: count for name, count in counts.items() if name.startswith(f"replica-{replica}/")})

    whole_steps = Counter(f"replica-0/{shard.part}" for shard in shards_of(job.addresses) for _ in range(steps))
    assert set(whole_steps) == {"replica-0/0", "replica-0/1"}
    # Time for a push is what the other replica takes for many.
    before = pushed(1)
    names = ("replica-1/0", "replica-1/1")
    wait_until(lambda: all(pushed(1)[name] >= before[name] + 40 for name in names), DEADLINE, "the other's steps")
    assert pushed(0) == whole_steps

    (tmp_path / "go").touch()
    wait_until(lambda: all(pushed(0)[name] > count for name, count in whole_steps.items()), DEADLINE, "the step held")
    (tmp_path / "release").touch()
    ended = [int(text) for output in job.ended_well() for text in re.findall(r"done 0/. after (\d+) steps", output)]
    assert ended[0] == ended[1] > steps


def test_portions_of_a_killed_replica_go_to_another(start_server, start_python, tmp_path):
    """Replica 0 ends one epoch, in which one replica waits for the other's last portion, and dies amid a portion."""
    # On one server: one that had heard of the killed process alone would wait for its lease.
    servers = serve(start_server, 1, "--protocol", "hardsync", replicas=2)
    script = ("--portions", "2", "--pause-at", "9", "--pause", str(tmp_path / "never"))
    job = ReplicaJob(start_python, servers, *script, replicas=2)
    victim, other, *survivors = job.processes.values()
    victim.wait_for_output("about to step 0/0 after 9 steps", DEADLINE)
    other.wait_for_output("about to step 0/1 after 9 steps", DEADLINE)
    other.signal(signal.SIGKILL)

    for process in survivors:
        assert process.wait(DEADLINE) == 0, process.output()
    assert victim.wait(DEADLINE) == 1
    work = inspect(job.addresses[0], "GetWork", GetWorkRequest(deliveries=True))
    assert work.lost == 1
    # By epoch and worker; one process of a replica speaks for it.
    places: dict[tuple[int, str], list[int]] = {}
    for delivery in work.deliveries:
        portion = delivery.portion
        of_worker = places.setdefault((getattr(delivery, "pass"), delivery.worker_id), [])
        of_worker += range(portion.start, portion.stop)
    assert set(places) == {(epoch, f"replica-{index}/0") for epoch in range(2) for index in range(2)}
    # Both processes of a replica saw the same minibatches.
    (first,), (second,) = (re.findall(r"trained on (.+)", process.output()) for process in survivors)
    assert first == second
    for epoch, examples in enumerate(json.loads(first)):
        assert sorted(places[epoch, "replica-0/0"] + places[epoch, "replica-1/0"]) == list(range(EXAMPLES))
        assert len(examples) == len(set(examples)) == len(places[epoch, "replica-1/0"])


@pytest.mark.parametrize("later", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_two_parts_go_on_with_one(start_server, start_python, tmp_path, later):
    servers = serve(start_server, 2, checkpoints=tmp_path)
    ReplicaJob(start_python, servers, "--steps", "4").ended_well()
    kept(servers, tmp_path)
    # Its own first parameters are others, and count for nothing.
    script = ("--steps", "4", "--seed", "5", "--save", str(tmp_path / "state.pt"))
    servers = serve(start_server, 2, "--resume", checkpoints=tmp_path)
    ReplicaJob(start_python, servers, *script, parts=later).ended_well()
    model = network()
    optimizer = RULES["adagrad"](groups_of(model))
    # The same minibatches twice, with the slots of the first time.
    for _ in range(2):
        for x, y in batches(4, index=0, count=1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = kept(servers, tmp_path)
    assert_close(found, model)
    snapshot = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(snapshot[name], values) for name, values in found.items())


def test_a_mistake_of_one_process_is_refused_by_all_alike(start_server, start_python):
    servers = serve(start_server, 2)
    for case, words in (
        ("optimizer", "The optimizer's rule is sgd in process 0 of the replica, but adagrad in process 1"),
        ("rate", "'learning_rate': 0.1"),
        ("unsupported", "Adadelta"),
        ("foreign parameter", "is not a parameter of the model"),
        ("pace", "push_every"),
        ("no replica", "give RemoteOptimizer or sandblaster() replica=Replica()"),
    ):
        job = ReplicaJob(start_python, servers, "--steps", "1", "--rule", "sgd", "--mistake", case)
        for process in job.processes.values():
            assert process.wait(DEADLINE) == 1, process.output()
            assert words in process.output(), case
            assert "Traceback" not in process.output(), case
            assert "initialising" not in process.output(), case
