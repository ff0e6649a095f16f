"""A server's settings: a frozen dataclass, filled from flags, the environment and a TOML file."""

# ruff: noqa: RUF009 - `setting` makes a dataclasses.field, which is what a default may be.

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pyps.core import protocols, schedule, spec, staleness
from pyps.core.behaviour import Behaviour
from pyps.core.bounds import Bounds
from pyps.core.rule_settings import RuleSettings
from pyps.core.schedule import BatchGrowth
from pyps.core.warmup import Staged, WarmUp
from pyps_wire.contract import CONTROL_PORT, DATA_PORT, LANE_PORT, METRICS_PORT
from pyps_wire.errors import InvalidArgument, PypsError

ENVIRONMENT_PREFIX = "PYPS_"
# Read by workers, commands and kernels; a server that inherits them must not warn of them.
OTHER_VARIABLES = (
    *("PYPS_SERVERS", "PYPS_CONTROL", "PYPS_WORKER_ID", "PYPS_WORKER_INDEX", "PYPS_WORKER_COUNT", "PYPS_WORKER_KEY"),
    *("PYPS_PARTS", "PYPS_SHARD_SIZE", "PYPS_TRANSPORT", "PYPS_GRADIENT_CODEC", "PYPS_PARAMETER_CODEC", "PYPS_ISA"),
    *("PYPS_WAIT_SECONDS", "PYPS_START_WAIT_SECONDS", "PYPS_LOSS_WAIT_SECONDS", "PYPS_PROCESS_HOOKS"),
    *("PYPS_TOKEN", "PYPS_TLS_CA", "PYPS_USE_PROXY", "PYPS_TRACEBACK", "PYPS_RESEND_BYTES_MAX"),
)
# Set by Kubernetes for each service of a namespace whose name begins with "pyps".
_OF_KUBERNETES = re.compile(r"PYPS_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)")


class ConfigError(PypsError):
    """A setting cannot be used; the text says where it is set and what was expected."""


# The least and the most.
STANDBY_LEASE_SECONDS = (0.1, 86_400.0)


