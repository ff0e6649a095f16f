"""docker/compose.yaml on a real engine: three workers train on two servers by mutual TLS, a worker and a server die,
and the others finish with a standby.

Once over lanes between the containers, and once through memory that they share.

Needs a Docker engine, or DOCKER_ENGINE naming a script whose `up` starts one; skipped without.
"""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from environments import completed, require_engine, run
from support import ROOT, wait_until

CLUSTER = ("-f", str(ROOT / "docker" / "compose.yaml"))
# The flags of compose for each example, by the transport that its workers must have.
EXAMPLES = {"tcp": CLUSTER, "shm": (*CLUSTER, "-f", str(ROOT / "docker" / "compose.shared-memory.yaml"))}
# A cold build downloads and compiles.
BUILD_SECONDS = 900
TRAINING_SECONDS = 240

SERVERS = ("server-0", "server-1")
STANDBYS = ("standby-0", "standby-1")
WORKERS = ("worker-0", "worker-1", "worker-2")

# Launch settings that servers refuse, and the reason.
REFUSED = (
    ({"tls_cert": "", "tls_key": ""}, "TLS with server-0:7610 failed"),
    ({"tls_cert": "", "tls_key": "", "tls_ca": ""}, "takes TLS only"),
    ({"tls_cert": "/tmp/other/worker.crt", "tls_key": "/tmp/other/worker.key"}, "TLS with server-0:7610 failed"),
    ({"tls_ca": "/tmp/other/ca.crt"}, "unable to get local issuer certificate"),
    ({"token": "unknown"}, "the token is not this server's"),
    ({"token_file": "/keys/observer.token"}, "this caller's is observer"),
    ({"worker_id": "worker-0"}, "'worker-0' is a live process"),
)
JOIN = """
import json, sys
from pathlib import Path
import numpy
from pyps.certificates import Authority
from pyps_client import Client, Launch, PypsError
Authority(Path("/tmp/other"), create=True).make_worker("worker", days=1)
digits = {"0.weight": (64, 64), "0.bias": 64, "2.weight": (10, 64), "2.bias": 10}
model = {name: numpy.zeros(shape, "float32") for name, shape in digits.items()}
for shown in json.loads(sys.argv[1]):
    given = {"servers": "server-0:7610,server-1:7610", "run_id": "digits", "start_wait_seconds": 0} | shown
    try:
        Client(model, ("adagrad", {"learning_rate": 0.05}), launch=Launch(**given))
        print("joined")
    except PypsError as error:
        print(" ".join(str(error).split()))
"""

pytestmark = pytest.mark.timeout(BUILD_SECONDS + 2 * TRAINING_SECONDS)


def compose_commands() -> list[list[str]]:
    commands = (["docker", "compose"], ["docker-compose"])
    return [one for one in commands if shutil.which(one[0]) and completed(*one, "version").returncode == 0]


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """A running engine with compose, and the two images of all services."""
    require_engine(BUILD_SECONDS)
    if not compose_commands():
        pytest.skip("neither `docker compose` nor `docker-compose` is installed")
    run(*compose_commands()[0], *CLUSTER, "build", "server-0", "worker-0", seconds=BUILD_SECONDS)


class Cluster:
    """The cluster of an example as a compose project of its own."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._project = f"pyps-test-{os.getpid()}-{transport}"
        self._compose = [*compose_commands()[0], *EXAMPLES[transport], "-p", self._project]

    def compose(self, *arguments: str) -> str:
        done = completed(*self._compose, *arguments, seconds=TRAINING_SECONDS)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def containers(self) -> dict[str, Any]:
        of_project = f"label=com.docker.compose.project={self._project}"
        ids = completed("docker", "ps", "-a", "-q", "--filter", of_project).stdout.split()
        found = json.loads(completed("docker", "inspect", *ids).stdout)
        return {container["Config"]["Labels"]["com.docker.compose.service"]: container for container in found}


@pytest.fixture(params=list(EXAMPLES))
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster, started, and removed with all that belongs to it."""
    monkeypatch.setenv("PYPS_LEASE_SECONDS", "6")
    monkeypatch.setenv("DIGITS_EPOCHS", "1000000")
    cluster = Cluster(request.param)
    try:
        cluster.compose("--profile", "standby", "up", "-d")
        yield cluster
        print(cluster.compose("logs", "--no-color"))
    finally:
        cluster.compose("--profile", "standby", "down", "--volumes", "--remove-orphans")


