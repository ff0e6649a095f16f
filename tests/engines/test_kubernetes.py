"""deploy/kubernetes: rendered, held against the API's schemas and pyps' own settings, and its pods run, as they are
written, by a Docker engine; with every command of docs/kubernetes.md.

Needs kubectl; pods need root and a Docker engine, or DOCKER_ENGINE naming a script whose `up` starts one. There are no
controllers: what these do to pods, the tests do.
"""

import base64
import json
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from environments import completed, require_engine, run
from pyps.certificates import describe
from pyps.config import ServerConfig, resolve, unknown_variables
from pyps_client import Launch
from support import ROOT, wait_until

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

# A cold build of the images downloads and compiles.
BUILD_SECONDS = 900
pytestmark = [
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed"),
    pytest.mark.timeout(BUILD_SECONDS + 300),
]

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
BLOCKS = PAGE.split("```")[1::2]
IMAGES, KEYS, START, LOOK, KEEP, START_JOBSET, KEEP_JOBSET = (text[1:] for text in BLOCKS if text.startswith("\n"))
[OVERLAY] = (text.removeprefix("yaml\n") for text in BLOCKS if text.startswith("yaml\n"))
INLINE = [line for line in re.findall(r"`(kubectl [^`\n]+)`", PAGE) if line != "kubectl exec"]
VARIANTS = ("base", "jobset", "mine")
FOLLOWED = "components: [../standby]"
assert f"`{FOLLOWED}`" in PAGE
OLDEST = "1.29"
# Of a worker in the tests, which go on until they have seen what they are about, and then stop the run.
EPOCHS = 10**6
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
JOB = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "of-a-jobset"}}

Object = dict[str, Any]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/ with the page's example, and the keys that its commands make."""
    clone = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("mine", "*.crt", "*.key", "*.token")
    shutil.copytree(ROOT / "deploy", clone / "deploy", ignore=ignored)
    run("bash", "-euc", KEYS, folder=clone)
    mine = clone / "deploy/kubernetes/mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(OVERLAY, encoding="utf-8")
    followed = clone / "deploy/kubernetes/followed"
    followed.mkdir()
    (followed / "kustomization.yaml").write_text(f"{OVERLAY}{FOLLOWED}\n", encoding="utf-8")
    return clone


def render(folder: Path) -> list[Object]:
    return list(yaml.safe_load_all(run("kubectl", "kustomize", str(folder))))


def read(path: Path) -> Object:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Pod:
    """A pod as its controller would make it, with the address by which others reach it, if any do."""

    host: str
    address: str
    index: int
    template: Object

    def __getitem__(self, name: str) -> Any:
        return self.template["spec"][name]

    @property
    def container(self) -> Object:
        return dict(self["containers"][0])


def pods_of(objects: list[Object]) -> Iterator[Pod]:
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Pod":
            yield Pod(name, "", 0, one)
        for i in range(spec.get("replicas", 0)):
            yield Pod(f"{name}-{i}", f"{name}-{i}.{spec['serviceName']}", i, spec["template"])
        for i in range(spec.get("completions", 0)):
            yield Pod(f"{name}-{i}", "", i, spec["template"])
        for job in spec.get("replicatedJobs", ()):
            for i in range(job["template"]["spec"]["completions"]):
                host = f"{name}-{job['name']}-0-{i}"
                yield Pod(host, f"{host}.{name}", i, job["template"]["spec"]["template"])


def find(objects: list[Object], kind: str, name: str) -> Object:
    [one] = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


