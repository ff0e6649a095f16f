"""`pyps.ray.run`: a job on a Ray cluster; servers and workers are actors, which Ray places and restarts."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyps.certificates import Authority
from pyps.config import ConfigError, ServerConfig, variable_name
from pyps.launcher.environment import START_SECONDS, check_job, own_flags, worker_environment, worker_name
from pyps.launcher.job import PYPS, STOP_SPARE_SECONDS, JobError
from pyps.launcher.process import ChildProcess
from pyps.run import handshake
from pyps.storage.folder import newest
from pyps.storage.object_store import is_remote
from pyps_client import leave

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(f"pyps.ray needs Ray ({error}): pip install '.[ray]' in a clone of pyps") from error

__all__ = ["run"]

T = TypeVar("T")
logger = logging.getLogger("pyps.ray")

# How long Ray may look for room, and how often that is logged.
PLACE_SECONDS, LOG_SECONDS = 1800.0, 10.0
# How long the job waits for workers whose nodes are gone, once all others have finished.
LOST_SECONDS = 60.0
# Settings that the job makes itself, or has an argument for.
_NO_SETTINGS = {
    *("host", "port", "control_port", "metrics_port", "ready_file"),
    *("expected_workers", "run_id", "checkpoint_dir", "resume", "standby_of"),
}
# The file with a server's address, in its folder for checkpoints.
ADDRESS = "address"
# How often a worker's node asks whether a standby goes on in its server's place.
FOLLOW_SECONDS = 1.0
# How long a server may take, beyond the lease, to miss a standby that died.
GO_ON_SECONDS = 10.0
_GUARDS = {"token_file", "tls_cert", "insecure"}
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True)
class Plan:
    """A job, checked before anything is started."""

    num_servers: int
    num_workers: int
    # Whether each server has a standby.
    standby: bool
    # The resources of each actor: the servers, their standbys, then the workers.
    bundles: list[dict[str, float]]
    max_restarts: int
    run_id: str
    # The caller's PYPS_ variables, the servers' own variables, and the configuration that both make.
    environment: dict[str, str]
    settings: dict[str, str]
    config: ServerConfig

    def folder(self, index: int) -> Path | None:
        """Return the folder of a server and its standby for checkpoints, as every node sees it."""
        return self.config.checkpoint_dir / f"server-{index}" if self.config.checkpoint_dir else None


def run(
    train_fn: Callable[[], T],
    *,
    servers: int = 1,
    workers: int = 1,
    resources: Mapping[str, float] | None = None,
    server_resources: Mapping[str, float] | None = None,
    max_restarts: int = 3,
    run_id: str = "",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    standby: bool = False,
    **settings: object,
) -> list[T | None]:
    """Train on a Ray cluster; return the results of `train_fn` by the workers' numbers.

    Args:
        train_fn: Called without arguments in each worker's process, where `RemoteOptimizer` finds its servers by
            itself. An exception from it ends the job, and is raised here.
        servers: How many servers to start.
        workers: How many workers to start.
        resources: What Ray keeps for each worker; {"CPU": 1} by default.
        server_resources: What Ray keeps for each server; {"CPU": 1} by default.
        max_restarts: How often Ray restarts a worker whose process or node died; -1 for no limit. The result is None
            for one that died more often, or for which Ray has no room once all others have finished.
        run_id: The run's name; "" makes one.
        checkpoint_dir: A folder that all nodes see, for checkpoints, one inside it per server. Ray restarts a server
            that died, from its newest checkpoint; without a folder a server's death ends the job.
        resume: Continue the newest checkpoints.
        standby: Start a standby for each server, with the same resources, which takes over when that dies.
        **settings: Any other setting of `pyps serve` by its name.

    Raises:
        PypsError: An argument or a setting cannot be used; nothing was started.
        JobError: The job cannot go on.

    Example:
        losses = pyps.ray.run(train, workers=4, resources={"GPU": 1}, protocol="softsync:n=4")
    """
    for name, number, least in (("servers", servers, 1), ("workers", workers, 1), ("max_restarts", max_restarts, -1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigError(f"{name} is {number!r}; expected a whole number, {least} or more")
    if not isinstance(standby, bool):
        raise ConfigError(f"standby is {standby!r}; expected True or False")
    if not callable(train_fn):
        raise ConfigError(f"train_fn is {train_fn!r}; expected a function, which is called without arguments")
    try:
        cloudpickle.dumps(train_fn)
    except Exception as error:
        raise ConfigError(f"train_fn cannot be sent to workers: {_first_line(error)}") from None
    handshake.check_name(run_id, what="run_id")
    if run_id != run_id.strip():
        raise ConfigError(f"run_id is {run_id!r}; expected a name without spaces around it")
    if checkpoint_dir is None:
        checkpoint_dir = os.environ.get(variable_name("checkpoint_dir")) or None
    if checkpoint_dir is not None:
        if not (isinstance(checkpoint_dir, str | os.PathLike) and str(checkpoint_dir)):
            raise ConfigError(f"checkpoint_dir is {checkpoint_dir!r}; expected a folder's path")
        # Where servers leave their addresses, too.
        if is_remote(Path(checkpoint_dir)):
            raise ConfigError(f"checkpoint_dir is {checkpoint_dir!r}; expected a folder that all nodes see, no URL")
        # Actors have other working directories.
        checkpoint_dir = Path(checkpoint_dir).expanduser().absolute()
    known = {field.name for field in fields(ServerConfig)} - _NO_SETTINGS
    if unknown := settings.keys() - known:
        raise ConfigError(
            f"there is no setting {min(unknown)!r} for servers on Ray; there are {', '.join(sorted(known))}"
        )
    if settings.get("init_from"):
        settings["init_from"] = Path(str(settings["init_from"])).expanduser().absolute()
    settings |= {"expected_workers": workers, "checkpoint_dir": checkpoint_dir, "resume": resume or None}
    given = {name: str(value) for name, value in settings.items() if value not in (None, "")}
    config = check_job(given, num_servers=servers, num_workers=workers)
    ours = {name for name in os.environ if name.startswith("PYPS_")} - {*map(variable_name, _NO_SETTINGS)}
    run_name = run_id or f"run-{secrets.token_hex(4)}"
    given |= {"resume": "true"} if config.resume else {}
    # Without a name, servers that resume take the run of their checkpoints.
    given |= {"run_id": run_name} if run_id or not config.resume else {}
    plan = Plan(
        num_servers=servers,
        num_workers=workers,
        standby=standby,
        bundles=[
            *[_bundle("server_resources", server_resources)] * (servers * (2 if standby else 1)),
            *[_bundle("resources", resources)] * workers,
        ],
        max_restarts=max_restarts,
        run_id=run_name,
        environment={name: os.environ[name] for name in ours},
        settings={variable_name(name): value for name, value in given.items()},
        config=config,
    )
    if not ray.is_initialized():
        ray.init()
    job = Job(plan)
    try:
        results = job.results(train_fn)
    finally:
        problems = job.end()
    if config.checkpoint_dir:
        if problems:
            raise JobError(f"the model's last state may not be kept: {'; '.join(problems)}")
        logger.info("the model was kept: pyps export model.safetensors --checkpoint %s", config.checkpoint_dir)
    return results


def _bundle(name: str, resources: Mapping[str, float] | None) -> dict[str, float]:
    if not isinstance(resources, Mapping | None):
        raise ConfigError(f"{name} is {resources!r}; expected names and numbers, as in {{'GPU': 1}}")
    bundle = dict(resources or {"CPU": 1})
    for resource, amount in bundle.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < float("inf"):
            raise ConfigError(f"{name} has {amount!r} of {resource!r}; expected a number above 0, as in {{'GPU': 1}}")
    return bundle


class Job:
    """A job's actors, until `end`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._placement: Any = None
        # The servers, then their standbys, and which of them are dead for good.
        self._servers: list[Any] = []
        self._dead: set[int] = set()
        self._control: list[str] = []
        self._workers: list[Any] = []
        # Calls of actors in progress, and the handler of each.
        self._pending: dict[Any, Callable[[Any], None]] = {}
        self._training: set[int] = set()
        self._results: dict[int, Any] = {}
        # Paths of the files that `pyps status` needs, by their variables.
        self._shown: dict[str, str] = {}

    def results(self, train_fn: Callable[[], T]) -> list[T | None]:
        """Start servers and workers; return the workers' results once all have ended."""
        plan = self._plan
        self._place()
        guard = self._guard()
        for _ in range(2 if plan.standby else 1):
            first = len(self._servers)
            for index in range(plan.num_servers):
                restarts = -1 if self._may_restart(first + index) else 0
                bounds = {"max_restarts": restarts, "max_task_retries": -1, "max_concurrency": 4}
                actor = self._actor(Server, first + index, **bounds)
                self._servers.append(actor.remote(index, plan, guard, self._servers[index] if first else None))
            served = [_get(server.address.remote()) for server in self._servers]
        for index in range(len(self._servers)):
            self._watch(index)
        self._control = [server["control"] for server in served]
        self._log_addresses(served[: plan.num_servers], guard)
        for index in range(plan.num_workers):
            # Ray counts each attempt to reach a restarting worker as a retry: only restarts are bounded.
            bounds = {"max_restarts": plan.max_restarts, "max_task_retries": -1}
            worker = self._actor(Worker, len(self._servers) + index, **bounds).remote(index, plan, guard)
            self._workers.append(worker)
            self._training.add(index)
            result = worker.train.remote(train_fn, self._servers, secrets.token_hex(16))
            self._pending[result] = partial(self._trained, index)
        self._wait()
        return [self._results.get(index) for index in range(plan.num_workers)]

    def _actor(self, kind: Any, bundle: int, **options: Any) -> Any:
        kept = self._plan.bundles[bundle]
        options |= {"num_cpus": 0} | {option: kept[name] for name, option in _OPTIONS.items() if name in kept}
        options["resources"] = {name: amount for name, amount in kept.items() if name not in _OPTIONS}
        place = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        return ray.remote(kind).options(scheduling_strategy=place, **options)

    def _place(self) -> None:
        # Servers on one node would share its bandwidth.
        self._placement = placement_group(self._plan.bundles, strategy="SPREAD")
        deadline = time.monotonic() + PLACE_SECONDS
        while not self._placement.wait(timeout_seconds=LOG_SECONDS):
            wanted = f"{self._plan.bundles}; free are {ray.available_resources()}"
            logger.warning("waiting for room for %s", wanted)
            if time.monotonic() > deadline:
                raise JobError(f"Ray found no room in {PLACE_SECONDS:g} s for {wanted}")

    def _guard(self) -> dict[str, bytes]:
        """Return the job's own tokens and authority, as files by their names; none if the settings name some."""
        here = ray.util.get_node_ip_address()
        if self._plan.config.given & _GUARDS or ipaddress.ip_address(here).is_loopback:
            return {}
        tokens = {name: secrets.token_hex(16).encode() for name in ("token", "operator")}
        return tokens | {name: content for name, content in _signed(here).items() if name.startswith("ca.")}

    def _log_addresses(self, served: list[dict[str, Any]], guard: Mapping[str, bytes]) -> None:
        files = {"PYPS_TLS_CA": "ca.crt", "PYPS_TOKEN_FILE": "operator"} if guard else {}
        self._shown = {name: _in_memory(guard[file]) for name, file in files.items()}
        shown = "".join(f"{name}={path} " for name, path in self._shown.items())
        scheme = "https" if guard or self._plan.config.tls_cert else "http"
        control = ",".join(server["control"] for server in served)
        logger.info("Look inside: %spyps status --servers %s", shown, control)
        logger.info("metrics: %s", " ".join(f"{scheme}://{server['metrics']}/metrics" for server in served))

    def _watch(self, index: int) -> None:
        end = self._servers[index].wait.options(max_task_retries=0).remote()
        self._pending[end] = partial(self._server_ended, index)

    def _wait(self) -> None:
        """Handle calls as they end, until no worker trains."""
        only_lost_since = None
        while self._training:
            ready, _ = ray.wait(list(self._pending), timeout=1.0)
            for ref in ready:
                self._pending.pop(ref)(ref)
            if not self._results or not self._training <= self._without_node():
                only_lost_since = None
                continue
            only_lost_since = only_lost_since or time.monotonic()
            if time.monotonic() > only_lost_since + LOST_SECONDS:
                names = ", ".join(worker_name(index, 1) for index in sorted(self._training))
                logger.warning("the job ends without %s, whose nodes died: the others have finished", names)
                self._training.clear()

    def _without_node(self) -> set[int]:
        """Return the workers whose nodes are gone, and for which Ray has found no others yet."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        places = placement_group_table(self._placement)["bundles_to_node_id"]
        first = len(self._servers)
        return {index for index in range(self._plan.num_workers) if places.get(first + index) not in alive}

    def _trained(self, index: int, ref: Any) -> None:
        self._training.discard(index)
        try:
            self._results[index] = _get(ref)
        except ActorDiedError as error:
            logger.warning("%s is lost, %d go on: %s", worker_name(index, 1), len(self._training), _first_line(error))
            if not self._training and not self._results:
                raise JobError(f"no worker finished; their last lines say why ({_first_line(error)})") from None
        else:
            # Its process holds memory, perhaps of a GPU, that others may need.
            ray.kill(self._workers[index])

    def _name(self, index: int) -> str:
        count = self._plan.num_servers
        return f"server-{index}" if index < count else f"standby-{index - count}"

    def _may_restart(self, index: int) -> bool:
        """Return whether Ray starts a server again: one with a standby would find its place taken."""
        plan = self._plan
        return plan.config.checkpoint_dir is not None and not (plan.standby and index < plan.num_servers)

    def _server_ended(self, index: int, ref: Any) -> None:
        name = self._name(index)
        try:
            ray.get(ref)
            logger.warning("%s has ended by its settings", name)
        except RayActorError as error:
            other = (index + self._plan.num_servers) % len(self._servers)
            if self._may_restart(index):
                follows = self._plan.standby and other not in self._dead
                how = f"to follow {self._name(other)}" if follows else "from its newest checkpoint"
                logger.warning("%s died: Ray restarts it, %s", name, how)
                if follows:
                    self._servers[other].go_on.remote()
                self._pending[self._servers[index].address.remote()] = partial(self._came_back, index)
                return
            if not isinstance(error, ActorDiedError):
                # Out of reach for now.
                self._watch(index)
                return
            self._dead.add(index)
            if other in self._dead:
                raise JobError(
                    f"{name} died, and the run cannot go on without its shards ({_first_line(error)}). The "
                    "model was not kept: give checkpoint_dir, a folder that all nodes see."
                ) from None
            if index > other:
                self._servers[other].go_on.remote()
            place = f"in its place at {self._control[other]}" if index < other else "without a standby"
            logger.warning("%s died: %s goes on %s", name, self._name(other), place)

    def _came_back(self, index: int, ref: Any) -> None:
        served = _get(ref)
        self._watch(index)
        logger.warning("%s is back at %s", self._name(index), served["data"])

    def end(self) -> list[str]:
        """End the actors, servers by SIGTERM, at which they save; return what went wrong."""
        for worker in self._workers:
            ray.kill(worker)
        seconds, problems = self._plan.config.drain_seconds + STOP_SPARE_SECONDS, []
        living = [index for index in range(len(self._servers)) if index not in self._dead]
        first = self._plan.num_servers
        try:
            # The standbys first: nobody is to go on.
            for part in ([i for i in living if i >= first], [i for i in living if i < first]):
                ends = [self._servers[index].stop.options(max_task_retries=0).remote(seconds) for index in part]
                for index, stopped in zip(part, ends, strict=True):
                    try:
                        if status := ray.get(stopped, timeout=seconds + STOP_SPARE_SECONDS):
                            problems.append(f"{self._name(index)} ended with status {status}")
                    except (RayActorError, GetTimeoutError) as error:
                        problems.append(f"{self._name(index)}: {_first_line(error)}")
        finally:
            if self._placement is not None:
                remove_placement_group(self._placement)
            for path in self._shown.values():
                os.close(int(Path(path).name))
        for problem in problems:
            logger.warning("%s", problem)
        return problems


def _get(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        # A refusal is a sentence, and needs no trace.
        if isinstance(error.cause, JobError):
            raise error.cause from None
        raise


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _signed(host: str, **authority: bytes) -> dict[str, bytes]:
    """Return the files of an authority, new if none is given, and of a server's certificate that it signed."""
    with tempfile.TemporaryDirectory(prefix="pyps-") as name:
        folder = Path(name)
        for file, content in authority.items():
            (folder / file).write_bytes(content)
        Authority(folder, create=not authority).make_server([host], days=365)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def _in_memory(content: bytes) -> str:
    """Return the path of a file in this process's memory: one on disk would outlive a killed process."""
    file = os.memfd_create("pyps")
    os.write(file, content)
    return f"/proc/{os.getpid()}/fd/{file}"