def setting(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a field of the configuration."""
    metadata = {"meaning": meaning, "minimum": minimum, "maximum": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a server, which never change after its start."""

    # The names of the settings that are given; no setting itself.
    given: ClassVar[frozenset[str]] = frozenset()

    host: str = setting("127.0.0.1", "Address to listen on; beyond loopback servers need TLS and a token.")
    port: int = setting(DATA_PORT, "Port of the data plane; 0 takes a free one.", minimum=0, maximum=65535)
    control_port: int = setting(
        CONTROL_PORT, "Port of the control plane; 0 takes a free one.", minimum=0, maximum=65535
    )
    metrics_port: int = setting(METRICS_PORT, "Port of /metrics; 0 takes a free one.", minimum=0, maximum=65535)
    lane_port: str = setting(
        "auto",
        f"Port of the lane, for large messages: a number (0 takes a free one), off, or auto: {LANE_PORT}, or a "
        "free one if that is taken or --port is 0.",
    )
    run_id: str = setting("", "The run to hold; empty lets the first worker name it.")
    protocol: str = setting(
        "async", f"How pushes become updates, as {', '.join(map(spec.example, protocols.PROTOCOLS.values()))}."
    )
    warmup: str = setting("", "A protocol for the first updates, as updates=200,protocol=serial,release_every=50.")
    staleness: str = setting(
        "auto",
        f"What staleness costs a gradient, as {', '.join(map(spec.example, staleness.POLICIES.values()))}; "
        f"auto: none under {', '.join(protocols.IN_FULL)}, else divide.",
    )
    optimizer: str = setting(
        "", "Update rule and settings, as adagrad:learning_rate=0.05; empty takes the first worker's."
    )
    schedule: str = setting("constant", "How the learning rate changes, as step:every=1000,factor=0.5.")
    epoch_examples: int = setting(0, "Examples in an epoch, for settings in epochs.", minimum=0)
    batch_growth: str = setting("", "How the workers' minibatch grows, as start=8,maximum=64,every=2 (epochs).")
    clip_norm: float = setting(
        0.0, "Largest norm of a push; a longer one is scaled down, 0 takes all.", minimum=0.0, maximum=1e30
    )
    bounds: str = setting(
        "",
        "Bounds of what workers may set or push, as learning_rate_min=0.001,learning_rate_max=0.5,"
        "momentum_max=0.95,delta_norm_max=10,examples_max=1000.",
    )
    stall_seconds: float = setting(
        300.0, "After this time without a push others wait for a worker no longer.", minimum=0.1
    )
    epochs_ahead: int = setting(
        1, "Epochs of shared data that free workers may begin before the present one is complete.", minimum=0
    )
    expected_workers: int = setting(
        0, "Workers that the job will have; 0 when unknown.", minimum=0, maximum=spec.COUNT_MAX
    )
    start_together: bool = setting(
        False, "No worker begins before all expected ones have joined, or --stall-seconds are over."
    )
    local_socket: str = setting(
        "auto", "Socket through which workers of this machine share memory: auto, off, or a folder that they see too."
    )
    token_file: Path | None = setting(None, "File with the token that callers must show, or with several, one a line.")
    observer_token_file: Path | None = setting(None, "The same for callers who may only read.")
    operator_token_file: Path | None = setting(
        None,
        "The same for callers who may save, set, stop and reset; without it callers on its machine may.",
    )
    tls_cert: Path | None = setting(None, "PEM file with the server's certificate; with it all ports take TLS only.")
    tls_key: Path | None = setting(None, "PEM file with the key of that certificate.")
    tls_client_ca: Path | None = setting(
        None, "PEM file with the CA of callers' certificates, without which callers are refused then."
    )
    insecure: bool = setting(False, "Listen beyond loopback without TLS, or without a token.")
    max_message_bytes: int = setting(16 * 2**20, "Largest message, in and out.", minimum=64 * 2**10, maximum=10**9)
    max_model_parameters: int = setting(2_000_000_000, "Largest model, in parameters.", minimum=1, maximum=10**15)
    max_workers: int = setting(256, "Live workers at once.", minimum=1, maximum=100_000)
    max_in_flight_bytes: int = setting(2**30, "Bytes of pushes and pulls held at once.", minimum=2**20, maximum=10**15)
    max_pending_bytes: int = setting(
        4 * 2**30, "Bytes of gradients that may wait for an update.", minimum=2**10, maximum=10**15
    )
    max_vector_bytes: int = setting(
        4 * 2**30, "Bytes of a coordinator's vectors and of staged gradients.", minimum=2**10, maximum=10**15
    )
    max_table_bytes: int = setting(8 * 2**30, "Bytes of all tables of rows.", minimum=2**20, maximum=10**15)
    heartbeat_seconds: float = setting(5.0, "How often workers send a heartbeat.", minimum=0.05)
    lease_seconds: float = setting(30.0, "Silence after which a worker is lost.", minimum=0.1)
    stop_after: str = setting("", "Finish the run after updates=N, examples=N or seconds=N.")
    exit_when: str = setting(
        "never",
        "When to exit: never; gone: once all workers that joined are gone; finished: once all have finished and none "
        "failed, and a signal before is a failure; idle=SECONDS: after so long without any worker; or two of these, as "
        "gone,idle=300.",
    )
    checkpoint_dir: Path | None = setting(
        None, "Folder for checkpoints, or its URL (s3://...); none are written without it."
    )
    checkpoint_seconds: float = setting(600.0, "Time between two checkpoints.", minimum=0.1)
    checkpoint_keep: int = setting(3, "Checkpoints to keep.", minimum=1)
    init_from: Path | None = setting(
        None, "File with the parameters that a new run begins with: .safetensors, or a state dict that torch saved."
    )
    durability: str = setting(
        "resend",
        "What becomes of pushes that no checkpoint holds when the server is killed: resend, workers keep them and send "
        "them again; none, they are lost.",
        choices=("resend", "none"),
    )
    resume: bool = setting(False, "Start from the newest complete checkpoint in the folder.")
    standby_of: str = setting(
        "", "Follow the server whose data port is there, as host:port, and take over when it ends."
    )
    standby_lease_seconds: float = setting(
        10.0,
        "Silence of that server after which this standby takes over.",
        minimum=STANDBY_LEASE_SECONDS[0],
        maximum=STANDBY_LEASE_SECONDS[1],
    )
    log_format: str = setting("text", "How log lines look.", choices=("text", "json"))
    log_level: str = setting("info", "The least serious lines to log.", choices=("debug", "info", "warning", "error"))
    update_log: Path | None = setting(None, "Folder for a log of every push and update.")
    log_gradients: bool = setting(False, "Write the gradients into that log too, so that it can be replayed.")
    log_gradients_max_bytes: int = setting(
        10 * 2**30, "Bytes of gradients after which the log goes on without them.", minimum=0, maximum=10**18
    )
    ready_file: Path | None = setting(None, "File to write, as JSON, once the server serves.")
    drain_seconds: float = setting(20.0, "Longest time between SIGTERM and the exit.", minimum=0.0)
    threads: int = setting(
        0, "Threads that run kernels, besides one a lane; 0 takes one a core.", minimum=0, maximum=1024
    )

    @property
    def stop_condition(self) -> StopCondition | None:
        return StopCondition.parse(self.stop_after) if self.stop_after else None

    @property
    def exit_condition(self) -> ExitCondition:
        return ExitCondition.parse(self.exit_when)

    @property
    def brought_policy(self) -> str:
        """The staleness policy that the protocol brings, if none is given; else ""."""
        return protocols.brought_policy(self.protocol) if self.staleness == "auto" else ""

    @property
    def resends(self) -> bool:
        """Whether workers keep pushes until a checkpoint holds them."""
        return self.durability == "resend" and self.checkpoint_dir is not None

    @property
    def behaviour(self) -> Behaviour:
        """Protocol, staleness policy and their like; InvalidArgument if one is malformed."""
        return Behaviour.parse(
            protocol=self.protocol,
            warmup=self.warmup,
            staleness=self.staleness if self.staleness != "auto" else self.brought_policy or "divide",
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            batch_growth=self.batch_growth,
            epoch_examples=self.epoch_examples,
        )


@dataclass(frozen=True)
class StopCondition:
    """The amount after which a run is finished."""

    unit: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> StopCondition:
        """Parse updates=N, examples=N or seconds=N."""
        unit, _, number = text.partition("=")
        try:
            limit = float(number) if unit == "seconds" else int(number)
        except ValueError:
            limit = 0
        if unit not in ("updates", "examples", "seconds") or not 0 < limit < float("inf"):
            raise ValueError(f"{text!r} is none of updates=N, examples=N and seconds=N with N above 0")
        return cls(unit, limit)


@dataclass(frozen=True)
class ExitCondition:
    """When a server ends by itself."""

    # The state of all workers at which it ends: gone, finished or never.
    workers: str = "never"
    # The time without any worker after which it ends.
    idle_seconds: float = math.inf

    @classmethod
    def parse(cls, text: str) -> ExitCondition:
        """Parse never, gone or finished, or idle=SECONDS, alone or after gone or finished."""
        words = text.split(",")
        workers = words.pop(0) if words[0] in ("never", "gone", "finished") else "never"
        kind, _, number = ",".join(words).partition("=")
        try:
            idle_seconds = float(number) if words else math.inf
        except ValueError:
            idle_seconds = 0
        if words and (text.startswith("never") or kind != "idle" or not 0 < idle_seconds < math.inf):
            raise ValueError(
                f"{text!r} is none of never, gone, finished, idle=SECONDS above 0, and gone or finished,idle=SECONDS"
            )
        return cls(workers, idle_seconds)


def flag_name(field_name: str) -> str:
    """Return the flag of a field: --checkpoint-dir for checkpoint_dir."""
    return "--" + field_name.replace("_", "-")


def variable_name(field_name: str) -> str:
    """Return the environment variable of a field: PYPS_CHECKPOINT_DIR for checkpoint_dir."""
    return ENVIRONMENT_PREFIX + field_name.upper()


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    toml_path: Path | None = None,
    *,
    warn: Callable[[str], None],
) -> ServerConfig:
    """Return the configuration; flags go before the environment, a TOML file and defaults.

    Args:
        warn: Takes a line for each value that is ignored.

    Raises:
        ConfigError: A value cannot be used.
    """
    table = _read_toml(toml_path) if toml_path else {}
    for name in unknown_variables(environment):
        warn(f"{name} in the environment is no setting and is ignored; `pyps serve --help` lists the variables")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    types_of = typing.get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        variable = variable_name(field.name)
        raw: Any = flags.get(field.name)
        origin = f"the flag {flag_name(field.name)}"
        if raw is None:
            raw, origin = environment.get(variable) or None, f"{variable} in the environment"
            if raw and _is_kubernetes(raw):
                # For a service named "pyps" Kubernetes sets PYPS_PORT.
                warn(f"{variable}={raw} is ignored: Kubernetes sets it for a service of that name")
                raw = None
        if raw is None and field.name in table:
            raw, origin = table[field.name], f"{field.name} in {toml_path}"
        if raw is not None:
            values[field.name] = _parse(raw, types_of[field.name], field, origin)
            origins[field.name] = origin
    config = ServerConfig(**values)
    object.__setattr__(config, "given", frozenset(values))
    _check_together(config, origins)
    return config


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of PYPS_ variables that nothing reads."""
    known = [*(variable_name(field.name) for field in dataclasses.fields(ServerConfig)), *OTHER_VARIABLES]
    for name, value in environment.items():
        foreign = not name.startswith(ENVIRONMENT_PREFIX) or _OF_KUBERNETES.fullmatch(name)
        if not (foreign or name in known or not value or _is_kubernetes(value)):
            yield name


def _is_kubernetes(value: str) -> bool:
    return value.startswith(("tcp://", "udp://", "sctp://"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the flag --config names {path}, which cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None
    known = [field.name for field in dataclasses.fields(ServerConfig)]
    if unknown := [name for name in table if name not in known]:
        raise ConfigError(f"{path} sets {unknown[0]}, which is no setting; the settings are {', '.join(known)}")
    return table


def _parse(raw: Any, kind: Any, field: dataclasses.Field[Any], origin: str) -> Any:
    """Return `raw` as a value of the field's type; refuse one out of bounds."""
    expected, parse = _KINDS[typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind]
    try:
        value = parse(raw)
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{origin} is {raw!r}, but must be {expected}") from None
    minimum, maximum, choices = (field.metadata[name] for name in ("minimum", "maximum", "choices"))
    # Written so that NaN fails too.
    if (minimum is not None and not value >= minimum) or (maximum is not None and not value <= maximum):
        bounds = f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"
        raise ConfigError(f"{origin} is {raw}, but must be {bounds}")
    if choices and value not in choices:
        raise ConfigError(f"{origin} is {raw!r}, but must be one of {', '.join(choices)}")
    return value


