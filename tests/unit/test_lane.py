import ctypes
import ctypes.util
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps.certificates import Authority
from pyps.service.tls import Tls
from pyps_client.transport.grpc import KEEPALIVE_TIMEOUT_SECONDS
from pyps_wire.lane import KEEPALIVE_SECONDS, Lane, LaneClosed, SecureLane


class Late(Exception):
    pass


def raise_late() -> None:
    raise Late


@pytest.mark.parametrize(
    "take",
    [
        lambda end: Lane(end, waited=raise_late).receive(header_bytes_max=10),
        lambda end: Lane(end, waited=raise_late).receive_into(memoryview(bytearray(10))),
        lambda end: SecureLane(
            end, ssl.create_default_context(), server_hostname="localhost", waited=raise_late
        ).handshake(),
    ],
    ids=["a header", "a payload", "a record"],
)
def test_who_receives_looks_at_its_deadline_whenever_a_part_has_come(take):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dripping = socket.create_connection(listening.getsockname())
        end, _ = listening.accept()
    with dripping, end:
        dripping.sendall(b"\x16\x03")
        # There is no more to wait for: whoever does not look finds the lane closed.
        dripping.shutdown(socket.SHUT_WR)
        with pytest.raises(Late):
            take(end)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux gives up what is not answered")
def test_a_lane_over_a_cut_link_is_given_up_as_soon_as_grpc_would_be():
    with socket.socket() as end:
        Lane(end)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * KEEPALIVE_TIMEOUT_SECONDS
        # Who only waits asks now and then whether the other end is there.
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        pauses = [end.getsockopt(socket.IPPROTO_TCP, one) for one in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
        assert pauses == [KEEPALIVE_SECONDS, KEEPALIVE_SECONDS]


@pytest.mark.skipif(not ctypes.util.find_library("ssl"), reason="OpenSSL is not to be had by itself")
def test_who_asks_for_new_keys_without_end_loses_its_lane(tmp_path):
    # Python has no words for a change of keys: OpenSSL's own, for which the other end owes an answer of some 30 bytes.
    openssl = ctypes.CDLL(ctypes.util.find_library("ssl") or "libssl.so")
    authority = Authority(tmp_path, create=True)
    authority.make_server(["localhost"], days=2)
    tls = Tls(cert=tmp_path / "server.crt", key=tmp_path / "server.key", client_ca=None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        asking = socket.create_connection(listening.getsockname())
        end, _ = listening.accept()
    lane = SecureLane(end, tls.context())
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    asker = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with asking, end, ThreadPoolExecutor(1) as pool:
        done = pool.submit(lane.handshake)
        while True:
            try:
                asker.do_handshake()
                break
            except ssl.SSLWantReadError:
                asking.sendall(outgoing.read())
                incoming.write(asking.recv(2**16))
        asking.sendall(outgoing.read())
        done.result(10)
        # In a Python object of OpenSSL's connection its address comes fourth.
        connection = ctypes.c_void_p((ctypes.c_void_p * 4).from_address(id(asker._sslobj))[3])
        for _ in range(2000):
            assert openssl.SSL_key_update(connection, 1) == 1 and openssl.SSL_do_handshake(connection) == 1
        asking.sendall(outgoing.read())
        end.settimeout(10)
        with pytest.raises(LaneClosed):
            lane.receive(header_bytes_max=10)
        assert lane._outgoing.pending < 2**19
