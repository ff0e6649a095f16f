"""`pyps status`: what servers, workers and shards are doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyps.cli.control import SERVERS_HELP, TOKEN_HELP, Control, control_addresses, read_token
from pyps.units import in_bytes
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import PypsError

SHARDS_SHOWN = 20


@dataclass(frozen=True)
class Answer:
    """What one server said."""

    address: str
    status: pb.Status
    workers: Sequence[pb.WorkerInfo]
    shards: Sequence[pb.ShardInfo]

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON, by the names that grpcurl gives."""
        return {
            "address": self.address,
            "status": _plain(self.status),
            "workers": [_plain(worker) for worker in self.workers],
            "shards": [_plain(shard) for shard in self.shards],
        }


def status(
    servers: Annotated[str, typer.Option(help=SERVERS_HELP)] = "127.0.0.1:7611",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of tables.")] = False,
    all_shards: Annotated[bool, typer.Option("--all", help=f"Show all shards, not {SHARDS_SHOWN}.")] = False,
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, envvar="PYPS_TOKEN_FILE")] = None,
) -> None:
    """Show what servers, workers and shards are doing.

    Exits with 1 when a server does not answer; the others are shown all the same.
    """
    token = read_token(token_file)
    answers: list[Answer] = []
    errors: dict[str, str] = {}
    addresses = control_addresses(servers)
    for address in addresses:
        try:
            answers.append(_ask(address, token))
        except PypsError as error:
            errors[address] = str(error)
    if as_json:
        failed = [{"address": address, "error": message} for address, message in errors.items()]
        typer.echo(json.dumps({"servers": [*(answer.to_json() for answer in answers), *failed]}, indent=2))
    elif answers:
        _show(answers, shards_shown=None if all_shards else SHARDS_SHOWN)
        if not errors and (hint := not_asked([answer.status for answer in answers])):
            typer.echo(hint)
    for message in errors.values():
        typer.echo(f"pyps: {message}", err=True)
    raise typer.Exit(1 if errors else 0)


def _ask(address: str, token: str) -> Answer:
    with Control(address, token=token) as control:
        return Answer(
            address,
            control.call("GetStatus", pb.GetStatusRequest()),
            control.call("ListWorkers", pb.ListWorkersRequest()).workers,
            control.call("ListShards", pb.ListShardsRequest()).shards,
        )


def _show(answers: Sequence[Answer], *, shards_shown: int | None) -> None:
    console = Console()
    if not console.is_terminal:
        # In a pipe nothing needs to be squeezed into 80 columns.
        console = Console(width=200)
    console.print(_servers_table(answers))
    begun = any(answer.shards for answer in answers)
    if begun or any(answer.workers for answer in answers):
        console.print(_workers_table(answers))
    if begun:
        console.print(_shards_table(answers, shards_shown))
    else:
        data = ",".join(answer.status.data_address for answer in answers)
        console.print(Text(f"no run yet: a worker starts it (PYPS_SERVERS={data})"))
    for answer in answers:
        for reason in answer.status.waiting_for:
            console.print(Text(f"{answer.address} waits: {reason}"))


def not_asked(statuses: Sequence[pb.Status]) -> str:
    """A line about the run's servers that are not among these; empty where all are."""
    total = max((status.num_servers for status in statuses), default=0)
    asked = {status.server_index for status in statuses if status.num_servers}
    missing = [str(index) for index in range(total) if index not in asked]
    if not missing:
        return ""
    subject = f"server {missing[0]} of {total} was" if len(missing) == 1 else f"{len(missing)} of {total} servers were"
    return f"{subject} not asked: name all with --servers"


def _servers_table(answers: Sequence[Answer]) -> Table:
    """One column a server, so that the facts fit a narrow terminal."""
    table = Table(title="servers")
    table.add_column("control")
    for answer in answers:
        table.add_column(Text(answer.address))
    columns = [_facts(answer.status) for answer in answers]
    for name in columns[0]:
        _add(table, name, *(facts[name] for facts in columns))
    return table


