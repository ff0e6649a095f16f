"""Model-parallel replicas over real servers: they step as the unpartitioned model does, each part on its own shards.

Dean et al. 2012, sections 3 and 4.1; the processes are real, cut by torch's own parallelize_module.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from inspection import inspect
from pyps.cli.export import from_checkpoints
from replica_jobs import DEADLINE, Start, control_addresses, run, shards_of, workers_of
from replica_script import RULES, batches, groups_of, held_out, network
from support import wait_until


def trained(start_python: Start, folder: Path, *flags: str, script: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The model that a job left in its checkpoints."""
    job = run(start_python, "--checkpoint-dir", str(folder), *flags, script=script)
    assert job.wait(DEADLINE) == 0, job.output()
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


def accuracy(state: dict[str, torch.Tensor]) -> float:
    model = network()
    model.load_state_dict(state)
    x, y = held_out()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize(
    ("rule", "num_servers", "extra"),
    [
        ("adagrad", 2, ()),
        ("adam", 1, ("--schedule",)),
        ("sgd", 2, ("--cut", "pipeline")),
        ("adagrad", 2, ("--cut", "pipeline")),
    ],
)
def test_a_replica_of_two_processes_takes_the_steps_of_the_whole_model(
    start_python, tmp_path, rule, num_servers, extra
):
    """P1, through the servers: columns and rows, and the stages of a pipeline."""
    found = trained(
        *(start_python, tmp_path / "checkpoints"),
        *("--servers", str(num_servers), "--replicas", "1", "--parts", "2"),
        script=("--steps", "10", "--rule", rule, *extra, "--save", str(tmp_path / "state.pt")),
    )
    assert_close(found, reference(10, rule=rule, schedule="--schedule" in extra))
    snapshot = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(snapshot[name], values) for name, values in found.items())


def test_a_minibatch_with_nan_in_one_process_is_left_out_by_all(start_python, tmp_path):
    job = run(
        *(start_python, "--servers", "2", "--parts", "2", "--checkpoint-dir", str(tmp_path)),
        script=("--steps", "6", "--nan-at", "3"),
    )
    assert job.wait(DEADLINE) == 0
    assert job.output().count("after 6 steps, 1 left out") == 2
    found = {name: torch.from_numpy(values) for name, values in from_checkpoints([tmp_path]).items()}
    assert_close(found, reference(6, without=3))


def test_two_replicas_learn_what_plain_downpour_learns(start_python, tmp_path):
    flags = ("--servers", "2", "--replicas", "2", "--staleness", "none")
    cut = trained(start_python, tmp_path / "cut", *flags, "--parts", "2", script=("--steps", "300"))
    plain = trained(start_python, tmp_path / "plain", *flags, script=("--steps", "300"))
    # Of 360 images; binomial standard error at 5 % is 1.1 points.
    assert accuracy(cut) >= 0.9 and accuracy(plain) >= 0.9
    assert abs(accuracy(cut) - accuracy(plain)) <= 0.04


def test_each_part_contacts_its_own_shards_and_nothing_else(start_python, tmp_path):
    """P3 and D4, as the servers saw it."""
    release = tmp_path / "release"
    job = run(
        start_python,
        "--servers",
        "2",
        "--replicas",
        "2",
        "--parts",
        "2",
        script=("--steps", "3", "--hold", str(release)),
    )
    addresses = control_addresses(job)
    names = {"replica-0/0", "replica-0/1", "replica-1/0", "replica-1/1"}

    def all_have_pushed() -> bool:
        pushed = {name for address in addresses for name, w in workers_of(address).items() if w.pushes_applied}
        return pushed == names

    wait_until(all_have_pushed, DEADLINE, "a push of every process")
    for address in addresses:
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
        assert holders <= workers.keys() <= (names if address == addresses[0] else holders)
        assert {shard.num_workers for shard in inspect(address, "ListShards").shards} == {2}
    release.touch()
    assert job.wait(DEADLINE) == 0, job.output()