def _check_together(config: ServerConfig, origins: Mapping[str, str]) -> None:
    """Refuse values that are well formed but cannot be used together."""

    def origin(name: str) -> str:
        return origins.get(name, f"the default of {name}")

    for name, parse in _PARSED_FURTHER.items():
        try:
            parse(config)
        except (PypsError, ValueError) as error:
            raise ConfigError(f"{origin(name)} cannot be used: {error}") from None
    coordinated = config.behaviour.aggregation.coordinated
    if coordinated and config.stop_after and not config.stop_after.startswith("seconds="):
        raise ConfigError(
            f"{origin('stop_after')} is {config.stop_after!r}, but under sandblaster there are no pushes to "
            "count: give the coordinator --iterations, or stop after seconds=N"
        )
    for name, needed, what in (
        ("start_together", "expected_workers", "the number of workers that start"),
        ("log_gradients", "update_log", "a folder to log to"),
        ("resume", "checkpoint_dir", "a folder to resume from"),
        ("observer_token_file", "token_file", "the token of workers"),
        ("operator_token_file", "token_file", "the token of workers"),
        ("tls_cert", "tls_key", "the certificate's key"),
        ("tls_key", "tls_cert", "the key's certificate"),
        ("tls_client_ca", "tls_cert", "a certificate of the server's own"),
    ):
        if getattr(config, name) and not getattr(config, needed):
            raise ConfigError(f"{origin(name)} needs {what}: give {flag_name(needed)} too")
    if config.lease_seconds <= config.heartbeat_seconds:
        raise ConfigError(
            f"{origin('lease_seconds')} gives {config.lease_seconds:g} s, but must be longer than the "
            f"{config.heartbeat_seconds:g} s between heartbeats ({origin('heartbeat_seconds')})"
        )
    used = [port for port in (config.port, config.control_port, config.metrics_port) if port]
    if len(set(used)) < len(used):
        raise ConfigError(
            f"port, control_port and metrics_port must differ, but are {config.port}, "
            f"{config.control_port} and {config.metrics_port}"
        )


