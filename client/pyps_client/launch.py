"""What a worker is told at its start: which servers, which run, which worker it is."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pyps_client.credentials import Credentials, check_token, read_token
from pyps_client.log import logger
from pyps_client.places import places_of
from pyps_client.transport import TRANSPORTS, Transport, check_transport, named
from pyps_wire.codecs import codec_names, codec_of
from pyps_wire.contract import DATA_PORT
from pyps_wire.errors import BadRequest
from pyps_wire.in_process import end_local_server, start_local_server

# Instead of servers: one in the worker's own process, for it alone.
LOCAL = "local"
# Settings that were called otherwise: by what names they go on to be taken.
OLD_NAMES = {
    "codec": "gradient_codec",
    "pull_codec": "parameter_codec",
    "gradient_dtype": "gradient_codec",
    "parameter_dtype": "parameter_codec",
}
# What torchrun calls a job on several nodes that it was given no --rdzv-id for.
NO_RUN_ID = "none"
_WAITS = ("start_wait_seconds", "loss_wait_seconds", "wait_seconds")
# Of a worker's key. Whoever is given none makes one up for the process.
KEY_LENGTH_MIN, KEY_LENGTH_MAX = 16, 64
_OWN_KEY = secrets.token_hex(16)
# What a setting's type takes, numpy's numbers too, and how it is called.
_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    NoneType: (NoneType, "None"),
}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a worker finds its run, and its place there; `from_environment` reads it from PYPS_ variables.

    `servers`: data addresses, host:port, in the order that all workers share; "file:/path" for a file with one a line;
    "dns:COUNT@name:port" for so many servers behind one name; or "local" for a server that this process runs itself,
    with a new run, until its last worker has left.
    `run_id`: the run to join; empty takes whatever run the servers hold before its first update. Under torchrun that of
    its --rdzv-id by default.
    `worker_id`: unique among live workers; empty: "worker-INDEX" with an index, else host-pid.
    `worker_index`, `worker_count`: this worker's place among the run's workers, from 0, for dividing data: torchrun's
    where PYPS_ variables say nothing of the worker, None when nobody said.
    `parts`: the processes of this worker, each with a part of the model (model parallelism).
    `token`: the shared secret of servers that ask for one; `token_file`, where it is from, to be read again.
    `tls_ca`, `tls_cert`, `tls_key`: PEM files for connections by TLS: the certificate of the authority that signed the
    servers' own; and the worker's certificate and key, where servers ask for one.
    `worker_key`: what this worker alone knows, and shows with every call: nobody else can speak in its name. A process
    that is started anew with the key of one that died takes its place at once, any other when that one's lease is over.
    By itself each process makes one up.
    `start_wait_seconds`, `loss_wait_seconds`, `wait_seconds`: how long to wait for a server that is not there at the
    start, for one that was lost, and for other workers: for a round's end, for a turn, for the slowest.
    `use_proxy`: True lets http_proxy and its kin apply to the connection.
    `gradient_codec`, `parameter_codec`: how pushed gradients and pulled parameters are written, "float32", "float16" or
    "bfloat16".
    `transport`: the way of both. "auto" is memory that worker and server share, where they run on one machine;
    elsewhere a lane (a TCP connection for large messages) where one can be had, and gRPC. "shm" and "tcp" (the lane)
    end the worker rather than use another; "grpc" is gRPC everywhere; "in_process" calls servers that run in the
    worker's own process, as in tests, without a socket.

    Raises BadRequest for a value that cannot be.
    """

    servers: tuple[str, ...]
    run_id: str = ""
    worker_id: str = ""
    worker_index: int | None = None
    worker_count: int | None = None
    parts: int = 1
    token: str = field(default="", repr=False)
    token_file: str = field(default="", compare=False)
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    worker_key: str = field(default="", repr=False)
    start_wait_seconds: float = 300.0
    loss_wait_seconds: float = 600.0
    wait_seconds: float = 1800.0
    use_proxy: bool = False
    gradient_codec: str = "float32"
    parameter_codec: str = "float32"
    transport: str = "auto"

    def __post_init__(self) -> None:
        given: Any = self.servers
        given = [given] if isinstance(given, str) else given
        local = isinstance(given, Sequence) and [str(each).strip().lower() for each in given] == [LOCAL]
        object.__setattr__(self, "servers", (LOCAL,) if local else parse_servers(self.servers))
        check_types(self)
        _ = self.credentials
        if not self.worker_key:
            object.__setattr__(self, "worker_key", _OWN_KEY)
        check_token(self.worker_key, "worker_key (PYPS_WORKER_KEY)")
        if not KEY_LENGTH_MIN <= len(self.worker_key) <= KEY_LENGTH_MAX:
            raise BadRequest(
                f"worker_key (PYPS_WORKER_KEY) has {len(self.worker_key)} characters; expected {KEY_LENGTH_MIN} to "
                f"{KEY_LENGTH_MAX} that nobody can guess, as `openssl rand -hex 16` makes them."
            )
        if local:
            _check_alone(max(self.parts, self.worker_count or 1))
            if self.transport not in ("auto", "in_process"):
                raise BadRequest(
                    f"transport is {self.transport!r}, but servers is 'local', a server in this process without a "
                    "port: leave transport out, or start `pyps serve` and name it."
                )
            object.__setattr__(self, "transport", "in_process")
        codec_of(self.gradient_codec)
        codec_of(self.parameter_codec)
        check_transport(self.transport)
        index, count = self.worker_index, self.worker_count
        if index is not None and index < 0:
            raise BadRequest(f"worker_index (PYPS_WORKER_INDEX) is {index}; expected 0 or more.")
        if count is not None and count < 1:
            raise BadRequest(f"worker_count (PYPS_WORKER_COUNT) is {count}; expected 1 or more.")
        if index is not None and count is not None and index >= count:
            raise BadRequest(f"worker_index is {index} of {count} workers; expected 0 to {count - 1}.")
        if self.parts < 1:
            raise BadRequest(f"parts (PYPS_PARTS) is {self.parts}; expected 1 or more.")
        if not self.worker_id:
            object.__setattr__(self, "worker_id", _default_worker_id(self.worker_index))
        for name in _WAITS:
            if not getattr(self, name) >= 0:
                raise BadRequest(f"{name} is {getattr(self, name)!r}; expected a number of seconds, 0 or more.")

    # By their old names.
    codec = property(attrgetter("gradient_codec"))
    pull_codec = property(attrgetter("parameter_codec"))

    def require_one_process(self, caller: str) -> None:
        """Raise BadRequest in a process that holds a part of the model: `caller` needs the whole one."""
        if self.parts > 1:
            raise BadRequest(
                f"{caller} needs the whole model in each process, and this process is one of the {self.parts} parts of "
                f"{self.worker_id} (PYPS_PARTS, which `pyps run --parts` sets): start the workers without --parts."
            )

    @property
    def way(self) -> Transport:
        """The transport itself."""
        return named(self.transport)

    @property
    def credentials(self) -> Credentials:
        """What the worker shows, and by what it knows the servers."""
        return Credentials(
            token=self.token,
            token_file=self.token_file,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    def begun(self, num_processes: int) -> Launch:
        """With the address of a server that this starts, where a worker of so many processes asked for its own."""
        if self.servers != (LOCAL,):
            return self
        _check_alone(num_processes)
        return replace(self, servers=(start_local_server(),))

    def end(self) -> None:
        """Ends the server that was begun, if nobody trains there; other servers go on."""
        if self.transport == "in_process":
            end_local_server(self.servers[0])

    @classmethod
    def from_environment(
        cls,
        servers: str | Sequence[str] | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Launch:
        """The launch that PYPS_ variables describe; arguments that are not None go before them."""
        env = os.environ if environment is None else environment
        given = renamed({name: value for name, value in overrides.items() if value is not None})
        unknown = sorted(given.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise BadRequest(
                f"There is no launch setting {unknown[0]!r}; there are {', '.join(cls.__dataclass_fields__)}."
            )
        settings = renamed(_from_variables(env, but=given)) | given
        torchrun = torchrun_place(env)
        if torchrun and not settings.keys() & {"worker_id", "worker_index", "worker_count"}:
            settings["worker_index"], settings["worker_count"] = torchrun
            # Several torchruns may train in one run, and each counts from 0.
            settings["worker_id"] = _default_worker_id(None)
        if not settings.get("run_id"):
            settings["run_id"] = torchrun_run(env)
        settings["servers"] = servers if servers is not None else env.get("PYPS_SERVERS", "")
        if "token" not in given:
            file = token_file or env.get("PYPS_TOKEN_FILE") or None
            settings["token"], settings["token_file"] = read_token(file, env), os.fspath(file or "")
        return cls(**settings)


def _check_alone(num_processes: int) -> None:
    if num_processes > 1:
        raise BadRequest(
            "servers is 'local', a server in this process, but several processes are to share it: start `pyps serve` "
            "and name it, or train with `pyps run`, which names its own where the script names none."
        )


def check_types(settings: Any) -> None:
    """Refuses what a dataclass holds in a field of another type."""
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value, hint = getattr(settings, each.name), hints[each.name]
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
        taken = tuple(_TYPES.get(kind, (kind,))[0] for kind in kinds)
        # To Python True is a number too.
        if not isinstance(value, taken) or (isinstance(value, bool) and bool not in kinds):
            said = repr(value) if each.repr else f"of type {type(value).__name__}"
            expected = ", or ".join(_TYPES[kind][1] if kind in _TYPES else f"a {kind.__name__}" for kind in kinds)
            raise BadRequest(f"{each.name} is {said}; expected {expected}.")


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names that they have now, for some by older ones; those that are None were not given."""
    named = {name: value for name, value in settings.items() if name not in OLD_NAMES}
    for old, name in OLD_NAMES.items():
        value = settings.get(old)
        if value is None:
            continue
        if named.get(name) not in (None, value):
            raise BadRequest(
                f"{old} is the old name of {name}, and they were given as {value!r} and {named[name]!r}: leave out "
                "the old one."
            )
        named[name] = value
        _tell_of_new_name(old, name)
    return named


def torchrun_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """This process's number and how many there are, where torchrun started several and no name of a worker was set.

    Who names a worker, as for the processes of a replica, says its place too. RANK without torchrun is none of ours.
    """
    if any(environment.get(name) for name in ("PYPS_WORKER_ID", "PYPS_WORKER_INDEX", "PYPS_WORKER_COUNT")):
        return None
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in environment or not (rank.isdecimal() and size.isdecimal()) or int(size) < 2:
        return None
    return int(rank), int(size)


def torchrun_run(environment: Mapping[str, str]) -> str:
    """The run that torchrun's processes are to share where none was named; empty for none.

    Without a name whoever comes after the first update, as one that torchrun started again, would be refused.
    """
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id == NO_RUN_ID:
        _tell_of_no_name()
    return run_id if run_id != NO_RUN_ID else ""


def parse_servers(servers: str | Sequence[str], *, port: int = DATA_PORT) -> tuple[str, ...]:
    """The servers' places, addresses as host:port, from "a:1,b:2" or a sequence; `port` where none is named."""
    listed = servers.split(",") if isinstance(servers, str) else list(servers) if isinstance(servers, Iterable) else [0]
    if not all(isinstance(address, str) for address in listed):
        raise BadRequest(f"servers is {servers!r}; expected 'host:port,host:port', or a list of such strings.")
    addresses = [address.strip() for address in listed if address.strip()]
    if not addresses:
        raise BadRequest("No servers were named: pass servers='host:7610' or set PYPS_SERVERS=host:7610[,host:7610].")
    if LOCAL in addresses:
        raise BadRequest(
            "servers is 'local', a server within a worker's own process, which nobody else can reach: start `pyps "
            "serve` and name it, as host:port."
        )
    parsed = tuple(place for address in addresses for place in places_of(address, port=port))
    for address in parsed:
        if parsed.count(address) > 1:
            raise BadRequest(f"Server {address} is listed twice in {','.join(parsed)}: name each server once.")
    return parsed


def _default_worker_id(worker_index: int | None) -> str:
    return f"worker-{worker_index}" if worker_index is not None else f"{socket.gethostname()}-{os.getpid()}"


def _from_variables(env: Mapping[str, str], *, but: Container[str]) -> dict[str, Any]:
    """Settings by field name, for the variables that are set and not empty; those of `but` are not looked at."""
    settings: dict[str, Any] = {}
    for name, (read, kind) in _READERS.items():
        variable = f"PYPS_{name.upper()}"
        text = env.get(variable, "").strip()
        if not text or OLD_NAMES.get(name, name) in but:
            continue
        try:
            settings[name] = read(text)
        except ValueError:
            raise BadRequest(f"{variable} is {text!r}; expected {kind}.") from None
    return settings


@functools.cache
def _tell_of_new_name(old: str, name: str) -> None:
    logger.warning("%s is called %s now (PYPS_%s); the old name still does", old, name, name.upper())


@functools.cache
def _tell_of_no_name() -> None:
    logger.warning(
        "torchrun's job has no name, and its processes that join after the first update, as all that it starts again, "
        "will be refused: give torchrun --rdzv-id NAME, or set PYPS_RUN_ID"
    )


def _flag(text: str) -> bool:
    return _one_of(_YES + _NO, text.lower()) in _YES


def _one_of(names: Container[str], text: str) -> str:
    if text not in names:
        raise ValueError(text)
    return text


def _choice(names: Sequence[str]) -> tuple[Callable[[str], Any], str]:
    return functools.partial(_one_of, names), f"one of {', '.join(names)}"


# How each variable's text is read, and what to expect of it.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("run_id", "worker_id"), (str, "a name")),
    **dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), (str, "a path")),
    "worker_key": (str, "a line of text"),
    **dict.fromkeys(("worker_index", "worker_count", "parts"), (int, "a whole number")),
    **dict.fromkeys(_WAITS, (float, "a number of seconds")),
    "use_proxy": (_flag, "yes or no"),
    **dict.fromkeys(("gradient_codec", "parameter_codec", "codec", "pull_codec"), _choice(codec_names())),
    "transport": _choice(TRANSPORTS),
}