@pytest.mark.parametrize("protocol", ["hardsync", "serial", "ssp:s=1"])
def test_protocols_that_wait_take_replicas_for_workers(start_python, tmp_path, protocol):
    found = trained(
        *(start_python, tmp_path, "--servers", "2", "--replicas", "2", "--parts", "2", "--protocol", protocol),
        script=("--steps", "12"),
    )
    assert all(values.isfinite().all() for values in found.values())
    versions = {
        int(v) for v in re.findall(r'"version": (\d+)', next(tmp_path.glob("server-0/*/manifest.json")).read_text())
    }
    # Under hardsync a round is an update of both replicas; else each push is one.
    assert (12 if protocol == "hardsync" else 24) in versions


@pytest.mark.parametrize("later", [1, 2])
def test_a_run_of_two_parts_goes_on_with_one_process_or_two(start_python, tmp_path, later):
    flags = ("--servers", "2", "--checkpoint-dir", str(tmp_path / "run"))
    first = run(start_python, *flags, "--parts", "2", script=("--steps", "4"))
    assert first.wait(DEADLINE) == 0, first.output()
    # Its own first parameters are others, and count for nothing.
    script = ("--steps", "4", "--seed", "5", "--save", str(tmp_path / "state.pt"))
    second = run(start_python, *flags, "--resume", "--parts", str(later), script=script)
    assert second.wait(DEADLINE) == 0, second.output()
    model = network()
    optimizer = RULES["adagrad"](groups_of(model))
    # The same minibatches twice, with the slots of the first time.
    for _ in range(2):
        for x, y in batches(4, index=0, count=1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = {name: torch.from_numpy(values) for name, values in from_checkpoints([tmp_path / "run"]).items()}
    assert_close(found, model)
    snapshot = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(snapshot[name], values) for name, values in found.items())


def test_a_killed_process_takes_its_replica_and_a_restarted_one_rejoins(start_python, tmp_path):
    release = tmp_path / "release"
    job = run(
        *(start_python, "--servers", "2", "--replicas", "2", "--parts", "2", "--max-restarts", "1"),
        *("--protocol", "hardsync"),
        script=("--steps", "3", "--hold", str(release)),
    )
    addresses = control_addresses(job)
    wait_until(lambda: job.output().count("joined ") >= 4, DEADLINE, "all processes' start")
    victim = wait_until(
        lambda: next((w for a in addresses for n, w in workers_of(a).items() if n == "replica-1/1" and w.counts), None),
        DEADLINE,
        "a push of the process to kill",
    )
    life = victim.incarnation
    psutil.Process(victim.process_id).kill()
    job.wait_for_output("replica-1 ends", DEADLINE)

    def versions() -> list[int]:
        return [shard.version for shard in shards_of(addresses)]

    # The other replica goes on, in rounds of its own or with the one that came back.
    at_the_kill = versions()
    wait_until(lambda: all(b > a + 5 for a, b in zip(at_the_kill, versions(), strict=True)), DEADLINE, "more rounds")

    def back() -> bool:
        found = [w for address in addresses for w in workers_of(address).values() if w.replica == "replica-1"]
        return len(found) >= 2 and all(
            w.incarnation > life and w.state == "alive" and w.counts for w in found if w.shards_pushed
        )

    wait_until(back, DEADLINE, "the replica's return")
    release.touch()
    assert job.wait(DEADLINE) == 0, job.output()
    output = job.output()
    # The process that was left says it in a sentence, not in a traceback.
    told = [line for line in output.splitlines() if line.startswith("replica-1.0")]
    assert any("a replica ends as a whole" in line for line in told), output
    assert not any("Traceback" in line for line in told), output


def test_one_mutex_for_the_whole_model_is_no_protocol_for_parts(start_python):
    job = run(start_python, "--parts", "2", "--protocol", "asgd", script=("--steps", "1"))
    assert job.wait(DEADLINE) != 0
    assert "whole model" in job.output()
    assert "Traceback" not in job.output()