def _of(raw: Any, *kinds: type) -> Any:
    """Return a value of one of these types: Python would convert other values of a TOML file too."""
    if type(raw) not in kinds:
        raise TypeError
    return raw


_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
# For each type the expected value in words, and a parser that raises ValueError, TypeError or KeyError.
_KINDS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", lambda raw: _BOOLEANS[str(raw).lower()]),
    int: ("a whole number", lambda raw: int(_of(raw, str, int))),
    float: ("a number", lambda raw: float(_of(raw, str, int, float))),
    str: ("a text", lambda raw: _of(raw, str)),
    Path: ("a path", lambda raw: Path(_of(raw, str)).expanduser()),
}


def _check_lane_port(config: ServerConfig) -> None:
    port = config.lane_port
    if port not in ("auto", "off") and not (port.isdecimal() and int(port) <= 65535):
        raise InvalidArgument(f"it is {port!r}; expected auto, off, or a port from 0 to 65535")


def _check_bounds(config: ServerConfig) -> None:
    bounds = Bounds.parse(config.bounds)
    if config.optimizer:
        bounds.require_settings(RuleSettings.parse(config.optimizer))


def _check_protocol(config: ServerConfig) -> None:
    protocol = protocols.parse(config.protocol)
    if config.expected_workers:
        protocol.check(config.expected_workers)


