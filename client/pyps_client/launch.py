"""A worker's launch settings: its servers, its run, its name and place."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pyps_client import local_server
from pyps_client.credentials import Credentials, check_token, read_token
from pyps_client.log import logger
from pyps_client.places import places_of
from pyps_client.transport import TRANSPORTS, Dialer, check_transport, named
from pyps_wire.codecs import Codec, codec_of
from pyps_wire.contract import DATA_PORT
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import DEFAULT_SHARD_SIZE

# In place of addresses: a server that the worker starts on its machine, for itself alone.
LOCAL = "local"
# torchrun's name of a job on several nodes that has no --rdzv-id.
NO_RUN_ID = "none"
_WAITS = ("start_wait_seconds", "loss_wait_seconds", "wait_seconds")
KEY_LENGTH_MIN, KEY_LENGTH_MAX = 16, 64
# The default key of this process.
_OWN_KEY = secrets.token_hex(16)
# For each type of a setting the accepted type, which has numpy's numbers too, and its description.
_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    NoneType: (NoneType, "None"),
}
# The texts of variables: yes and no, the settings with a choice, and what is expected for the other types.
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_CHOICES = {"transport": TRANSPORTS}
_TEXTS = {bool: "yes or no", int: "a whole number", float: "a number of seconds"}


@dataclass(frozen=True, init=False)
class Launch:
    """A worker's connection to its run, and its place there.

        RemoteOptimizer(model, optimizer, launch=Launch("host:7610", tls_ca="ca.crt", token_file="token"))

    A setting that is left out, or None, is read from its PYPS_ variable: `run_id` from PYPS_RUN_ID.

    `servers`: data addresses, host:port, in the order that all workers share; "file:/path" for a file with one a line;
    "dns:COUNT@name:port" for so many servers behind one name; or "local" for a server that this worker starts on this
    machine, with a new run, and ends when it leaves.
    `run_id`: the run to join; empty for the run that the servers hold, before its first update. Under torchrun the
    default is its --rdzv-id.
    `worker_id`: unique among live workers; empty for "worker-INDEX" with an index, and host-pid without.
    `worker_index`, `worker_count`: this worker's place among the run's workers, from 0, for dividing data. The default
    under torchrun is its rank and world size, unless a PYPS_ variable names the worker.
    `parts`: the processes of this worker, each with a part of the model (model parallelism).
    `token`: the secret that the servers share. `token_file`: a file with it, which is read again when a server refuses
    the token.
    `tls_ca`, `tls_cert`, `tls_key`: PEM files for TLS: the authority that signed the servers' certificates; and the
    worker's certificate and key, where servers require them.
    `worker_key`: a secret of this worker, sent with every call, so that no other process can use its name. A process
    that restarts with the same key takes its predecessor's place at once; any other waits until the lease expires. By
    default each process draws one.
    `start_wait_seconds`, `loss_wait_seconds`, `wait_seconds`: the longest wait for a server at the start, for a server
    that was lost, and for other workers.
    `use_proxy`: True lets http_proxy and the like apply to the connection.
    `gradient_codec`, `parameter_codec`: the encoding of pushed gradients and of pulled parameters, "float32",
    "float16" or "bfloat16", or torch's types; or one of few bits, such as "int8". Then the worker adds what the
    encoding of a gradient loses to the next gradient, and pulls bring differences to a copy that such workers share;
    "delta" brings what has changed, exactly. Servers hold and update float32.
    `transport`: "auto" is shared memory with a server on this machine; elsewhere a lane (a TCP connection for large
    messages) where the server has one, or else gRPC. "shm" and "tcp" (the lane) fail rather than use another; "grpc" is
    gRPC everywhere.
    `resend_bytes_max`: the most memory for pushes that no checkpoint holds yet, which are sent again to a server that
    comes back (`pyps serve --durability`). Where they take more, none are kept before the next checkpoint.
    `shard_size`: the most parameters of a shard, where this worker creates the run; others take its slices over.

    Raises InvalidArgument for a value that is not allowed.
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
    worker_key: str = field(default=_OWN_KEY, repr=False)
    start_wait_seconds: float = 300.0
    loss_wait_seconds: float = 600.0
    wait_seconds: float = 1800.0
    use_proxy: bool = False
    gradient_codec: str = "float32"
    parameter_codec: str = "float32"
    transport: str = "auto"
    resend_bytes_max: int = 1 << 30
    shard_size: int = DEFAULT_SHARD_SIZE
    # Whether the worker's name or place was chosen, and is no default.
    named: bool = field(default=False, init=False, repr=False, compare=False)

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        run_id: str | None = None,
        worker_id: str | None = None,
        worker_index: int | None = None,
        worker_count: int | None = None,
        parts: int | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        worker_key: str | None = None,
        start_wait_seconds: float | None = None,
        loss_wait_seconds: float | None = None,
        wait_seconds: float | None = None,
        use_proxy: bool | None = None,
        gradient_codec: object = None,
        parameter_codec: object = None,
        transport: str | None = None,
        resend_bytes_max: int | None = None,
        shard_size: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        given = {name: _plain(value) for name, value in locals().items() if name in self._names() and value is not None}
        env = os.environ if environment is None else environment
        settings = _from_variables(env, but=given) | given
        named = bool(settings.get("worker_id") or settings.keys() & {"worker_index", "worker_count"})
        object.__setattr__(self, "named", named)
        if not named and (torchrun := torchrun_place(env)):
            settings["worker_index"], settings["worker_count"] = torchrun
            # Not "worker-INDEX": several torchruns, each of which counts from 0, may train in one run.
            settings["worker_id"] = _default_worker_id(None)
        if "run_id" not in settings:
            settings["run_id"] = torchrun_run(env)
        settings.setdefault("servers", env.get("PYPS_SERVERS", ""))
        if "token" not in given and isinstance(settings.get("token_file", ""), str):
            file = settings.get("token_file") or None
            settings["token"], settings["token_file"] = read_token(file, env), file or ""
        elif "token_file" not in given:
            # The file may hold another token.
            settings["token_file"] = ""
        for name in self._names():
            object.__setattr__(self, name, settings.get(name, getattr(type(self), name, None)))
        self._check()

    @classmethod
    def _names(cls) -> Iterable[str]:
        return [each.name for each in fields(cls) if each.init]

    def _check(self) -> None:
        given: Any = self.servers
        given = [given] if isinstance(given, str) else given
        local = isinstance(given, Sequence) and [str(each).strip().lower() for each in given] == [LOCAL]
        object.__setattr__(self, "servers", (LOCAL,) if local else parse_servers(self.servers))
        check_types(self)
        _ = self.credentials
        check_token(self.worker_key, "worker_key (PYPS_WORKER_KEY)")
        if not KEY_LENGTH_MIN <= len(self.worker_key) <= KEY_LENGTH_MAX:
            raise InvalidArgument(
                f"worker_key (PYPS_WORKER_KEY) has {len(self.worker_key)} characters; expected {KEY_LENGTH_MIN} to "
                f"{KEY_LENGTH_MAX} that nobody can guess, as `openssl rand -hex 16` makes them."
            )
        if local:
            _check_alone(max(self.parts, self.worker_count or 1))
        check_transport(self.transport)
        self._check_codecs()
        index, count = self.worker_index, self.worker_count
        if index is not None and count is not None and index >= count:
            raise InvalidArgument(f"worker_index is {index} of {count} workers; expected 0 to {count - 1}.")
        leasts = {"worker_index": 0, "worker_count": 1, "parts": 1, "resend_bytes_max": 0, "shard_size": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidArgument(f"{name} (PYPS_{name.upper()}) is {value}; expected {least} or more.")
        if not self.worker_id:
            object.__setattr__(self, "worker_id", _default_worker_id(self.worker_index))
        for name in _WAITS:
            if not getattr(self, name) >= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; expected a number of seconds, 0 or more.")

    def _check_codecs(self) -> None:
        for setting, taken in (("gradient_codec", Codec.pushes), ("parameter_codec", Codec.pulls)):
            what = f"{setting} (PYPS_{setting.upper()})"
            codec = codec_of(getattr(self, setting), taken, what=what)
            if self.transport == "shm" and codec.dtype is None:
                raise InvalidArgument(
                    f"{what} is {codec.name!r}, which shared memory does not carry, and "
                    "transport (PYPS_TRANSPORT) is 'shm': leave the codec out, or set transport to 'auto'."
                )

    @classmethod
    def of(cls, servers: str | Sequence[str] | None, launch: Launch | None) -> Launch:
        """Return the launch, or one of the servers, if only these are given."""
        if launch is None:
            return cls(servers)
        if not isinstance(launch, Launch):
            raise InvalidArgument(f"launch is of type {type(launch).__name__}; expected a pyps_client.Launch.")
        if servers is not None:
            raise InvalidArgument("servers were given beside launch: name them in launch=Launch(servers, ...).")
        return launch

    def require_one_process(self, caller: str) -> None:
        """Raise InvalidArgument in a process with a part of the model: `caller` needs the whole model."""
        if self.parts > 1:
            raise InvalidArgument(
                f"{caller} needs the whole model in each process, and this process is one of the {self.parts} parts of "
                f"{self.worker_id} (PYPS_PARTS, which `pyps run --parts` sets): start the workers without --parts."
            )

    @property
    def dialer(self) -> Dialer:
        return named(self.transport)

    @property
    def credentials(self) -> Credentials:
        return Credentials(**{each.name: getattr(self, each.name) for each in fields(Credentials)})

    def begun(self, num_processes: int) -> Launch:
        """Return a launch whose server is started, if servers="local"; `num_processes`: of the worker."""
        if self.servers != (LOCAL,):
            return self
        _check_alone(num_processes)
        own = {"servers": (local_server.start(),), "use_proxy": False}
        return self.with_(**own, tls_ca="", tls_cert="", tls_key="")

    def end(self) -> None:
        """End the server that `begun` started, if it did."""
        local_server.end(self.servers[0])

    def with_(self, **settings: Any) -> Launch:
        """Return a copy with other settings; variables are not read again."""
        own: dict[str, Any] = {name: getattr(self, name) for name in self._names()}
        return Launch(**(own | settings), environment={})


def _check_alone(num_processes: int) -> None:
    if num_processes > 1:
        raise InvalidArgument(
            "servers is 'local', a server for one process, but several processes are to share it: start `pyps serve` "
            "and name it, or train with `pyps run`, which names its own where the script names none."
        )


def check_types(settings: Any) -> None:
    """Raise InvalidArgument for a dataclass with a value of another type than its field's."""
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value, hint = getattr(settings, each.name), hints[each.name]
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
        taken = tuple(_TYPES.get(kind, (kind,))[0] for kind in kinds)
        # To Python True is a number too.
        if not isinstance(value, taken) or (isinstance(value, bool) and bool not in kinds):
            said = repr(value) if each.repr else f"of type {type(value).__name__}"
            expected = ", or ".join(_TYPES[kind][1] if kind in _TYPES else f"a {kind.__name__}" for kind in kinds)
            raise InvalidArgument(f"{each.name} is {said}; expected {expected}.")


def torchrun_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and the number of processes under torchrun, unless a variable names the worker."""
    if any(environment.get(name) for name in ("PYPS_WORKER_ID", "PYPS_WORKER_INDEX", "PYPS_WORKER_COUNT")):
        return None
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    # Without torchrun RANK has another meaning.
    if "TORCHELASTIC_RUN_ID" not in environment or not (rank.isdecimal() and size.isdecimal()) or int(size) < 2:
        return None
    return int(rank), int(size)


def torchrun_run(environment: Mapping[str, str]) -> str:
    """Return the name of torchrun's job, for the run; empty for none."""
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id == NO_RUN_ID:
        _warn_of_no_name()
        return ""
    return run_id


def parse_servers(servers: str | Sequence[str], *, port: int = DATA_PORT) -> tuple[str, ...]:
    """Return the servers' places (host:port, or as in `places`) from "a:1,b:2" or a sequence; `port`: the default."""
    several = isinstance(servers, Iterable) and not isinstance(servers, Mapping)
    listed: list[Any] = servers.split(",") if isinstance(servers, str) else list(servers) if several else [0]
    if not all(isinstance(address, str) for address in listed):
        raise InvalidArgument(f"servers is {servers!r}; expected 'host:port,host:port', or a list of such strings.")
    addresses = [address.strip() for address in listed if address.strip()]
    if not addresses:
        raise InvalidArgument(
            "No servers were named: pass servers='host:7610' or set PYPS_SERVERS=host:7610[,host:7610]; 'local' "
            "instead starts one for this worker alone."
        )
    if LOCAL in addresses:
        raise InvalidArgument(
            "servers is 'local', a server that a worker starts for itself alone: start `pyps serve` and name it, as "
            "host:port."
        )
    parsed = tuple(place for address in addresses for place in places_of(address, port=port))
    for address in parsed:
        if parsed.count(address) > 1:
            raise InvalidArgument(f"Server {address} is listed twice in {','.join(parsed)}: name each server once.")
    return parsed


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # A dtype of torch, which may not be installed.
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _default_worker_id(worker_index: int | None) -> str:
    return f"worker-{worker_index}" if worker_index is not None else f"{socket.gethostname()}-{os.getpid()}"


def _from_variables(env: Mapping[str, str], *, but: Container[str]) -> dict[str, Any]:
    """Return settings by field name, from variables that are set and not empty, except those of `but`."""
    settings: dict[str, Any] = {}
    hints = get_type_hints(Launch)
    for name in Launch._names():
        variable = f"PYPS_{name.upper()}"
        text = env.get(variable, "").strip()
        if not text or name in but:
            continue
        kind, choices = (get_args(hints[name]) or (hints[name],))[0], _CHOICES.get(name, (text,))
        expected = f"one of {', '.join(choices)}" if name in _CHOICES else _TEXTS.get(kind)
        try:
            # Raises ValueError for what is not among them.
            choices.index(text)
            settings[name] = (_YES + _NO).index(text.lower()) < len(_YES) if kind is bool else kind(text)
        except ValueError:
            raise InvalidArgument(f"{variable} is {text!r}; expected {expected}.") from None
    return settings


@functools.cache
def _warn_of_no_name() -> None:
    logger.warning(
        "torchrun's job has no name, and its processes that join after the first update, as all that it starts again, "
        "will be refused: give torchrun --rdzv-id NAME, or set PYPS_RUN_ID"
    )
