"""`pyps health`: whether servers serve, for health checks of containers and scripts."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pyps_client.launch import parse_servers


def health(
    servers: Annotated[
        str, typer.Option(help="Addresses to ask, data or control, separated by commas.")
    ] = "127.0.0.1:7610",
    timeout_seconds: Annotated[float, typer.Option(help="How long each may take to answer.", min=0.1)] = 5.0,
) -> None:
    """Ask servers for their health; exit with 0 when all of them serve. Needs no token."""
    answers = {address: ask(address, timeout_seconds=timeout_seconds) for address in parse_servers(servers)}
    for address, answer in answers.items():
        typer.echo(f"{address} {answer}")
    raise typer.Exit(0 if all(answer == "SERVING" for answer in answers.values()) else 1)


def ask(address: str, *, timeout_seconds: float) -> str:
    """The server's own word for its state, or why there is none."""
    # A proxy of the machine must not stand between a server and its health check.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