def _facts(status: pb.Status) -> dict[str, object]:
    """What is told of a server, by the name of its row."""
    last = "never" if status.last_update_seconds < 0 else f"{_seconds(status.last_update_seconds)} ago"
    in_force = ", ".join(filter(None, (status.protocol, status.staleness, status.optimizer.rule)))
    pushes = (status.pushes_applied, status.pushes_pending, status.pushes_rejected, status.pushes_duplicate)
    return {
        "data": status.data_address,
        "state": common.RunState.Name(status.state).removeprefix("RUN_STATE_").lower(),
        "run": f"{status.run_id or 'none'}, epoch {status.epoch}",
        "place": f"{status.server_index} of {status.num_servers}" if status.num_servers else "",
        "in force": in_force,
        "workers alive": status.workers_alive,
        "version": _range(status.version_min, status.version_max),
        "parameters": f"{status.num_parameters:,} of {status.model_parameters:,}",
        "updates of shards": f"{status.updates:,}, the last {last}",
        "pushes": "{:,} applied, {:,} pending, {:,} rejected, {:,} repeated".format(*pushes),
        "examples": f"{status.examples:,}" if status.examples or not status.updates else "not counted",
        "staleness": f"mean {status.staleness_mean:.2f}, max {status.staleness_max}",
        "step kept": f"{status.rate_scale_mean:.1%} after staleness",
        "received, sent": f"{in_bytes(status.bytes_in)}, {in_bytes(status.bytes_out)}",
        "up for": _seconds(status.uptime_seconds),
        "checkpoint": status.checkpoint or "none",
    }


def _workers_table(answers: Sequence[Answer]) -> Table:
    table = Table(title="workers")
    for name in ("worker", "state", "where", "steps"):
        table.add_column(name)
    for name in (
        "applied",
        "rejected",
        "repeated",
        "staleness",
        "step kept",
        "silent for",
        "reports",
    ):
        table.add_column(name, justify="right")
    names = {worker.worker_id: None for answer in answers for worker in answer.workers}
    for name in names:
        known = [worker for answer in answers for worker in answer.workers if worker.worker_id == name]
        # The server that heard of it last knows best.
        latest = min(known, key=lambda worker: worker.silent_seconds)
        taken = sum(worker.pushes_applied + worker.pushes_pending for worker in known)
        reports = ", ".join(f"{key}={value:.4g}" for key, value in sorted(latest.scalars.items()))
        _add(
            table,
            *(name, latest.state, f"{latest.host} {latest.process_id} {latest.device}", latest.clock),
            *(sum(w.pushes_applied for w in known), sum(w.pushes_rejected for w in known)),
            sum(w.pushes_duplicate for w in known),
            f"{_mean(known, 'staleness_mean', taken):.2f}, max {max(w.staleness_max for w in known)}",
            f"{_mean(known, 'rate_scale_mean', taken) if taken else 1:.1%}",
            *(_seconds(latest.silent_seconds), reports),
        )
    return table


def _shards_table(answers: Sequence[Answer], shown: int | None) -> Table:
    rows = [(answer.address, shard) for answer in answers for shard in answer.shards]
    hidden = len(rows) - shown if shown is not None else 0
    table = Table(title="shards", caption=f"{hidden} more: --all shows them" if hidden > 0 else None)
    for name in ("server", "shard", "group", "from", "parameters", "version", "CRC-32", "applied"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for address, shard in rows[:shown]:
        _add(
            table,
            *(address, shard.shard_id, shard.group, f"{shard.offset:,}", f"{shard.num_parameters:,}"),
            *(shard.version, shard.checksum, shard.pushes_applied),
        )
    return table


def _add(table: Table, *cells: object) -> None:
    # As Text: what a worker calls itself must not be read as markup.
    table.add_row(*(Text(str(cell)) for cell in cells))


def _mean(workers: Sequence[pb.WorkerInfo], field: str, taken: int) -> float:
    """The mean over servers, each weighed by the gradients it took."""
    weighted = sum(getattr(w, field) * (w.pushes_applied + w.pushes_pending) for w in workers)
    return weighted / taken if taken else 0.0


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _plain(message: Any) -> Any:
    return MessageToDict(message, always_print_fields_with_no_presence=True)
