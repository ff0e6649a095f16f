"""Who may do what at a real server: every call of every service and every port, with each role and with none."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2

from client_support import make_client
from pyps.certificates import Authority
from pyps.config import flag_name, variable_name
from pyps.roles import PORTS, Role
from pyps_client import Launch, NotAllowed, Observer
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import ROLE_OBSERVER
from pyps_wire.contract import METHODS
from support import DEADLINE_SECONDS, shell
from wire_worker import CHANNEL_OPTIONS, WireWorker, refusal_of

Metadata = tuple[tuple[str, str], ...]

ROLES = (Role.OBSERVER, Role.WORKER, Role.OPERATOR)
FIELDS = {Role.OBSERVER: "observer_token_file", Role.WORKER: "token_file", Role.OPERATOR: "operator_token_file"}
# The others' messages may be empty; in these that would be a worker.
OF_OBSERVERS = {
    METHODS["Hello"]: wire.HelloRequest(role=ROLE_OBSERVER).SerializeToString(),
    METHODS["Pull"]: wire.PullRequest(role=ROLE_OBSERVER).SerializeToString(),
}
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


class Holders:
    """Tokens and certificates, by the role that they give, and the settings of servers and commands for them."""

    def __init__(self, folder: Path):
        self.folder = folder
        authority = Authority(folder, create=True)
        authority.make_server(["127.0.0.1"], days=1)
        for role in ROLES:
            authority.make_worker(f"an-{role.word}", role=role.word, days=1)
            self.token_file(role).write_text(self.token(role), encoding="utf-8")

    def token(self, role: Role) -> str:
        return f"the-token-of-{role.word}s"

    def token_file(self, role: Role) -> Path:
        return self.folder / f"{role.word}.token"

    def by_tokens(self, *roles: Role) -> list[str]:
        return [text for role in roles for text in (flag_name(FIELDS[role]), str(self.token_file(role)))]

    def by_certificates(self) -> list[str]:
        names = {"--tls-cert": "server.crt", "--tls-key": "server.key", "--tls-client-ca": "ca.crt"}
        return [text for flag, name in names.items() for text in (flag, str(self.folder / name))]

    def certificate(self, role: Role) -> dict[str, str]:
        own = str(self.folder / f"an-{role.word}")
        return {"tls_ca": str(self.folder / "ca.crt"), "tls_cert": f"{own}.crt", "tls_key": f"{own}.key"}

    def channel(self, address: str, role: Role | None) -> grpc.Channel:
        """One with a certificate of the role; None for one in the clear."""
        if role is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        ca, cert, key = (Path(path).read_bytes() for path in self.certificate(role).values())
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=CHANNEL_OPTIONS)

    def metadata(self, role: Role | None) -> Metadata:
        return () if role is None else (("authorization", f"Bearer {self.token(role)}"),)


@pytest.fixture(scope="module")
def holders(tmp_path_factory: pytest.TempPathFactory) -> Holders:
    return Holders(tmp_path_factory.mktemp("holders"))


def methods_at(channel: grpc.Channel, metadata: Metadata) -> Iterator[tuple[str, bool]]:
    """Every method at a port, and whether it answers with a stream, as the port itself tells."""
    kind = reflection_pb2
    asking = channel.stream_stream(
        REFLECTION,
        request_serializer=kind.ServerReflectionRequest.SerializeToString,
        response_deserializer=kind.ServerReflectionResponse.FromString,
    )
    request = kind.ServerReflectionRequest(list_services="")
    [reply] = asking(iter([request]), metadata=metadata, timeout=DEADLINE_SECONDS)
    for service in reply.list_services_response.service:
        for method in descriptor_pool.Default().FindServiceByName(service.name).methods:
            yield f"/{service.name}/{method.name}", method.server_streaming


def refused(channel: grpc.Channel, method: str, metadata: Metadata, *, streams: bool) -> str:
    """The words with which a call is refused for who makes it; empty where it is for any other reason, or none."""
    # Nothing else: it changes nothing, or is refused as bad.
    message = OF_OBSERVERS.get(method, b"")
    asked = {"metadata": metadata, "timeout": DEADLINE_SECONDS}
    try:
        if streams:
            # One is enough to see, and some calls go on for long.
            answers = channel.stream_stream(method)(iter([message]), **asked)
            next(answers, None)
            answers.cancel()
        else:
            channel.stream_unary(method)(iter([message]), **asked)
    except grpc.RpcError as error:
        words = error.details() or ""
        return words if error.code() is grpc.StatusCode.UNAUTHENTICATED or " is for the role " in words else ""
    return ""


@pytest.mark.parametrize("by", ["tokens", "certificates"])
def test_every_call_is_taken_from_the_roles_of_the_table_alone(start_server, holders, by):
    certified = by == "certificates"
    server = start_server(*(holders.by_certificates() if certified else holders.by_tokens(*ROLES)))
    for port, address in (("data", server.data), ("control", server.control)):
        tried = set()
        # Without a certificate nobody gets a connection: see test_tls.py.
        for role in ROLES if certified else (None, *ROLES):
            with holders.channel(address, role if certified else None) as channel:
                metadata = () if certified else holders.metadata(role)
                for method, streams in methods_at(channel, holders.metadata(Role.OBSERVER)):
                    tried.add(method)
                    assert method in PORTS[port], f"{method} has no row in the table"
                    words = refused(channel, method, metadata, streams=streams)
                    assert (words == "") == ((role or Role.ANYBODY) >= PORTS[port][method]), (method, role, words)
                    needed = PORTS[port][method].word
                    assert not words or role is None or (needed in words and ("--role" in words) == certified), words
        assert {row for row in PORTS[port] if row.startswith("/")} == tried, "each row is of a call"
    assert "a bug in the server" not in server.output()


def listening() -> dict[tuple[object, ...], str]:
    own = {f"socket:[{link.rpartition('[')[2]}" for link in _links()}
    found: dict[tuple[object, ...], str] = {}
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            # gRPC's sockets speak both versions of IP.
            host = connection.laddr.ip.removeprefix("::ffff:")
            found["tcp", connection.fd, connection.laddr.port] = f"{host}:{connection.laddr.port}"
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        # The flag that a listening socket has.
        if f"socket:[{fields[6]}]" in own and int(fields[3], 16) & 0x10000:
            found["unix", fields[6]] = fields[7]
    return found


def _links() -> list[str]:
    folder = Path("/proc/self/fd")
    links = []
    for path in folder.iterdir():
        try:
            links.append(str(path.readlink()))
        except OSError:
            # That of the folder itself.
            continue
    return links


def test_a_server_listens_nowhere_but_at_the_ports_of_the_table(start_server):
    before = listening()
    server = start_server()
    opened = {address for key, address in listening().items() if key not in before}

    with WireWorker(server.data) as worker:
        reply = worker.hello()
    found = {
        "data": server.data,
        "control": server.control,
        "metrics": server.metrics,
        "lane": f"127.0.0.1:{reply.lane.port}",
        "shared memory": reply.local.address,
    }
    assert found.keys() == PORTS.keys()
    # No row that nothing reads.
    assert not PORTS["lane"] and not PORTS["shared memory"]
    assert opened == set(found.values())


def test_an_observer_reads_all_and_changes_nothing(start_server, holders):
    server = start_server(*holders.by_tokens(*ROLES))
    observer = holders.token(Role.OBSERVER)
    with WireWorker(server.data, token=holders.token(Role.WORKER)) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        with WireWorker(server.data, token=observer) as thief:
            # With the worker's own secret too.
            thief.sender.CopyFrom(worker.sender)
            push = partial(thief.push, thief.push_request(1.0))
            for call in (push, thief.pull, thief.heartbeat, thief.leave, thief.hello):
                assert refusal_of(call)[:2] == ("PERMISSION_DENIED", "NotAllowed")
        words = r"Hello as a worker is for the role worker, and .* is observer: show .*--token-file \(PYPS_TOKEN_FILE\)"
        with pytest.raises(NotAllowed, match=words):
            make_client(server.data, token=observer, run_id="run-1")
        with Observer(launch=Launch(server.data, token=observer)) as reader:
            assert set(reader.snapshot()["layer.bias"]) == {-1.0}


def test_each_command_shows_its_roles_token(start_server, holders, tmp_path):
    server = start_server(*holders.by_tokens(*ROLES), "--checkpoint-dir", str(tmp_path))
    files = {variable_name(field): str(holders.token_file(role)) for role, field in FIELDS.items()}
    workers = {"PYPS_TOKEN_FILE": files["PYPS_TOKEN_FILE"]}
    with WireWorker(server.data, token=holders.token(Role.WORKER)) as worker:
        worker.join()
        assert "wrote" in shell("save", "--servers", server.control, **files)
        found = shell("save", "--servers", server.control, status=1, **workers)
        assert "role operator" in found and "--operator-token-file (PYPS_OPERATOR_TOKEN_FILE)" in found
        for variable, file in files.items():
            assert "run-1" in shell("status", "--servers", server.control, **{variable: file})
        model = str(tmp_path / "model.safetensors")
        assert model in shell("export", model, "--servers", server.data, **files)


def test_the_lesser_of_token_and_certificate_counts(start_server, holders):
    server = start_server(*holders.by_certificates(), *holders.by_tokens(*ROLES))
    for certificate, token in itertools.product(ROLES, ROLES):
        with holders.channel(server.control, certificate) as channel:
            for method in ("GetStatus", "Stop"):
                words = refused(channel, METHODS[method], holders.metadata(token), streams=False)
                assert (words == "") == (min(certificate, token) >= PORTS["control"][METHODS[method]]), words
                assert not words or ("--operator-token-file" in words and "--role operator" in words)
