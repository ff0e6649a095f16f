"""TLS on every port of a server, with certificates of both ends, and what is said where it cannot be."""

import re
import shutil
import socket
import ssl
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from certified import served, shown
from client_support import CuttingProxy, Reference, gradients_like, make_client, small_model
from pyps.config import ConfigError
from pyps_client.credentials import Credentials
from pyps_client.retry import LinkLost
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.transport.tcp import TcpLane
from pyps_wire.errors import InvalidArgument, NotAuthenticated
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, LaneOffer
from support import Start, replace_file, server_port, shell, wait_until


def variables(settings: dict[str, str]) -> dict[str, str]:
    return {f"PYPS_{name.upper()}": path for name, path in settings.items()}


def test_a_worker_trains_over_mutual_tls_on_all_ports(start_server: Start, made: Path) -> None:
    own = shown(made / "sound", mutual=True)
    server = start_server(*served(made / "sound", mutual=True), "--local-socket", "off")
    model = small_model()
    reference = Reference(model)
    for transport, taken in (("grpc", "grpc"), ("auto", "tcp")):
        with make_client(server.data, run_id="mine", transport=transport, **own) as client:
            for step in range(3):
                client.push(gradients_like(model, step))
                reference.step(gradients_like(model, step))
                reference.check(client.pull())
            assert client.session.transport == taken
        assert "worker joined" in shell("status", "--servers", server.control, **variables(own))
    assert "SERVING" in shell("health", "--servers", server.data, **variables(own))
    assert "nothing is wrong" in shell("certs", "check", "--servers", server.data, **variables(own))
    url = f"https://{server.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=20, context=Credentials(**own).context()) as page:
        assert b"pyps_updates_total" in page.read()
    for refused in (f"http://{server.metrics}/metrics", url):
        with pytest.raises(OSError):
            context = Credentials(tls_ca=own["tls_ca"]).context() if refused == url else None
            urllib.request.urlopen(refused, timeout=20, context=context).read()
    server.wait_for_output("PEER_DID_NOT_RETURN_A_CERTIFICATE")


def served_by(made: Path, kind: str) -> list[str]:
    """A server's flags by the folder of its certificates; "mutual" requires one of callers, and "" is in the clear."""
    name, _, mutual = kind.partition(" ")
    return served(made / name, mutual=bool(mutual)) if name else []


def shown_by(made: Path, kind: str) -> dict[str, str]:
    name, _, mutual = kind.partition(" ")
    return shown(made / name, mutual=bool(mutual)) if name else {}