def test_the_others_finish_after_containers_of_one_worker_and_of_one_server_were_killed(cluster):
    containers = cluster.containers()
    expect_few_rights(containers)
    expected = dict.fromkeys(WORKERS, cluster.transport)

    def said() -> dict[str, Any]:
        answer = completed("docker", "exec", containers["server-0"]["Id"], "pyps", "status", "--json")
        return dict(json.loads(answer.stdout)["servers"][0])

    def version() -> int:
        return int(said()["status"].get("versionMax", 0))

    def training_by_all() -> bool:
        transports = {worker["workerId"]: worker.get("transport") for worker in said()["workers"]}
        return version() >= 50 and transports == expected

    wait_until(training_by_all, TRAINING_SECONDS, f"training by three workers that all use {cluster.transport}")
    if cluster.transport != "shm":
        expect_refusals(containers["server-1"]["Id"])

    def standby_says(*words: str) -> bool:
        said = cluster.compose("logs", "--no-color", "standby-1")
        return all(each in said for each in words)

    wait_until(lambda: standby_says("all shards are here"), TRAINING_SECONDS, "a standby that follows")
    cluster.compose("kill", "-s", "SIGKILL", "server-1")
    # It counts the workers that have joined it, and ends with the last of three.
    joined = [f"worker joined worker={name}" for name in WORKERS]
    wait_until(lambda: standby_says(*joined), TRAINING_SECONDS, "all workers' going on with the standby")
    cluster.compose("kill", "-s", "SIGKILL", "worker-2")
    # Far enough for the accuracy, too.
    enough = version() + 1500
    wait_until(lambda: version() >= enough, TRAINING_SECONDS, "the others' going on")
    assert completed("docker", "exec", containers["server-0"]["Id"], "pyps", "stop").returncode == 0
    ids = [containers[service]["Id"] for service in SERVERS + STANDBYS + WORKERS]
    ended = completed("docker", "wait", *ids, seconds=TRAINING_SECONDS)
    assert ended.stdout.split() == ["0", "137", "0", "0", "0", "0", "137"]
    logs = cluster.compose("logs", "--no-color")
    assert logs.count("held-out accuracy 0.9") == 2
    assert logs.count("worker shares its memory") == (9 if cluster.transport == "shm" else 0)


def expect_few_rights(containers: dict[str, Any]) -> None:
    """Who makes the keys alone is root, and reaches nobody; each other has its own keys and cannot change them."""
    for service, container in containers.items():
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        if service == "certs":
            assert host["NetworkMode"] == "none"
            continue
        assert container["Config"]["User"] == "pyps" and not host["CapAdd"], service
        keys = [mount for mount in container["Mounts"] if "keys" in mount["Name"]]
        assert [(mount["Name"].partition("_")[2], mount["RW"]) for mount in keys] == [(f"keys-{service}", False)]


def expect_refusals(container: str) -> None:
    shown = json.dumps([each for each, _ in REFUSED])
    done = completed("docker", "exec", container, "python", "-c", JOIN, shown, seconds=TRAINING_SECONDS)
    answers = done.stdout.splitlines()
    assert len(answers) == len(REFUSED), f"{done.stdout}\n{done.stderr}"
    for answer, (each, words) in zip(answers, REFUSED, strict=True):
        assert words in answer, each


def test_every_compose_of_this_machine_reads_the_files():
    # Asked here, not when tests are collected: the engine's script may have installed it since.
    commands = compose_commands()
    assert commands
    for compose, example, profile in product(
        commands, EXAMPLES.values(), ((), ("--profile", "inspect"), ("--profile", "standby"), ("--profile", "observe"))
    ):
        read = run(*compose, *example, *profile, "config")
        assert "worker-2" in read
        assert ("/run/pyps" in read) == (example is EXAMPLES["shm"])
