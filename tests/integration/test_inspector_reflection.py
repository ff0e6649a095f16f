"""The control port for a stranger: every call through reflection alone, by both of its names, and with grpcurl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from inspection import Reflected, ReflectionDatabase, connected
from support import ServerProcess
from wire_worker import WireWorker

Start = Callable[..., ServerProcess]

INSPECTOR = "pyps.v1.Inspector"
# The calls of the service with a request each, the ones that end things last, and a field of each answer.
CALLS: Mapping[str, tuple[dict[str, Any], str | None]] = {
    "GetStatus": ({}, "software"),
    "ListShards": ({}, "shards"),
    "ListWorkers": ({}, "workers"),
    "ListTensors": ({"namePrefix": "layer", "pageSize": 1}, "nextPageToken"),
    "GetStaleness": ({"workerId": "a"}, "buckets"),
    "ListReceipts": ({"limit": 5}, "receipts"),
    "ListEvents": ({"limit": 5}, "newest"),
    "GetWork": ({"deliveries": True}, "secondsLeft"),
    "GetMemory": ({}, "residentBytes"),
    "Configure": ({"learningRate": 0.5}, "schedule"),
    "SaveCheckpoint": ({}, "path"),
    "Stop": ({}, None),
    "Reset": ({"runId": "run-1"}, None),
}


@pytest.fixture
def server(start_server_process: Start, tmp_path: Path) -> ServerProcess:
    started = start_server_process("--checkpoint-dir", str(tmp_path / "checkpoints"))
    with WireWorker(started.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
    return started


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_every_call_works_without_generated_classes(server: ServerProcess, version: str) -> None:
    with connected(server.control) as channel:
        inspector = Reflected(channel, INSPECTOR, version=version)
        assert set(inspector.service.methods_by_name) == set(CALLS)
        for method, (request, field) in CALLS.items():
            answer = inspector.call(method, request)
            assert field is None or answer[field], f"{method} gave {answer}"
        assert inspector.call("GetStatus")["state"] == "RUN_STATE_EMPTY"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_the_services_are_listed(server: ServerProcess, version: str) -> None:
    with connected(server.control) as channel:
        services = set(ReflectionDatabase(channel, version=version).get_services())
    reflection = {"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
    assert services == {INSPECTOR, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz", *reflection}


def test_grpcurl_makes_the_same_calls(server: ServerProcess) -> None:
    grpcurl = shutil.which("grpcurl")
    if grpcurl is None:
        pytest.skip("grpcurl is not on the PATH")

    def run(*arguments: str) -> str:
        done = subprocess.run([grpcurl, "-plaintext", *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert INSPECTOR in run(server.control, "list").split()
    assert "rpc GetStatus" in run(server.control, "describe", INSPECTOR)
    for method, (request, field) in CALLS.items():
        answer = json.loads(run("-d", json.dumps(request), server.control, f"{INSPECTOR}/{method}"))
        assert field is None or answer[field], f"{method} gave {answer}"