CLOSED = "closed the connection|ALERT"
SOUND, MUTUAL = "sound", "sound mutual"
# What the server has, what the caller has, what OpenSSL says to the caller, and what `pyps certs check` does.
REFUSALS = {
    "an expired server": ("expired", SOUND, "certificate has expired", "its certificate has expired: make another"),
    "a server of another name": (SOUND, SOUND, "IP address mismatch", "its certificate is not for 127.0.0.2: .*--host"),
    "a server of another CA": (
        *("strange", SOUND, "unable to get|certificate signature failure|self.signed"),
        "its certificate is not signed by .*sound/ca.crt: set PYPS_TLS_CA",
    ),
    "a plain server": ("", SOUND, "WRONG_VERSION|RECORD_LAYER", "it does not answer by TLS .*unset PYPS_TLS_CA"),
    "a caller without a certificate": (
        *(MUTUAL, SOUND, "closed the connection|CERTIFICATE_REQUIRED"),
        "it wants a certificate: set PYPS_TLS_CERT and PYPS_TLS_KEY",
    ),
    "an expired caller": (MUTUAL, "expired mutual", CLOSED, "it refuses .*worker.crt, which has expired"),
    "a caller of tomorrow": (
        *(MUTUAL, "early mutual", CLOSED),
        "it refuses .*worker.crt, which is not valid yet: compare this machine's clock",
    ),
    "a caller of another CA": (
        *(MUTUAL, "strange mutual", CLOSED),
        "it refuses .*: the server's --tls-client-ca has not signed it",
    ),
    "a plain caller": (SOUND, "", "takes TLS only: set tls_ca", "it takes TLS only: set PYPS_TLS_CA"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_certificates_are_reported_to_workers_and_commands(start_server: Start, made: Path, case: str) -> None:
    has, shows, reason, words = REFUSALS[case]
    own = shown_by(made, shows)
    server = start_server(*served_by(made, has), *(["--host", "127.0.0.2"] if "name" in case else []))
    command = ("--servers", server.data)
    began = time.monotonic()

    with pytest.raises(NotAuthenticated, match=rf"{re.escape(server.data)}.*({reason})"):
        make_client(server.data, start_wait_seconds=300.0, **own)
    status = shell("status", *command, status=1, **variables(own))
    assert re.search(reason, status) and status.count("\n") == 1
    assert re.search(reason, shell("health", *command, status=1, **variables(own)))
    checked = shell("certs", "check", *command, status=1, **variables(own))
    assert re.match(f"{re.escape(server.data)}: {words}", checked), checked
    assert time.monotonic() - began < 20


def test_a_port_that_is_not_grpc_s_is_reported_at_once(start_server: Start, made: Path) -> None:
    lane_port = str(server_port())
    server = start_server(*served(made / "sound", mutual=True), "--lane-port", lane_port)
    for address in (f"127.0.0.1:{lane_port}", server.metrics):
        found = f"{re.escape(address)} answers by TLS, but not as gRPC: .* data port"
        with pytest.raises(NotAuthenticated, match=found):
            make_client(address, start_wait_seconds=300.0, **shown(made / "sound", mutual=True))


def test_certificates_are_renewed_while_a_worker_trains(start_server: Start, made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    server = start_server(*served(folder, mutual=True))
    own, former = shown(folder, mutual=True), shown(made / "sound", mutual=True)
    ask = ("status", "--servers", server.control)
    model = small_model()
    reference = Reference(model)
    with (
        closing(CuttingProxy(server.data)) as proxy,
        make_client(proxy.address, run_id="mine", transport="grpc", **own) as client,
    ):

        def train() -> None:
            client.push(gradients_like(model, 0))
            reference.step(gradients_like(model, 0))
            reference.check(client.pull())

        train()
        # What is of no use changes nothing.
        replace_file(folder / "server.key", (made / "strange" / "server.key").read_text(encoding="utf-8"))
        assert "worker joined" in shell(*ask, **variables(own))
        server.wait_for_output("the certificates stay as they were")

        # Another CA altogether: who trusts the former one, or shows what it signed, no longer gets in.
        for path in (made / "strange").iterdir():
            replace_file(folder / path.name, path.read_text(encoding="utf-8"))
        train()
        assert "pyps certs check" in shell(*ask, status=1, **variables(former))
        assert "worker joined" in shell(*ask, **variables(own))
        # On a new connection too.
        proxy.cut()
        train()
        with make_client(server.data, run_id="mine", worker_id="late", transport="tcp", **own) as late:
            reference.check(late.pull())

    # The CA of callers alone.
    replace_file(folder / "ca.crt", (made / "sound" / "ca.crt").read_text(encoding="utf-8"))
    trusted = {"tls_ca": str(made / "strange" / "ca.crt")}
    strange = shown(made / "strange", mutual=True) | trusted
    assert "pyps certs check" in shell(*ask, status=1, **variables(strange))
    assert "worker joined" in shell(*ask, **variables(former | trusted))


def test_an_expired_certificate_replaces_no_good_one(start_server: Start, made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    server = start_server(*served(folder))
    own = variables(shown(made / "sound"))
    assert "SERVING" in shell("health", "--servers", server.data, **own)
    for name in ("server.key", "server.crt"):
        replace_file(folder / name, (made / "expired" / name).read_text(encoding="utf-8"))
    assert "SERVING" in shell("health", "--servers", server.data, **own)
    found = server.wait_for_output("server.crt is valid from")
    assert re.search(
        "the certificates stay as they were reason=.*server.crt is valid from .* only: make another", found
    )
    start_server(*served(made / "expired")).wait_for_output("no caller will trust this server")


def test_future_certificates(start_server: Start, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    server = start_server(*served(folder))
    host, port = server.metrics.split(":")

    def shown_by_it() -> x509.Certificate:
        return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port)), timeout=20).encode())

    former = shown_by_it()
    for name in ("server.key", "server.crt"):
        replace_file(folder / name, (made / "early" / name).read_text(encoding="utf-8"))
    assert shown_by_it() == former
    server.wait_for_output("it takes effect then")

    class Later(datetime):
        @classmethod
        def now(cls, zone: tzinfo | None = None) -> datetime:
            return datetime.now(zone) + timedelta(hours=2)

    monkeypatch.setattr("pyps.service.tls.datetime", Later)
    assert shown_by_it() == x509.load_pem_x509_certificate((made / "early" / "server.crt").read_bytes())


@pytest.mark.parametrize("kind", ["Ed25519", "Ed448", "secp521r1", "secp256k1", "RSA of 1024 bits"])
def test_a_key_unknown_to_grpc_is_refused_by_name(start_server: Start, made: Path, tmp_path: Path, kind: str) -> None:
    made_with = {
        "Ed25519": ed25519.Ed25519PrivateKey.generate,
        "Ed448": ed448.Ed448PrivateKey.generate,
        "secp521r1": lambda: ec.generate_private_key(ec.SECP521R1()),
        "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
        "RSA of 1024 bits": lambda: rsa.generate_private_key(65537, 1024),
    }
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    server = start_server(*served(folder))
    key: Any = made_with[kind]()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    begun = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    begun = begun.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
    certificate = begun.sign(key, None if kind.startswith("Ed") else SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    replace_file(folder / "server.key", pem)
    replace_file(folder / "server.crt", certificate.public_bytes(Encoding.PEM).decode())

    assert "SERVING" in shell("health", "--servers", server.data, **variables(shown(made / "sound")))
    found = server.wait_for_output("the certificates stay as they were")
    refused = "KEY_TOO_SMALL" if kind.startswith("RSA") else rf"a key that gRPC does not take \({kind}\)"
    assert re.search(refused, found)
    with pytest.raises(ConfigError, match=f"--tls-cert .*{refused}"):
        start_server(*served(folder))


@pytest.mark.parametrize("problem", ["cannot be used", "pyps certs check"])
def test_a_worker_waits_for_key_and_certificate(start_server: Start, made: Path, tmp_path: Path, problem: str) -> None:
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    server = start_server(*served(made / "sound", mutual=True))
    with (
        make_client(server.data, transport="grpc", **shown(folder, mutual=True)) as client,
        ThreadPoolExecutor() as aside,
    ):
        [connection] = client.session._servers.connections
        lost = connection.outage.lost
        if problem == "cannot be used":
            (folder / "worker.key").unlink()
        else:
            put_worker(made / "expired", folder)
        connection.cancel()
        pulled = aside.submit(client.pull)
        wait_until(
            lambda: pulled.done() or any(x.num_waits and problem in x.problem for x in list(lost.values())),
            what="a try that fails",
        )
        assert not pulled.done()
        put_worker(made / "sound", folder)
        pulled.result(20)


def test_an_expired_lane(start_server: Start, made: Path, tmp_path: Path, proxies: dict[int, CuttingProxy]) -> None:
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    server = start_server(*served(made / "sound", mutual=True), "--local-socket", "off")
    model = small_model()
    reference = Reference(model)
    with make_client(server.data, loss_wait_seconds=2.0, **shown(folder, mutual=True)) as client:
        for step, transport in enumerate(("tcp", "grpc")):
            reference.step(gradients_like(model, step))
            reference.check(client.exchange(gradients_like(model, step)))
            assert client.session.transport == transport
            put_worker(made / "expired", folder)
            for proxy in proxies.values():
                proxy.cut()


def put_worker(made: Path, folder: Path) -> None:
    for name in ("worker.key", "worker.crt"):
        replace_file(folder / name, (made / name).read_text(encoding="utf-8"))


def test_files_being_renewed_are_not_blamed(start_server: Start, made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "sound", tmp_path / "sound")
    channel = GrpcChannel(start_server().data, Credentials(**shown(folder, mutual=True)), use_proxy=False)
    (folder / "worker.key").rename(folder / "former.key")
    with closing(channel):
        with pytest.raises(LinkLost, match="failed to connect"):
            channel.call("Heartbeat", HeartbeatRequest(), HeartbeatReply, timeout_seconds=20.0)
        (folder / "former.key").rename(folder / "worker.key")
        with pytest.raises(NotAuthenticated, match="pyps certs check"):
            channel.call("Heartbeat", HeartbeatRequest(), HeartbeatReply, timeout_seconds=20.0)


def test_files_of_no_use_are_refused_by_name_at_the_start(start_server: Start, made: Path, tmp_path: Path) -> None:
    sound, strange, no_file = made / "sound", made / "strange", tmp_path / "none"
    own, garbage = shown(sound, mutual=True), tmp_path / "garbage"
    garbage.write_text("no certificate", encoding="utf-8")
    for flags, words in (
        (["--tls-cert", str(sound / "server.crt"), "--tls-key", str(strange / "server.key")], "KEY_VALUES_MISMATCH"),
        (["--tls-cert", str(no_file), "--tls-key", str(no_file)], f"--tls-cert {no_file} .*No such file"),
        ([*served(sound), "--tls-client-ca", str(sound / "ca.key")], "--tls-client-ca .*ca.key cannot be used"),
        (["--tls-cert", str(garbage), "--tls-key", str(sound / "server.key")], "no PEM certificate or key is there"),
        (["--tls-cert", str(sound / "server.crt")], "needs the certificate's key: give --tls-key too"),
    ):
        with pytest.raises(ConfigError, match=words):
            start_server(*flags)
    for settings, words in (
        ({"tls_ca": str(no_file)}, "tls_ca .*none, which cannot be used .*No such file"),
        ({**own, "tls_cert": str(no_file)}, r"^tls_cert \(PYPS_TLS_CERT\) names .*none, which .*\(No such file"),
        ({**own, "tls_key": str(no_file)}, r"^tls_key \(PYPS_TLS_KEY\) names .*none, which .*\(No such file"),
        ({**own, "tls_key": str(strange / "worker.key")}, "^tls_cert and tls_key .*MISMATCH"),
        ({**own, "tls_ca": str(garbage)}, r"^tls_ca .*garbage, .* \(no PEM certificate or key is there"),
        ({**own, "tls_cert": str(garbage)}, r"^tls_cert and .*garbage .* \(no PEM certificate or key is there"),
        ({**own, "tls_key": str(garbage)}, r"^tls_cert and .*garbage, .* \(no PEM certificate or key is there"),
        ({**own, "tls_key": ""}, "tls_key is not given"),
        ({"tls_cert": "a", "tls_key": "b"}, "tls_ca is not given"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            make_client("127.0.0.1:1", **settings)


@pytest.mark.parametrize("mutual", [False, True])
def test_ends_that_agree_on_no_tls_learn_it_from_the_alert(made: Path, mutual: bool) -> None:
    own = Credentials(**shown(made / "sound", mutual=mutual))
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), own.context()
    theirs.load_cert_chain(made / "sound" / "server.crt", made / "sound" / "server.key")
    theirs.maximum_version, ours.minimum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, worker = theirs.wrap_bio(there, back, server_side=True), ours.wrap_bio(back, there, server_hostname="a")
    with pytest.raises(ssl.SSLWantReadError):
        worker.do_handshake()
    with pytest.raises(ssl.SSLError):
        server.do_handshake()
    with pytest.raises(ssl.SSLError) as alert:
        worker.do_handshake()
    found = own.explained("a:7610", alert.value)
    assert "PROTOCOL_VERSION" in found and "`pyps certs check --servers a:7610`" in found


# What stands at the lane's port instead of the server's own, what the worker shows, and what it hears.
LANES = {
    "in the clear": ("", SOUND, "TLS with {} failed"),
    "by TLS alone": (SOUND, "", "the lane was closed at once, .*TLS only: set tls_ca"),
    "of another CA": ("strange", SOUND, "TLS with {} failed"),
    "for callers with certificates": (MUTUAL, SOUND, "TLS with {} failed"),
}


@pytest.mark.parametrize("case", LANES)
def test_no_gradient_goes_by_a_lane_that_is_not_secured_as_the_worker_is(
    start_server: Start, made: Path, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has, shows, words = LANES[case]
    own = shown_by(made, shows)
    server = start_server("--local-socket", "off", *(served(made / "sound") if own else []))
    port = server_port()
    start_server("--lane-port", str(port), *served_by(made, has))
    offered = TcpLane.offered
    monkeypatch.setattr(TcpLane, "offered", lambda lane, offer: offered(lane, LaneOffer(port=port, ticket=b"x")))
    model = small_model()
    reference = Reference(model)

    with caplog.at_level("INFO"), make_client(server.data, **own) as client:
        for step in range(2):
            reference.step(gradients_like(model, step))
            reference.check(client.exchange(gradients_like(model, step)))
        assert client.session.transport == "grpc"

    found = words.format(f"127.0.0.1:{port}")
    assert len(re.findall(f"by gRPC: no lane at port {port}: .*{found}", caplog.text)) == 1


@pytest.mark.parametrize("at", ["callers at the lane", "readers of metrics"])
def test_tls_refusals_are_counted_and_the_newest_logged(start_server: Start, made: Path, at: str) -> None:
    lane_port = str(server_port())
    server = start_server("--lane-port", lane_port, *served(made / "sound"))
    port = lane_port if "lane" in at else server.metrics.rpartition(":")[2]
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", int(port)), 20) as caller:
            caller.sendall(b"no TLS at all, and long enough to be read as such")
            # Once it is refused.
            with suppress(ConnectionResetError):
                while caller.recv(100):
                    continue

    def counts() -> list[int]:
        return [int(each) for each in re.findall(rf"{at} were refused by TLS count=(\d+) newest=127", server.output())]

    wait_until(lambda: sum(counts()) == 30, what="all to be logged")
    assert len(counts()) < 10


def test_a_silent_tls_lane_is_closed(start_server: Start, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyps.service.lane.connection.OPEN_SECONDS", 0.0)
    port = server_port()
    start_server("--lane-port", str(port), *served(made / "sound"))
    with socket.create_connection(("127.0.0.1", port), 20) as silent:
        assert silent.recv(1) == b""


def test_a_caller_that_ends_tls_is_disconnected(start_server: Start, made: Path) -> None:
    port = server_port()
    start_server("--lane-port", str(port), *served(made / "sound"))
    context = Credentials(tls_ca=shown(made / "sound")["tls_ca"]).context()
    end = socket.create_connection(("127.0.0.1", port), 4)
    with context.wrap_socket(end, server_hostname="127.0.0.1") as caller:
        caller.sendall(b"a part")
        # The server closes what is over and says nothing.
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            caller.unwrap()
