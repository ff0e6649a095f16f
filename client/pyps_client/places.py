"""The places of servers, where they are found again after they moved: addresses, lines of a file, a DNS name of all.

A place is a line of text: "host:7610", which gRPC looks up by itself; "file:/path#1", the second line of a file; or
"dns:2@name:7610#1", the second of two servers, all of whose addresses the name stands for.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

from pyps_wire.contract import DATA_PORT
from pyps_wire.errors import InvalidArgument, ServerUnavailable

FILE, NAME = "file:", "dns:"
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)(:(?P<port>[0-9]+))?")
_NAME = re.compile(r"dns:(?P<count>[1-9][0-9]{0,3})@(?P<address>[^#@]+)")
# Far more than the addresses of all servers of a run.
_FILE_BYTES_MAX = 2**20
_OF_SEVERAL = re.compile(r"(?P<all>(file|dns):.+)#(?P<index>[0-9]{1,4})")


def places_of(servers: str, *, port: int = DATA_PORT) -> list[str]:
    """Return the places that one text names, in order. Raises InvalidArgument."""
    if match := _OF_SEVERAL.fullmatch(servers):
        if servers.startswith(FILE):
            return [servers]
        places, index = places_of(match["all"], port=port), int(match["index"])
        if index >= len(places):
            raise InvalidArgument(
                f"{servers!r} is none of its servers: they are counted from #0 to #{len(places) - 1}."
            )
        return [places[index]]
    if servers.startswith(FILE):
        return [f"{servers}#{index}" for index in range(len(_read(servers, port)))]
    if servers.startswith(NAME):
        match = _NAME.fullmatch(servers)
        if match is None:
            raise InvalidArgument(
                f"{servers!r} does not say which servers: expected dns:COUNT@name:port, such as dns:2@pyps:{DATA_PORT} "
                "for two servers, whose addresses are all that the name stands for."
            )
        place = f"{NAME}{match['count']}@{parse_address(match['address'], port)}"
        return [f"{place}#{index}" for index in range(int(match["count"]))]
    return [parse_address(servers, port)]


def address_of(
    place: str, *, port: int = DATA_PORT, index_at: Callable[[str], int | None] = lambda address: None
) -> str:
    """Where the server of a place is at this moment, as host:port.

    `index_at` asks a server at an address for its own index in the run: None while it has none. Raises InvalidArgument
    or ServerUnavailable while it is unknown.
    """
    match = _OF_SEVERAL.fullmatch(place)
    if match is None:
        return place
    of_all, index = match["all"], int(match["index"])
    if of_all.startswith(NAME):
        return _by_name(of_all, index, index_at)
    addresses = _read(of_all, port)
    if index >= len(addresses):
        raise ServerUnavailable(f"{of_all.removeprefix(FILE)} has no address in line {index + 1} any more")
    return addresses[index]


def parse_address(address: str, default_port: int) -> str:
    """Return the address as host:port. Raises InvalidArgument."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise InvalidArgument(
            f"Server address {address!r} is malformed: expected host:port, such as 127.0.0.1:7610 or [::1]:7610."
        )
    port = str(match["port"] or default_port).lstrip("0")
    # A port of thousands of digits is no number to Python.
    if len(port) > 5 or not 1 <= int(port or 0) <= 65535:
        raise InvalidArgument(f"Server address {address!r} has port {port or 0}; expected 1 to 65535.")
    try:
        match["host"].encode("idna")
    except UnicodeError:
        raise InvalidArgument(
            f"Server address {address!r} has no host: each part of a name, between dots, has 1 to 63 characters."
        ) from None
    return f"{match['host']}:{port}"


def _read(place: str, port: int) -> list[str]:
    """Return the addresses in a file, one a line; empty lines and comments (#) are ignored."""
    path = Path(place.removeprefix(FILE))
    try:
        # What is no file never ends, or never begins.
        if path.exists() and not path.is_file():
            raise InvalidArgument(f"{path}, which is to name the servers, is no file.")
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise InvalidArgument(f"{path}, which is to name the servers, is larger than 1 MiB: it names none.")
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InvalidArgument(f"{path}, which is to name the servers, cannot be read: {reason}.") from None
    addresses = [address for line in lines if (address := line.partition("#")[0].strip())]
    if not addresses:
        raise InvalidArgument(f"{path} names no server: expected an address a line, as host:{DATA_PORT}.")
    return [parse_address(address, port) for address in addresses]


def _by_name(place: str, index: int, index_at: Callable[[str], int | None]) -> str:
    """The address of one of a name's servers: the one that says so itself, else its turn among those that cannot say.

    Servers learn their index with the run's first parameters, and keep it in checkpoints. Until then all callers count
    them alike, by their addresses; so all of them have to be there.
    """
    count_text, _, address = place.removeprefix(NAME).partition("@")
    host, _, port = address.rpartition(":")
    count = int(count_text)
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerUnavailable(f"{host} cannot be looked up: {error.strerror or error}") from None
    # Of a host that has addresses of both kinds one is enough.
    family = min(each[0] for each in found)
    hosts = sorted({str(each[4][0]) for each in found if each[0] == family})
    # The indices that those which answer say of themselves.
    known: dict[str, int | None] = {}
    for each in (f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts):
        # One that does not answer ends, or is about to begin.
        with contextlib.suppress(ServerUnavailable):
            known[each] = index_at(each)
            if known[each] == index:
                return each
    unnumbered = [each for each, own in known.items() if own is None]
    missing = sorted(set(range(count)) - set(known.values()))
    if len(unnumbered) != len(missing):
        raise ServerUnavailable(f"{host} stands for {len(known)} of {count} servers that answer")
    return unnumbered[missing.index(index)]
