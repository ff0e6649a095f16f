"""The places of servers, from which their present addresses are found: addresses, lines of a file, a DNS name.

A place is a line of text: "host:7610"; "file:/path#1", the second line of a file; or "dns:2@name:7610#1", the second of
two servers whose addresses a DNS name has.
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
_FILE_BYTES_MAX = 2**20
_OF_SEVERAL = re.compile(r"(?P<all>(file|dns):.+)#(?P<index>[0-9]{1,4})")


def places_of(servers: str, *, port: int = DATA_PORT) -> list[str]:
    """Return the places that a text names, in order. Raises InvalidArgument."""
    if match := _OF_SEVERAL.fullmatch(servers):
        if servers.startswith(FILE):
            return [servers]
        places, index = places_of(match["all"], port=port), int(match["index"])
        if index >= len(places):
            raise InvalidArgument(f"{servers!r} names no server: they are numbered #0 to #{len(places) - 1}.")
        return [places[index]]
    if servers.startswith(FILE):
        return [f"{servers}#{index}" for index in range(len(_read(servers, port)))]
    if servers.startswith(NAME):
        match = _NAME.fullmatch(servers)
        if match is None:
            raise InvalidArgument(
                f"{servers!r} does not name the servers: expected dns:COUNT@name:port, such as dns:2@pyps:{DATA_PORT} "
                "for two servers, whose addresses are all those of the name."
            )
        place = f"{NAME}{match['count']}@{parse_address(match['address'], port)}"
        return [f"{place}#{index}" for index in range(int(match["count"]))]
    return [parse_address(servers, port)]


def address_of(
    place: str, *, port: int = DATA_PORT, index_at: Callable[[str], int | None] = lambda address: None
) -> str:
    """Return the present address of a place's server, as host:port.

    `index_at(address)`: the index in the run of the server at an address, None if that server does not know it yet.
    Raises InvalidArgument, or ServerUnavailable if the address cannot be found now.
    """
    match = _OF_SEVERAL.fullmatch(place)
    if match is None:
        return place
    source, index = match["all"], int(match["index"])
    if source.startswith(NAME):
        return _find_by_name(source, index, index_at)
    addresses = _read(source, port)
    if index >= len(addresses):
        raise ServerUnavailable(f"{source.removeprefix(FILE)} has no address in line {index + 1} any more")
    return addresses[index]


def parse_address(address: str, default_port: int) -> str:
    """Return the address as host:port. Raises InvalidArgument."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise InvalidArgument(
            f"Server address {address!r} is malformed: expected host:port, such as 127.0.0.1:7610 or [::1]:7610."
        )
    port = str(match["port"] or default_port).lstrip("0")
    # int() refuses thousands of digits.
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
        # Reading from a pipe or a device might never end.
        if path.exists() and not path.is_file():
            raise InvalidArgument(f"{path}, which should name the servers, is not a file.")
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise InvalidArgument(f"{path}, which should name the servers, is larger than 1 MiB: give another file.")
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgument(f"{path}, which should name the servers, cannot be read: {reason}.") from None
    addresses = [address for line in lines if (address := line.partition("#")[0].strip())]
    if not addresses:
        raise InvalidArgument(f"{path} names no server: expected an address a line, as host:{DATA_PORT}.")
    return [parse_address(address, port) for address in addresses]


def _find_by_name(source: str, index: int, index_at: Callable[[str], int | None]) -> str:
    """Return the address of server number `index` among those of a DNS name.

    A server gets its index with the run's first parameters, and a restored server has it from the checkpoint. Servers
    without an index get the free indices in the order of their addresses, so that all callers number them alike. For
    that, all servers must answer.
    """
    count, _, address = source.removeprefix(NAME).partition("@")
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerUnavailable(f"{host} cannot be looked up: {error.strerror or error}") from None
    # If the servers have addresses of both kinds, IPv4 and IPv6, take one kind.
    family = min(each[0] for each in found)
    indices: dict[str, int | None] = {}
    for ip in sorted({str(each[4][0]) for each in found if each[0] == family}):
        server = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        # A server that does not answer has ended, or begins.
        with contextlib.suppress(ServerUnavailable):
            indices[server] = index_at(server)
            if indices[server] == index:
                return server
    without_index = [server for server, own in indices.items() if own is None]
    free = sorted(set(range(int(count))) - set(indices.values()))
    if len(without_index) != len(free):
        raise ServerUnavailable(f"{host} has the addresses of {len(indices)} of {count} servers that answer")
    return without_index[free.index(index)]