def environment(objects: list[Object], pod: Pod) -> dict[str, str]:
    """The variables that the kubelet would set."""
    variables: dict[str, str] = {}
    for source in pod.container.get("envFrom", ()):
        variables |= find(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in pod.container.get("env", ()):
        match variable["valueFrom"]:
            case {"fieldRef": {"fieldPath": path}} if path == INDEX:
                variables[variable["name"]] = str(pod.index)
            case {"resourceFieldRef": {"resource": "requests.cpu"}}:
                variables[variable["name"]] = str(math.ceil(float(pod.container["resources"]["requests"]["cpu"])))
            case unknown:
                raise AssertionError(unknown)
    return variables


@pytest.mark.parametrize("variant", [*VARIANTS, "followed"])
def test_every_manifest_is_one_by_the_schemas_of_kubernetes_and_of_jobset(clone, variant):
    jobset = clone / "deploy/kubernetes/jobset"
    newest = ".".join(kubernetes_validate.latest_version().split(".")[:2])
    for one in [*render(jobset.parent / variant), read(jobset / "export.yaml")]:
        parts = [one]
        if one["kind"] == "JobSet":
            jsonschema.validate(one, read(jobset / "schema.yaml"))
            parts = [JOB | {"spec": job["template"]["spec"]} for job in one["spec"]["replicatedJobs"]]
        for part in parts:
            for version in (OLDEST, newest):
                kubernetes_validate.validate(part, version, strict=True)
    assert f"Kubernetes {OLDEST} and {newest}" in PAGE


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_numbers_keys_and_ports_are_those_of_pyps_and_of_each_other(clone, variant):
    folder = clone / "deploy/kubernetes"
    objects = render(folder / variant)
    pods = list(pods_of(objects))
    servers, workers = ([pod for pod in pods if pod.container["name"] == name] for name in ("server", "worker"))
    addresses = [pod.address for pod in servers]
    assert {*addresses} <= {*describe(folder / "common/keys/server.crt").names}
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    ports = {port["name"]: port["containerPort"] for port in servers[0].container["ports"]}
    assert f"\nEXPOSE {' '.join(map(str, ports.values()))}\n" in dockerfile
    of_config = [ServerConfig.port, ServerConfig.control_port, ServerConfig.metrics_port]
    assert [ports[name] for name in ("data", "control", "metrics")] == of_config

    for pod in pods:
        variables, volumes = environment(objects, pod), {each["name"]: each for each in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in pod.container["volumeMounts"]}
        assert not volumes
        keys = find(objects, "Secret", mounts["/keys"]["secret"]["secretName"])["data"]
        assert {value for value in variables.values() if "/keys/" in value} == {f"/keys/{key}" for key in keys}
        assert f"useradd --uid {pod['securityContext']['runAsUser']} " in dockerfile
        assert variables["PYPS_SERVERS"] == ",".join(addresses)
    for pod in servers:
        config = resolve({"checkpoint_dir": "/data"}, environment(objects, pod), warn=pytest.fail)
        assert config.expected_workers == len(workers)
        assert config.exit_when == ("finished" if variant == "jobset" else "never")
        assert config.drain_seconds < pod["terminationGracePeriodSeconds"]
        # Where PYPS_SERVERS names all of them, the death of one would else end the others.
        for probe in (pod.container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")):
            assert probe["exec"]["command"] == ["pyps", "health", "--servers", f"127.0.0.1:{ports['data']}"]
    for index, pod in enumerate(workers):
        launch = Launch(environment=environment(objects, pod) | {"PYPS_TOKEN_FILE": ""})
        assert (launch.worker_index, launch.worker_count, launch.run_id) == (index, len(workers), config.run_id)
        assert [*unknown_variables(environment(objects, pod))] == []
    for one in objects:
        if selector := one.get("spec", {}).get("selector"):
            chosen = selector.get("matchLabels", selector).items()
            assert [pod for pod in pods if chosen <= pod.template["metadata"]["labels"].items()] == servers
        if one["kind"] == "Service":
            assert {port["name"]: port["port"] for port in one["spec"]["ports"]} == ports


def test_each_server_has_a_standby_where_that_is_said_and_follows_one_that_serves_in_its_place(clone, tmp_path):
    objects = render(clone / "deploy/kubernetes/followed")
    servers, standbys = (
        [pod for pod in pods_of(objects) if pod.host.startswith(name)] for name in ("pyps-server", "pyps-standby")
    )
    names = describe(clone / "deploy/kubernetes/common/keys/server.crt").names
    (tmp_path / "pyps").write_text('#!/bin/sh\n[ $1 = serve ] && echo "$*" || echo "$SAID"\n', encoding="utf-8")
    (tmp_path / "pyps").chmod(0o700)

    def follows(pod: Pod, said: str) -> str:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": pod.host, "SAID": said}
        done = subprocess.run(pod.container["command"], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.rpartition(f"--checkpoint-dir /data/server-{pod.index}")[2].strip()

    for server, standby in zip(servers, standbys, strict=True):
        assert {server.address, standby.address} <= {*names}
        assert server.container == standby.container and server["affinity"] == standby["affinity"]
        for said in ("RUN_STATE_READY", "RUN_STATE_DRAINING"):
            assert follows(standby, said) == f"--standby-of {server.address}:7610"
        assert follows(server, "RUN_STATE_DRAINING") == ""
        assert follows(server, "RUN_STATE_READY") == f"--standby-of {standby.address}:7610"


def test_kubectl_understands_every_command_of_the_page(clone):
    shown = "".join((START, LOOK, KEEP, START_JOBSET, KEEP_JOBSET)).splitlines()
    assert len(INLINE) >= 4
    for line in [*shown, *INLINE]:
        _, *arguments = shlex.split(line.partition(" >")[0])
        # Where nobody answers: kubectl complains of that alone.
        nobody = ("--kubeconfig=/dev/null", "--server=http://127.0.0.1:1")
        done = completed("kubectl", *nobody, *arguments, folder=clone)
        assert "refused" in done.stderr, f"{line}: {done.stderr}"


@pytest.fixture(scope="module")
def engine() -> None:
    """A running engine with the page's images."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a volume to the pods' group")
    require_engine(BUILD_SECONDS)
    command = shlex.split(IMAGES)
    if completed("docker", "compose", "version").returncode != 0:
        command[:2] = ["docker-compose"]
    run(*command, seconds=BUILD_SECONDS)


class Cluster:
    """Pods as containers on a network of their own, and kubectl's commands for them."""

    def __init__(self, clone: Path, folder: Path) -> None:
        self.folder = folder
        self._name, self._clone = f"pyps-test-{os.getpid()}", clone
        self._objects: list[Object] = []
        run("docker", "network", "create", self._name)

    def do(self, lines: str) -> None:
        for line in lines.splitlines():
            match line.split():
                case ["kubectl", "apply", flag, path]:
                    new = render(self._clone / path) if flag == "-k" else [read(self._clone / path)]
                    self._objects += new
                    for pod in pods_of(new):
                        self.start(pod.host)
                case ["kubectl", "delete", "-k", _]:
                    self.docker("stop", *(pod.host for pod in pods_of(self._objects)))
                case ["kubectl", "exec", host, "--", *_]:
                    inside = line.replace(f"kubectl exec {host} --", f"docker exec {self._name}-{host}")
                    run("bash", "-euc", inside, folder=self.folder)
                case _:
                    raise AssertionError(f"nobody here does {line}")

    def start(self, host: str) -> None:
        """Run a pod with its user, rights and volumes, which it keeps when it is started again."""
        pod = self._pod(host)
        rights, of_pod = pod.container["securityContext"], pod["securityContext"]
        assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
        flags = ["--read-only", "--security-opt=no-new-privileges", f"--group-add={of_pod['fsGroup']}"]
        flags += [f"--user={of_pod['runAsUser']}:{of_pod['runAsGroup']}", f"--hostname={host}"]
        flags += [f"--cap-drop={right}" for right in rights["capabilities"]["drop"]]
        flags += [f"--network={self._name}", f"--label={self._name}"]
        flags += [f"--network-alias={pod.address}"] if pod.address else []
        flags += [f"--env={name}={value}" for name, value in environment(self._objects, pod).items()]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in pod.container["volumeMounts"]:
            path, volume = mount["mountPath"], volumes[mount["name"]]
            mode = "ro" if mount.get("readOnly") else "rw"
            folder = self._volume(volume, pod)
            flags += [f"--volume={folder}:{path}:{mode}" if folder else f"--tmpfs={path}"]
        completed("docker", "rm", "-f", f"{self._name}-{host}")
        command = pod.container["command"]
        run("docker", "run", "-d", f"--name={self._name}-{host}", *flags, pod.container["image"], *command)

    def _volume(self, volume: Object, pod: Pod) -> Path | None:
        """A folder as the kubelet mounts it, root's and the pods' group's; None for an empty one."""
        if "emptyDir" in volume:
            return None
        secret, group, claim = volume.get("secret"), pod["securityContext"]["fsGroup"], "claim"
        if any(one["kind"] == "StatefulSet" for one in self._objects):
            claim = f"claim-{pod.host}"
        folder = self.folder / (f"{secret['secretName']}-keys" if secret else claim)
        if folder.exists():
            return folder
        folder.mkdir()
        for key, text in find(self._objects, "Secret", secret["secretName"])["data"].items() if secret else ():
            (folder / key).write_bytes(base64.b64decode(text))
            (folder / key).chmod(secret["defaultMode"])
            os.chown(folder / key, 0, group)
        os.chown(folder, 0, group)
        folder.chmod(0o2770)
        return folder

    def wait_for_health(self, host: str) -> None:
        probes = [self._pod(host).container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        probing = [("docker", "exec", f"{self._name}-{host}", *probe["exec"]["command"]) for probe in probes]
        wait_until(lambda: all(completed(*each).returncode == 0 for each in probing), what=f"health of {host}")

    def wait_for_workers(self, server: str, *names: str) -> None:
        """Wait until these workers live, and every server has a checkpoint and 20 updates since it began."""

        def trained() -> bool:
            command = ("docker", "exec", f"{self._name}-{server}", "pyps", "status", "--json")
            servers = json.loads(completed(*command).stdout or "{}").get("servers", [])
            updates = [int(each.get("status", {}).get("tally", {}).get("updates", 0)) for each in servers]
            alive = {each["workerId"] for one in servers for each in one.get("workers", ()) if each["state"] == "alive"}
            saved = all(each.get("status", {}).get("checkpoint") for each in servers)
            return saved and min(updates, default=0) >= 20 and alive == {*names}

        wait_until(trained, 240, f"training by {names}")

    def stop_the_run(self, server: str) -> None:
        run("docker", "exec", f"{self._name}-{server}", "pyps", "stop")

    def docker(self, command: str, *hosts: str, form: str = "") -> list[str]:
        flags = [f"--format={form}"] if form else []
        return run("docker", command, *flags, *(f"{self._name}-{host}" for host in hosts)).split()

    def _pod(self, host: str) -> Pod:
        [pod] = [pod for pod in pods_of(self._objects) if pod.host == host]
        return pod

    def end(self) -> None:
        for container in run("docker", "ps", "-aq", "--filter", f"label={self._name}").split():
            logs = completed("docker", "logs", "--tail=40", container)
            print(logs.stdout, logs.stderr)
            run("docker", "rm", "-f", container)
        run("docker", "network", "rm", self._name)


@pytest.fixture
def cluster(engine: None, clone: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose workers and checkpoints nobody waits for long."""
    shutil.copytree(clone, tmp_path / "clone")
    common = tmp_path / "clone/deploy/kubernetes/common"
    hurry = r"s/_SECONDS=60/_SECONDS=1\nPYPS_HEARTBEAT_SECONDS=1\nPYPS_LEASE_SECONDS=4/"
    run("sed", "-i", hurry, str(common / "server.env"))
    run("sed", "-i", f's/"300"/"{EPOCHS}"/', str(common / "pods.yaml"))
    cluster = Cluster(tmp_path / "clone", tmp_path)
    try:
        yield cluster
    finally:
        cluster.end()


ADDRESS = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
NAMES = ("worker-0", "worker-1", "worker-2")


def test_workers_find_a_server_that_moved_and_one_that_was_killed_comes_again(cluster):
    servers, workers = ("pyps-server-0", "pyps-server-1"), [f"pyps-{name}" for name in NAMES]
    cluster.do(START)
    cluster.wait_for_workers(servers[0], *NAMES)
    was_at = cluster.docker("inspect", servers[1], form=ADDRESS)
    cluster.docker("kill", servers[1], workers[2])
    # The worker first: it takes an address that is free now.
    for host in (workers[2], servers[1]):
        cluster.start(host)
    assert cluster.docker("inspect", servers[1], form=ADDRESS) != was_at
    cluster.wait_for_health(servers[1])
    cluster.wait_for_workers(servers[0], *NAMES)

    cluster.stop_the_run(servers[0])
    assert cluster.docker("wait", *workers) == ["0", "0", "0"]
    cluster.do(KEEP)
    assert cluster.docker("wait", *servers) == ["0", "0"]
    assert sum(array.size for array in load_file(cluster.folder / "model.safetensors").values()) == 4810


def test_servers_of_a_jobset_come_again_after_a_drain_and_end_with_the_last_worker(cluster):
    servers, workers = ("pyps-server-0-0", "pyps-server-0-1"), [f"pyps-worker-0-{index}" for index in range(3)]
    cluster.do(START_JOBSET)
    cluster.wait_for_workers(servers[0], *NAMES)
    cluster.docker("stop", servers[1])
    # To a job anything else were the end of that server.
    assert cluster.docker("wait", servers[1]) == ["143"]
    cluster.start(servers[1])
    cluster.wait_for_workers(servers[0], *NAMES)

    cluster.stop_the_run(servers[0])
    assert cluster.docker("wait", *workers, *servers) == ["0"] * 5
    # Docker's nanoseconds are more than Python reads.
    finished = cluster.docker("inspect", *workers, *servers, form="{{.State.FinishedAt}}")
    ends = [datetime.fromisoformat(text[:26].rstrip("Z")) for text in finished]
    assert max(ends[3:]).timestamp() - max(ends[:3]).timestamp() < 10
    cluster.do(KEEP_JOBSET)
    assert sum(array.size for array in load_file(cluster.folder / "model.safetensors").values()) == 4810
