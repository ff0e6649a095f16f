"""Connections between a server and its standby, and the question whether a server that does not answer is gone."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pyps.certificates import describe
from pyps.config import ServerConfig
from pyps.service.hosting import address_of, listening_socket
from pyps_wire import standby_pb2 as wire
from pyps_wire.contract import METHODS
from pyps_wire.errors import METADATA_KEY, PypsError, ServerUnavailable, from_status

# How long a server may take to accept a connection, and to answer a question.
ANSWER_SECONDS = 2.0


class Found(Enum):
    """What is at an address."""

    # Something listens there.
    OPEN = "open"
    # Its machine answers that nothing listens there: the server has ended.
    REFUSED = "refused"
    # No answer.
    SILENT = "silent"


async def look(address: str) -> Found:
    """Return what is at an address."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return Found.REFUSED
    except (OSError, TimeoutError):
        return Found.SILENT
    writer.close()
    return Found.OPEN


def is_loopback(address: str) -> bool:
    """Return whether an address is of this machine, so that no proxy can refuse a connection in a server's place."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_unspecified(host: str) -> bool:
    """Return whether it is the address of every interface, by which nobody finds a machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    return False


def own_address(config: ServerConfig, bound: str) -> str:
    """Return where others find this server: at a host of every interface by the name that its certificate gives it.

    Without a certificate they find it where it calls from. Raises ServerUnavailable where no name leads here (yet).
    """
    host, _, port = bound.rpartition(":")
    if not is_unspecified(host) or config.tls_cert is None:
        return bound
    names = [name for name in describe(config.tls_cert).names if not is_loopback(f"{name}:")]
    for name in names:
        if (end := listening_socket(name, 0)) is not None:
            end.close()
            return address_of(name, int(port))
    raise ServerUnavailable(
        f"its certificate {config.tls_cert} is for {', '.join(names) or 'loopback'}, which is no address of this "
        "machine"
    )


class Link:
    """Calls of one server to another, with the token and certificates that it has itself."""

    def __init__(self, config: ServerConfig, address: str):
        self.address = address
        self._config = config

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[grpc.aio.Channel]:
        config = self._config
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        # Each try is one: the caller has a pace of its own. No proxy stands between servers.
        options += [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
        ca = config.tls_client_ca or os.environ.get("PYPS_TLS_CA")
        if ca is None or config.tls_cert is None or config.tls_key is None:
            channel = grpc.aio.insecure_channel(self.address, options)
        else:
            files = [Path(file).read_bytes() for file in (ca, config.tls_key, config.tls_cert)]
            channel = grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(*files), options)
        async with channel:
            yield channel

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        file = self._config.operator_token_file or self._config.token_file
        if file is None:
            return ()
        token = file.read_text(encoding="utf-8").strip().partition("\n")[0].strip()
        return (("authorization", f"Bearer {token}"),)

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[Any]:
        """Open a stream of `Follow`, on bytes. An error of the other server's is raised as its own."""
        try:
            async with self._channel() as channel:
                call: Any = channel.stream_stream(METHODS["Follow"])(metadata=self._metadata)
                try:
                    yield call
                except asyncio.InvalidStateError as error:
                    # A message to a call that has ended already.
                    raise ServerUnavailable(str(error)) from None
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            raise _own(error) from None

    async def meet(self, request: wire.MeetRequest) -> wire.MeetReply:
        """Ask the other server which of them serves."""
        try:
            async with self._channel() as channel:
                method: Any = channel.unary_unary(
                    METHODS["Meet"], wire.MeetRequest.SerializeToString, wire.MeetReply.FromString
                )
                return await method(request, timeout=ANSWER_SECONDS, metadata=self._metadata)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise _own(error) from None


def _own(error: grpc.aio.AioRpcError) -> PypsError:
    name = next((str(value) for key, value in error.trailing_metadata() or () if key == METADATA_KEY), None)
    return from_status(error.code().name, error.details() or error.code().name, name)