class Server:
    """The actor of a server, or of the standby of another: a process of `pyps serve`, whose end is the actor's."""

    def __init__(self, index: int, plan: Plan, guard: Mapping[str, bytes], followed: Any = None) -> None:
        self._index, self._name = index, f"standby-{index}" if followed else f"server-{index}"
        self._plan = plan
        self._folder = tempfile.TemporaryDirectory(prefix=f"pyps-{self._name}-")
        self._ready = Path(self._folder.name) / "ready"
        self._served: dict[str, Any] = {}
        self._ended = threading.Event()
        self._stopping = False
        self._child: ChildProcess | None = None
        # Raised by `address`: for an error in a constructor Ray prints a trace.
        self._failure = self._start(plan, guard, followed)
        self._folder.cleanup()

    # Ray puts it before each of the actor's lines.
    def __repr__(self) -> str:
        return self._name

    def address(self) -> dict[str, Any]:
        if self._failure:
            raise JobError(self._failure)
        return self._served

    def wait(self) -> None:
        """Return once the server has ended by its settings."""
        self._ended.wait()

    def stop(self, seconds: float) -> int | None:
        """End the server; return its status."""
        self._stopping = True
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            self._ended.wait(seconds)
        return self._child.returncode if self._child else 0

    def go_on(self) -> None:
        """Make the server, whose standby is dead, go on alone: it cannot know that this has not taken over."""
        deadline = time.monotonic() + 2 * self._plan.config.standby_lease_seconds + GO_ON_SECONDS
        command = [*PYPS, "promote", "--servers", self._served["control"]]
        # Until it has missed the standby it refuses.
        while subprocess.run(command, env=self._environment, capture_output=True).returncode:
            if self._ended.wait(FOLLOW_SECONDS) or time.monotonic() > deadline:
                return

    def _start(self, plan: Plan, guard: Mapping[str, bytes], followed: Any) -> str:
        """Start the server; return why it does not serve, "" if it does."""
        host, own = ray.util.get_node_ip_address(), plan.folder(self._index)
        # Ray's own property reads a deprecated one.
        with warnings.catch_warnings(action="ignore"):
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        primary = None
        if followed is not None:
            # Once that is dead, this one had taken over.
            with contextlib.suppress(ActorDiedError):
                primary = _get(followed.address.remote())["data"]
        again = again and primary is None
        if again and own and (not own.is_dir() or newest(own) is None):
            return (
                f"{self._name} was restarted on {host}, where {own} holds no checkpoint: name a folder that all nodes "
                "see, or have the first checkpoint written sooner (checkpoint_seconds)"
            )
        served_as = f"server-{self._index}"
        flags = ["--host", host, *own_flags(plan.config, served_as, self._ready), *self._guarded(host, guard)]
        flags += ["--resume"] if own and again else []
        flags += ["--standby-of", primary] if primary is not None else []
        self._environment = {"PYTHONUNBUFFERED": "1", **os.environ, **plan.environment, **plan.settings}
        if guard and plan.standby:
            files = {"PYPS_TLS_CA": "ca.crt", "PYPS_OPERATOR_TOKEN_FILE": "operator"}
            self._environment |= {name: _in_memory(guard[file]) for name, file in files.items()}
        self._child = ChildProcess(
            self._name,
            [*PYPS, "serve", *flags],
            environment=self._environment,
            on_line=_print,
            on_end=self._end,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.exists():
            if self._ended.wait(0.05) and again:
                # The process before may still save, and lock the folder: Ray tries again.
                time.sleep(1.0)
                self._folder.cleanup()
                os._exit(1)
            if self._ended.is_set() or time.monotonic() > deadline:
                return f"{self._name} ended, or did not serve within {START_SECONDS:g} s; its last lines say why"
        self._served = json.loads(self._ready.read_text(encoding="utf-8"))
        if again and followed is not None:
            # The folder names the standby that took over there, and that was this one.
            threading.Thread(target=self.go_on, name="pyps-go-on", daemon=True).start()
        if own and not plan.standby:
            # For workers that lost the server: replaced as a whole, before any caller gets the address.
            written = own / f".{ADDRESS}"
            written.write_text(self._served["data"], encoding="utf-8")
            written.replace(own / ADDRESS)
        return ""

    def _guarded(self, host: str, guard: Mapping[str, bytes]) -> list[str]:
        """Return the flags for the job's own tokens, and for a certificate of this host."""
        if not guard:
            return []
        guard = {**guard, **_signed(host, **{name: guard[name] for name in ("ca.crt", "ca.key")})}
        files = {"token-file": "token", "operator-token-file": "operator"}
        files |= {"tls-cert": "server.crt", "tls-key": "server.key"}
        return [f"--{flag}={_in_memory(guard[name])}" for flag, name in files.items()]

    def _end(self, child: ChildProcess) -> None:
        if child.returncode and (self._ready.exists() or self._served) and not self._stopping:
            _print("", f"{self._name} {child.how_it_ended()}")
            # Ray restarts the actor, and so the server.
            os._exit(1)
        self._ended.set()


class Worker:
    """The actor of a worker."""

    def __init__(self, index: int, plan: Plan, guard: Mapping[str, bytes]) -> None:
        self._index, self._plan, self._guard = index, plan, guard

    def __repr__(self) -> str:
        return worker_name(self._index, 1)

    def train(self, train_fn: Callable[[], T], servers: list[Any], key: str) -> T | None:
        served = self._served(servers)
        places = [self._place(index, server["data"]) for index, server in enumerate(served)]
        if self._plan.standby:
            places = [f"file:{self._followed(servers, served)}"]
        environment = os.environ | self._plan.environment
        if self._guard:
            environment["PYPS_TLS_CA"] = _in_memory(self._guard["ca.crt"])
            environment["PYPS_TOKEN"] = self._guard["token"].decode()
        os.environ |= worker_environment(
            environment,
            index=self._index,
            count=self._plan.num_workers,
            data_addresses=places,
            control_addresses=[server["control"] for server in served],
            run_id=served[0]["run_id"] or self._plan.run_id,
            key=key,
        )
        try:
            result = train_fn()
        except BaseException as error:
            leave.leave_all(error)
            if not isinstance(error, SystemExit):
                raise
            # To Ray the actor would have died.
            if error.code not in (None, 0):
                raise JobError(f"{self!r} ended by sys.exit({error.code!r})") from None
            return None
        leave.leave_all()
        return result

    def _served(self, servers: list[Any]) -> list[dict[str, Any]]:
        """Return where each server serves, or the standby in its place."""
        count = self._plan.num_servers
        served = []
        for index in range(count):
            *firsts, last = servers[index::count]
            for first in firsts:
                with contextlib.suppress(ActorDiedError):
                    served.append(ray.get(first.address.remote()))
            if len(served) == index:
                served.append(ray.get(last.address.remote()))
        return served

    def _followed(self, servers: list[Any], served: list[dict[str, Any]]) -> Path:
        """Return a file with the servers' addresses, which follows takeovers as long as this process lives."""
        self._folder = tempfile.TemporaryDirectory(prefix=f"pyps-{self!r}-")
        path = Path(self._folder.name) / "servers"

        def write(served: list[dict[str, Any]]) -> None:
            new = path.with_suffix(".new")
            new.write_text("".join(f"{server['data']}\n" for server in served), encoding="utf-8")
            new.replace(path)

        def follow(known: list[dict[str, Any]]) -> None:
            while True:
                time.sleep(FOLLOW_SECONDS)
                if (now := self._served(servers)) != known:
                    write(now)
                    known = now

        write(served)
        threading.Thread(target=follow, args=(served,), name="pyps-servers", daemon=True).start()
        return path

    def _place(self, index: int, address: str) -> str:
        """Return a server's place: its file, if this node sees that, else its address."""
        folder = self._plan.folder(index)
        shared = folder and (folder / ADDRESS).is_file() and (folder / ADDRESS).read_text(encoding="utf-8") == address
        return f"file:{folder}/{ADDRESS}" if shared else address


def _print(name: str, line: str) -> None:
    print(line, flush=True)
