"""Where servers are found: in lists, in files, behind a name that stands for all of them."""

import os
import socket

import pytest

from pyps_client.launch import Launch, parse_servers
from pyps_client.places import address_of, places_of
from pyps_wire.errors import InvalidArgument, ServerUnavailable


def test_a_file_names_a_server_a_line_and_is_read_anew_each_time(tmp_path):
    file = tmp_path / "servers"
    file.write_text("# both of them\n a:1 \n\nb  # at the usual port\n", encoding="utf-8")

    launch = Launch(servers=f"file:{file}")  # type: ignore[arg-type]

    assert launch.servers == (f"file:{file}#0", f"file:{file}#1")
    # What was taken apart stays as it is.
    assert parse_servers(launch.servers) == launch.servers
    assert [address_of(place) for place in launch.servers] == ["a:1", "b:7610"]
    assert [address_of(place, port=7611) for place in launch.servers] == ["a:1", "b:7611"]
    file.write_text("c:3", encoding="utf-8")
    assert address_of(launch.servers[0]) == "c:3"
    with pytest.raises(ServerUnavailable, match="no address in line 2"):
        address_of(launch.servers[1])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "/servers, which should name the servers, cannot be read: No such file or directory"),
        (b"\xff", "cannot be read: it is not text"),
        (b"# none yet\n", "names no server: expected an address a line"),
        (b"a:1\nb:port\n", "'b:port' is malformed: expected host:port"),
        (b"#" * 2**20 + b"\na:1", "is larger than 1 MiB: give another file"),
    ],
)
def test_a_file_of_no_use_is_refused(tmp_path, written, message):
    file = tmp_path / "servers"
    if written is not None:
        file.write_bytes(written)
    with pytest.raises(InvalidArgument, match=message):
        parse_servers(f"file:{file}")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InvalidArgument, match="should name the servers, is not a file"):
            parse_servers(f"file:{path}")


def test_a_file_of_another_systems_editor_is_read(tmp_path):
    (tmp_path / "servers").write_bytes(b"\xef\xbb\xbfa:1\r\nb:2\r\n")
    places = parse_servers(f"file:{tmp_path}/servers")
    assert [address_of(place) for place in places] == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a..b:7610", "'a..b:7610' has no host: each part of a name, between dots, has 1 to 63 characters"),
        (f"{'a' * 64}", "has no host"),
        ("dns:2@a..b:7610", "has no host"),
        ("dns:2@a..b:7610#1", "has no host"),
        (f"host:{'1' * 5000}", "expected 1 to 65535"),
        ("dns:1@localhost:7610#7", "names no server: they are numbered #0 to #0"),
        (f"dns:1@localhost:7610#{'7' * 5000}", "expected dns:COUNT@name:port"),
    ],
)
def test_what_cannot_be_looked_up_is_refused(given, message):
    with pytest.raises(InvalidArgument, match=message):
        parse_servers(given)


@pytest.mark.parametrize("given", ["dns:pyps:7610", "dns:0@pyps", "dns:two@pyps", "dns:2@", "dns:"])
def test_a_name_has_to_say_how_many_servers_it_stands_for(given):
    with pytest.raises(InvalidArgument, match="expected dns:COUNT@name:port, such as dns:2@pyps:7610"):
        parse_servers(given)


def test_servers_behind_a_name_say_their_place_or_are_counted_by_address(monkeypatch):
    hosts = {"10.0.0.3", "10.0.0.2"}
    own: dict[str, int | None] = {}

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        # In any order, of both kinds, and each host twice.
        ends = [(socket.AF_INET6, 0, 0, "", ("fd00::2", port, 0, 0))]
        return [*ends, *((socket.AF_INET, 0, 0, "", (each, port)) for each in (*hosts, *hosts))]

    def index_at(address: str) -> int | None:
        host = address.rpartition(":")[0]
        if host in own and own[host] == -1:
            raise ServerUnavailable("connection refused")
        return own.get(host)

    def found() -> list[str]:
        return [address_of(place, index_at=index_at) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    places = places_of("dns:2@pyps")
    assert places == ["dns:2@pyps:7610#0", "dns:2@pyps:7610#1"]
    assert found() == ["10.0.0.2:7610", "10.0.0.3:7610"]
    # The first has moved, and knows from its checkpoint that it is the first.
    hosts -= {"10.0.0.2"}
    hosts |= {"10.0.0.9"}
    own |= {"10.0.0.3": 1, "10.0.0.9": 0}
    assert found() == ["10.0.0.9:7610", "10.0.0.3:7610"]
    # What is left is the place of one that knows none; one that ended, and is still looked up, is none.
    own["10.0.0.9"] = None
    hosts |= {"10.0.0.5"}
    own["10.0.0.5"] = -1
    assert found() == ["10.0.0.9:7610", "10.0.0.3:7610"]
    own["10.0.0.9"] = -1
    assert address_of(places[1], index_at=index_at) == "10.0.0.3:7610"
    with pytest.raises(ServerUnavailable, match="pyps has the addresses of 1 of 2 servers that answer"):
        found()
    hosts.clear()
    with pytest.raises(ServerUnavailable, match="pyps cannot be looked up: Name or service not known"):
        found()
