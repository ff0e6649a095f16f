"""docker/compose.yaml on a real engine: three workers train on two servers, one worker dies, the others finish.

Once over the network between the containers, and once through memory that they share.

Needs a Docker engine, or DOCKER_ENGINE naming a script whose `up` starts one; skipped without.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pyps_wire import inspector_pb2 as pb
from pyps_wire.inspector_pb2_grpc import InspectorStub
from support import ROOT, wait_until

CLUSTER = ("-f", str(ROOT / "docker" / "compose.yaml"))
# What compose is told of each example, by the transport that its workers are to have.
EXAMPLES = {"grpc": CLUSTER, "shm": (*CLUSTER, "-f", str(ROOT / "docker" / "compose.shared-memory.yaml"))}
TOKEN = "a token of the compose test"
# A cold build downloads and compiles.
BUILD_SECONDS = 900
TRAINING_SECONDS = 240

WORKERS = ("worker-0", "worker-1", "worker-2")

pytestmark = pytest.mark.timeout(BUILD_SECONDS + 2 * TRAINING_SECONDS)


def compose_commands() -> list[list[str]]:
    """The ways to call compose that this machine has."""
    ways = (["docker", "compose"], ["docker-compose"])
    return [way for way in ways if shutil.which(way[0]) and succeeds(*way, "version")]


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """A running engine with compose."""
    script = os.environ.get("DOCKER_ENGINE")
    if script:
        subprocess.run([script, "up"], check=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL)
    elif not (shutil.which("docker") and succeeds("docker", "info")):
        pytest.skip("no Docker engine runs here, and DOCKER_ENGINE names no script that starts one")
    if not compose_commands():
        pytest.skip("neither `docker compose` nor `docker-compose` is installed")


class Cluster:
    """The cluster of an example as a compose project of its own."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.transport = transport
        self.token_file = folder / "token.txt"
        self.token_file.write_text(TOKEN + "\n", encoding="utf-8")
        self.token_file.chmod(0o644)
        ports = free_ports(2)
        self.control = f"127.0.0.1:{ports[0]}"
        self._environment = os.environ | {
            "PYPS_TOKEN_FILE": str(self.token_file),
            "PYPS_CONTROL_PORT": str(ports[0]),
            "PYPS_METRICS_PORT": str(ports[1]),
            "PYPS_LEASE_SECONDS": "6",
            # Through shared memory they take half a minute.
            "DIGITS_EPOCHS": "400",
        }
        self._compose = [*compose_commands()[0], *EXAMPLES[transport], "-p", f"pyps-test-{os.getpid()}-{transport}"]

    def compose(self, *arguments: str, timeout_seconds: float = TRAINING_SECONDS) -> str:
        """Runs a compose command on the project and returns what it printed on stdout."""
        done = subprocess.run(
            [*self._compose, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def state(self, service: str) -> tuple[str, int]:
        """A service's container: "running" or "exited", and the exit status."""
        container = self.compose("ps", "-a", "-q", service).strip()
        inspected = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
        state = json.loads(inspected.stdout)[0]["State"]
        return state["Status"], state["ExitCode"]

    def logs(self) -> str:
        return self.compose("logs", "--no-color")


@pytest.fixture(params=list(EXAMPLES))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster, built and started, and removed with all that belongs to it."""
    cluster = Cluster(tmp_path, request.param)
    try:
        # The other services run the same two images.
        cluster.compose("build", "server-0", "worker-0", timeout_seconds=BUILD_SECONDS)
        cluster.compose("up", "-d")
        yield cluster
        print(cluster.logs())
    finally:
        cluster.compose("down", "--volumes", "--remove-orphans")


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(opened.getsockname()[1]) for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


def status_of(channel: grpc.Channel) -> pb.Status | None:
    """The server's status, None while it does not answer."""
    try:
        return InspectorStub(channel).GetStatus(
            pb.GetStatusRequest(), metadata=[("authorization", f"Bearer {TOKEN}")], timeout=5
        )
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE, error
        return None


def test_the_others_finish_after_one_worker_s_container_was_killed(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.control) as channel:

        def version() -> int:
            status = status_of(channel)
            return status.version_max if status is not None and status.workers_alive == 3 else -1

        wait_until(lambda: version() >= 50, TRAINING_SECONDS, "training by three workers")
        inspect_from_outside(cluster, channel)

        cluster.compose("kill", "-s", "SIGKILL", "worker-2")
        assert cluster.state("worker-2") == ("exited", 137)

    for service in ("worker-0", "worker-1"):
        wait_until(lambda service=service: cluster.state(service)[0] == "exited", TRAINING_SECONDS, f"{service}'s end")
        assert cluster.state(service) == ("exited", 0)
    for service in ("server-0", "server-1"):
        wait_until(lambda service=service: cluster.state(service)[0] == "exited", TRAINING_SECONDS, f"{service}'s end")
        assert cluster.state(service) == ("exited", 0)
    logs = cluster.logs()
    assert logs.count("held-out accuracy 0.9") == 2
    # In a container of its own, since those of the cluster may end at any moment.
    uid = cluster.compose("run", "--rm", "--no-deps", "--entrypoint", "id", "server-0", "-u")
    assert uid.strip() == "10001", "servers do not run as root"
    # On both servers, of which one answers questions from outside.
    assert logs.count("worker shares its memory") == (6 if cluster.transport == "shm" else 0)


def inspect_from_outside(cluster: Cluster, channel: grpc.Channel) -> None:
    """Asks the published control port as a person would, with the token and without."""
    with pytest.raises(grpc.RpcError) as refusal:
        InspectorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5)
    assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED

    authenticated = grpc.intercept_channel(channel, TokenInterceptor())
    services = ProtoReflectionDescriptorDatabase(authenticated).get_services()
    assert "pyps.v1.Inspector" in services

    def transports() -> dict[str, str]:
        workers = InspectorStub(authenticated).ListWorkers(pb.ListWorkersRequest(), timeout=5).workers
        return {worker.worker_id: worker.transport for worker in workers}

    # A worker that has said Hello needs a moment until it shares its memory.
    expected = dict.fromkeys(WORKERS, cluster.transport)
    wait_until(lambda: transports() == expected, what=f"workers that all use {cluster.transport}")


class TokenInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):  # type: ignore[misc]
    """Shows the token with every call."""

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        return continuation(with_token(details), request)

    def intercept_stream_stream(self, continuation, details, requests):  # type: ignore[no-untyped-def]
        return continuation(with_token(details), requests)


def with_token(details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
    return details._replace(metadata=[*(details.metadata or ()), ("authorization", f"Bearer {TOKEN}")])


def test_every_compose_of_this_machine_reads_the_files() -> None:
    # Asked here, not when tests are collected: the engine's script may have installed it since.
    commands = compose_commands()
    assert commands
    environment = os.environ | {"PYPS_TOKEN_FILE": os.devnull}
    for compose, example, profile in product(commands, EXAMPLES.values(), ((), ("--profile", "inspect"))):
        done = subprocess.run(
            [*compose, *example, *profile, "config"],
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, (compose, done.stderr)
        assert "worker-2" in done.stdout
        assert ("/run/pyps" in done.stdout) == (example is EXAMPLES["shm"])
