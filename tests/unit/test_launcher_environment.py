"""What the launcher tells a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyps.launcher.environment import Group, visible_gpus, worker_environment

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-2222-3333-4444-555555555555)
  MIG 1g.18gb Device 0: (UUID: MIG-66666666-7777-8888-9999-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-21111111-2222-3333-4444-555555555555)
"""


def environment_of(
    index: int = 0, count: int = 4, gpus: tuple[str, ...] = (), group: Group | None = None, **inherited: str
) -> dict[str, str]:
    return worker_environment(
        inherited,
        index=index,
        count=count,
        data_addresses=["127.0.0.1:1", "127.0.0.1:2"],
        control_addresses=["127.0.0.1:3", "127.0.0.1:4"],
        run_id="run-1",
        gpus=gpus,
        group=group,
    )


def test_a_worker_learns_its_servers_run_and_place() -> None:
    environment = environment_of(index=2)

    assert environment["PYPS_SERVERS"] == "127.0.0.1:1,127.0.0.1:2"
    assert environment["PYPS_CONTROL"] == "127.0.0.1:3,127.0.0.1:4"
    assert environment["PYPS_RUN_ID"] == "run-1"
    assert environment["PYPS_WORKER_ID"] == "worker-2"
    assert (environment["PYPS_WORKER_INDEX"], environment["PYPS_WORKER_COUNT"]) == ("2", "4")


def test_no_variable_is_set_that_other_libraries_act_on() -> None:
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & environment_of().keys()


def test_a_process_of_a_replica_finds_the_others_as_under_torchrun() -> None:
    environment = environment_of(index=1, count=2, group=Group(rank=2, size=3, master_port=23456), RANK="7")

    assert environment["PYPS_WORKER_ID"] == "replica-1"
    assert (environment["PYPS_WORKER_INDEX"], environment["PYPS_WORKER_COUNT"]) == ("1", "2")
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("2", "2")
    assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("3", "3")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "23456")
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_group_of_one_process_is_a_worker_that_torch_distributed_finds_alone() -> None:
    environment = environment_of(index=3, group=Group(rank=0, size=1, master_port=23456))

    assert environment["PYPS_WORKER_ID"] == "worker-3"
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")


def test_all_processes_of_all_replicas_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    group = Group(rank=0, size=cores, master_port=1)

    assert environment_of(count=1, group=group)["OMP_NUM_THREADS"] == "1"
    assert environment_of(count=2, group=group)["OMP_NUM_THREADS"] == "1"
    assert environment_of(count=1, group=Group(0, 1, 1))["OMP_NUM_THREADS"] == str(cores)


def test_a_replica_sees_the_gpus_of_all_its_processes_in_their_order() -> None:
    def seen(index: int, gpus: tuple[str, ...]) -> set[str]:
        groups = [Group(rank, 2, 1) for rank in range(2)]
        return {environment_of(index=index, gpus=gpus, group=group)["CUDA_VISIBLE_DEVICES"] for group in groups}

    assert [seen(index, ("0", "3", "5", "6")) for index in range(2)] == [{"0,3"}, {"5,6"}]
    assert [seen(index, ("0", "3", "5")) for index in range(2)] == [{"0,3"}, {"5,0"}]
    # Named twice it would be no GPU at all.
    assert seen(1, ("4",)) == {"4"}


def test_workers_share_the_cores_unless_told_otherwise() -> None:
    cores = len(os.sched_getaffinity(0))

    assert environment_of(count=1)["OMP_NUM_THREADS"] == str(cores)
    assert environment_of(count=100 * cores)["OMP_NUM_THREADS"] == "1"
    assert environment_of(OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_gpus_are_handed_out_in_turn() -> None:
    handed = [environment_of(index=i, gpus=("0", "3"))["CUDA_VISIBLE_DEVICES"] for i in range(4)]

    assert handed == ["0", "3", "0", "3"]
    assert "CUDA_VISIBLE_DEVICES" not in environment_of()


def test_an_inherited_list_of_gpus_goes_before_the_machine_s() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ("2", "GPU-abc")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path: Path) -> None:
    assert visible_gpus({"PATH": str(tmp_path)}) == ()


def test_nvidia_smi_is_asked_for_the_gpus(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(0o755)

    assert visible_gpus({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}) == ("0", "1")


def test_python_means_the_launcher_s_own_unless_an_environment_is_active() -> None:
    folder = str(Path(sys.executable).parent)

    assert environment_of(PATH="/usr/bin")["PATH"] == f"{folder}{os.pathsep}/usr/bin"
    assert environment_of(PATH="/usr/bin", VIRTUAL_ENV="/venv")["PATH"] == "/usr/bin"
