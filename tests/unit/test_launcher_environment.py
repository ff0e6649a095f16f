"""What the launcher tells a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyps.launcher.environment import gpu_indices, visible_gpus, worker_environment

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-2222-3333-4444-555555555555)
  MIG 1g.18gb Device 0: (UUID: MIG-66666666-7777-8888-9999-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-21111111-2222-3333-4444-555555555555)
"""


def environment_of(index: int = 0, count: int = 4, gpus: tuple[str, ...] = (), **inherited: str) -> dict[str, str]:
    return worker_environment(
        inherited,
        index=index,
        count=count,
        data_addresses=["127.0.0.1:1", "127.0.0.1:2"],
        control_addresses=["127.0.0.1:3", "127.0.0.1:4"],
        run_id="run-1",
        gpus=gpus,
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


def test_whole_gpus_are_read_from_the_listing() -> None:
    assert gpu_indices(LISTING) == ("0", "1")
    assert gpu_indices("No devices found.\n") == ()


def test_python_means_the_launcher_s_own_unless_an_environment_is_active() -> None:
    folder = str(Path(sys.executable).parent)

    assert environment_of(PATH="/usr/bin")["PATH"] == f"{folder}{os.pathsep}/usr/bin"
    assert environment_of(PATH="/usr/bin", VIRTUAL_ENV="/venv")["PATH"] == "/usr/bin"