def is_address(text: str) -> bool:
    """Return whether a text is host:port, with an IPv6 address in brackets."""
    found = re.fullmatch(r"(?:\[[\w:.%-]{2,100}\]|[\w.-]{1,253}):(\d{1,5})", text, re.ASCII)
    return found is not None and 0 < int(found[1]) <= 65535


def _check_standby_of(config: ServerConfig) -> None:
    if config.standby_of and not is_address(config.standby_of):
        raise ValueError(f"{config.standby_of!r} is no address: expected host:port of a server's data port")


# Parsers of texts with their own grammar, which raise InvalidArgument or ValueError.
_PARSED_FURTHER: dict[str, Callable[[ServerConfig], object]] = {
    "lane_port": _check_lane_port,
    "standby_of": _check_standby_of,
    "stop_after": lambda config: config.stop_condition,
    "exit_when": lambda config: config.exit_condition,
    "optimizer": lambda config: config.optimizer and RuleSettings.parse(config.optimizer),
    "protocol": _check_protocol,
    "warmup": lambda config: config.warmup and Staged(WarmUp.parse(config.warmup), protocols.parse(config.protocol)),
    "staleness": lambda config: config.staleness == "auto" or staleness.parse(config.staleness),
    "schedule": lambda config: schedule.parse(config.schedule, epoch_examples=config.epoch_examples),
    "bounds": _check_bounds,
    "batch_growth": lambda config: (
        config.batch_growth and BatchGrowth.parse(config.batch_growth, epoch_examples=config.epoch_examples)
    ),
}
