"""`pyps.ray.run`: a job on a Ray cluster; servers and workers are actors, which Ray places and restarts."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import signal
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
    *("expected_workers", "run_id", "checkpoint_dir", "resume", "standby_of", "standby_lease_seconds"),
}
# The file with a server's address, in its folder for checkpoints.
ADDRESS = "address"
_GUARDS = {"token_file", "tls_cert", "insecure"}
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass(frozen=True)
class Plan:
    """A job, checked before anything is started."""

    num_servers: int
    num_workers: int
    # The resources of each actor, the servers first.
    bundles: list[dict[str, float]]
    max_restarts: int
    run_id: str
    # The caller's PYPS_ variables, the servers' own variables, and the configuration that both make.
    environment: dict[str, str]
    settings: dict[str, str]
    config: ServerConfig

    def folder(self, server: str) -> Path | None:
        """Return a server's folder for checkpoints, as every node sees it."""
        return self.config.checkpoint_dir / server if self.config.checkpoint_dir else None


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
    if settings.pop("standby", False) or "standby_of" in settings:
        raise ConfigError(
            "servers on Ray have no standby: Ray starts a server that died again, from its newest checkpoint "
            "(checkpoint_dir), and workers send again what that lacks"
        )
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
        bundles=[_bundle("server_resources", server_resources)] * servers + [_bundle("resources", resources)] * workers,
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
        self._servers: list[Any] = []
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
        restarts = -1 if plan.config.checkpoint_dir else 0
        bounds = {"max_restarts": restarts, "max_task_retries": -1, "max_concurrency": 3}
        for index in range(plan.num_servers):
            self._servers.append(self._actor(Server, index, **bounds).remote(index, plan, guard))
        served = [_get(server.address.remote()) for server in self._servers]
        for index in range(plan.num_servers):
            self._watch(index)
        self._log_addresses(served, guard)
        for index in range(plan.num_workers):
            # Ray counts each attempt to reach a restarting worker as a retry: only restarts are bounded.
            bounds = {"max_restarts": plan.max_restarts, "max_task_retries": -1}
            worker = self._actor(Worker, plan.num_servers + index, **bounds).remote(index, plan, guard)
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
        first = self._plan.num_servers
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

    def _server_ended(self, index: int, ref: Any) -> None:
        try:
            ray.get(ref)
            logger.warning("server-%d has ended by its settings", index)
        except RayActorError as error:
            if not self._plan.config.checkpoint_dir:
                raise JobError(
                    f"server-{index} died, and the run cannot go on without its shards ({_first_line(error)}). The "
                    "model was not kept: give checkpoint_dir, a folder that all nodes see."
                ) from None
            logger.warning("server-%d died: Ray restarts it, from its newest checkpoint", index)
            self._pending[self._servers[index].address.remote()] = partial(self._came_back, index)

    def _came_back(self, index: int, ref: Any) -> None:
        served = _get(ref)
        self._watch(index)
        logger.warning("server-%d is back at %s", index, served["data"])

    def end(self) -> list[str]:
        """End the actors, servers by SIGTERM, at which they save; return what went wrong."""
        for worker in self._workers:
            ray.kill(worker)
        seconds, problems = self._plan.config.drain_seconds + STOP_SPARE_SECONDS, []
        ends = [server.stop.options(max_task_retries=0).remote(seconds) for server in self._servers]
        try:
            for index, stopped in enumerate(ends):
                try:
                    if status := ray.get(stopped, timeout=seconds + STOP_SPARE_SECONDS):
                        problems.append(f"server-{index} ended with status {status}")
                except (RayActorError, GetTimeoutError) as error:
                    problems.append(f"server-{index}: {_first_line(error)}")
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
    """The actor of a server: a process of `pyps serve`, whose end is the actor's."""

    def __init__(self, index: int, plan: Plan, guard: Mapping[str, bytes]) -> None:
        self._name = f"server-{index}"
        self._folder = tempfile.TemporaryDirectory(prefix=f"pyps-{self._name}-")
        self._ready = Path(self._folder.name) / "ready"
        self._served: dict[str, Any] = {}
        self._ended = threading.Event()
        self._stopping = False
        self._child: ChildProcess | None = None
        # Raised by `address`: for an error in a constructor Ray prints a trace.
        self._failure = self._start(plan, guard)
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

    def _start(self, plan: Plan, guard: Mapping[str, bytes]) -> str:
        """Start the server; return why it does not serve, "" if it does."""
        host, own = ray.util.get_node_ip_address(), plan.folder(self._name)
        # Ray's own property reads a deprecated one.
        with warnings.catch_warnings(action="ignore"):
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        if again and own and (not own.is_dir() or newest(own) is None):
            return (
                f"{self._name} was restarted on {host}, where {own} holds no checkpoint: name a folder that all nodes "
                "see, or have the first checkpoint written sooner (checkpoint_seconds)"
            )
        flags = ["--host", host, *own_flags(plan.config, self._name, self._ready), *self._guarded(host, guard)]
        flags += ["--resume"] if own and again else []
        self._child = ChildProcess(
            self._name,
            [*PYPS, "serve", *flags],
            environment={"PYTHONUNBUFFERED": "1", **os.environ, **plan.environment, **plan.settings},
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
        if own:
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
        served = ray.get([server.address.remote() for server in servers])
        environment = os.environ | self._plan.environment
        if self._guard:
            environment["PYPS_TLS_CA"] = _in_memory(self._guard["ca.crt"])
            environment["PYPS_TOKEN"] = self._guard["token"].decode()
        os.environ |= worker_environment(
            environment,
            index=self._index,
            count=self._plan.num_workers,
            data_addresses=[self._place(index, server["data"]) for index, server in enumerate(served)],
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

    def _place(self, index: int, address: str) -> str:
        """Return a server's place: its file, if this node sees that, else its address."""
        folder = self._plan.folder(f"server-{index}")
        shared = folder and (folder / ADDRESS).is_file() and (folder / ADDRESS).read_text(encoding="utf-8") == address
        return f"file:{folder}/{ADDRESS}" if shared else address


def _print(name: str, line: str) -> None:
    print(line, flush=True)
