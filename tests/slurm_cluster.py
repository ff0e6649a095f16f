"""A real Slurm on this machine: a controller and nodes, each in namespaces of its own, as machines in one network."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support import child_environment, wait_until

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
HEAD = "head"
CONFIGURATION = """\
ClusterName=pyps
SlurmctldHost=head
SlurmUser=root
# The latter is also how long a job that was put back waits.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n.spool
# Slurm checks nodes three times as often, and only then schedules jobs that wait.
SlurmdTimeout=15
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={nodes} CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=9
"""
# Enough for Slurm to hand out as GPUs.
DEVICES = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


def why_not() -> str:
    lacking = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "only root may make networks and start jobs of others: run these tests as root, in a container for one"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Machine:
    """Namespaces of one machine: its network, name, mounts and processes, which all end with the first of them."""

    def __init__(self, name: str, hosts: Path) -> None:
        # The first process reads a pipe of ours: however the tests end, the machine does too.
        script = f"hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up && echo up && exec cat"
        self._unshare = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": PATH},
        )
        assert self._unshare.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.pid = int(children.read_text(encoding="utf-8"))

    def ip(self, command: str) -> None:
        subprocess.run([*self.inside("--net"), "ip", *command.split()], check=True, env={"PATH": PATH})

    def inside(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *(namespaces or ("--net", "--uts", "--mount", "--pid")), "--"]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._unshare.communicate()


class Cluster:
    """A controller and nodes `node0`, `node1` and so on, on one file system; users' commands run on the controller."""

    def __init__(self, num_nodes: int) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="pyps-slurm-")
        self.folder = Path(self._temporary.name)
        self._nodes = [f"node{index}" for index in range(num_nodes)]
        self._addresses = {name: f"10.77.0.{index}" for index, name in enumerate([HEAD, *self._nodes], start=1)}
        self._hosts = self.folder / "hosts"
        names = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        self._hosts.write_text("\n".join(names) + "\n", encoding="utf-8")
        configuration = CONFIGURATION.format(folder=self.folder, nodes=",".join(self._nodes))
        (self.folder / "slurm.conf").write_text(configuration, encoding="utf-8")
        (self.folder / "gres.conf").write_text(DEVICES, encoding="utf-8")
        settings = {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf"), "VIRTUAL_ENV": "as if it were active"}
        self._environment = child_environment(settings)
        self._machines: dict[str, Machine] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start_head()
            for name in self._nodes:
                self.boot(name)
            self.wait_until_idle()
        except BaseException:
            self.close()
            raise

    def run(self, command: str, *, on: str = HEAD, cwd: Path | None = None, **environment: str) -> str:
        """What a line of bash says, as of a user who is logged in there; fails where it does."""
        entered = [*self._machines[on].inside(), "bash", "-c", f"cd '{cwd or self.folder}' && {command}"]
        env = self._environment | environment
        done = subprocess.run(entered, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command} on {on} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def state_of(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, the servers' component of one with several."""
        [described, *_] = self.run(f"scontrol show job {job}").split("\n\n")
        return dict(re.findall(r"(\S+?)=(\S*)", described))

    def wait_until_idle(self) -> None:
        states = "sinfo --noheader --Node --partition=all --format=%t"
        wait_until(lambda: self.run(states).split() == ["idle"] * len(self._nodes), what="all nodes being idle")

    def boot(self, name: str) -> None:
        node, head = Machine(name, self._hosts), self._machines[HEAD]
        self._machines[name] = node
        # A card keeps its number, by which others know the node, when the node is started again.
        card = f"02:00:00:00:00:{self._nodes.index(name):02x}"
        head.ip(f"link add {name} type veth peer name eth0 address {card} netns {node.pid}")
        head.ip(f"link set {name} master bridge up")
        node.ip(f"address add {self._addresses[name]}/24 dev eth0")
        node.ip("link set eth0 up")
        self._start(name, "slurmd", "-D")

    def cut_power(self, name: str) -> None:
        """Take a node away, and report it to Slurm, which would notice it after SlurmdTimeout."""
        self._machines[HEAD].ip(f"link delete {name}")
        self._machines.pop(name).end()
        self.run(f"scontrol update nodename={name} state=down reason=silent")

    def _start_head(self) -> None:
        head = self._machines[HEAD] = Machine(HEAD, self._hosts)
        head.ip("link add bridge type bridge")
        head.ip(f"address add {self._addresses[HEAD]}/24 dev bridge")
        head.ip("link set bridge up")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        socket = self.folder / "munge.socket"
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
        self._start(HEAD, "munged", "--foreground", "--force", f"--socket={socket}", *files)
        wait_until(socket.exists, what="munged's socket")
        self._start(HEAD, "slurmctld", "-D")
        wait_until(lambda: "is UP" in self.run("scontrol ping || true"), what="slurmctld's answer")

    def _start(self, name: str, *command: str) -> None:
        entered = [*self._machines[name].inside(), *command]
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            started = subprocess.Popen(
                entered, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        self._daemons.append(started)

    def close(self) -> None:
        for machine in self._machines.values():
            machine.end()
        for daemon in self._daemons:
            daemon.wait()
        self._temporary.cleanup()
