"""`pyps status`: shows servers, workers, shards, and the run's events."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyps.cli.control import INTERRUPTED, ObserverTokenFile, Servers, resolved
from pyps.control import Control, not_named
from pyps.units import in_bytes, in_seconds
from pyps.watch.answer import (
    TABLE_COUNTS,
    Answer,
    activity_of,
    codecs_of,
    merged,
    printable,
    tables_of,
    taken,
    waits_for,
    workers_of,
)
from pyps.watch.history import History
from pyps_client.credentials import read_token
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work_wire
from pyps_wire.errors import PypsError

SHARDS_SHOWN = 20
NAMES_SHOWN = 8
EVENTS_SHOWN = 8
EVENTS_MAX = 1000
WATCH_SECONDS = 2.0
# For a pipe, with --wide or without COLUMNS.
PIPE_COLUMNS = 240
# What is known of a server that serves no run yet.
OF_A_STANDBY = ("data", "state", "run", "restored or reset", "version", "up for", "standby")


def status(
    servers: Servers = "127.0.0.1:7611",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of tables.")] = False,
    all_shards: Annotated[bool, typer.Option("--all", help=f"Show all shards, not {SHARDS_SHOWN}.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Show every column of workers and shards.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C, no checksums.")] = False,
    events: Annotated[
        int, typer.Option(help="How many of the newest events to show.", min=0, max=EVENTS_MAX)
    ] = EVENTS_SHOWN,
    token_file: ObserverTokenFile = None,
) -> None:
    """Show what servers, workers and shards are doing.

    Exits with 1 when a server does not answer; the others are shown all the same.
    """
    token = read_token(token_file)
    try:
        while True:
            answers: list[Answer] = []
            errors: dict[str, str] = {}
            # Servers may have moved since the last round.
            for address in resolved(servers):
                try:
                    answers.append(_query(address, token, num_events=events, checksums=(wide or as_json) and not watch))
                except PypsError as error:
                    errors[address] = str(error)
            if watch:
                Console().clear()
            if as_json:
                failed = [{"address": address, "error": message} for address, message in errors.items()]
                typer.echo(json.dumps({"servers": [*(answer.to_json() for answer in answers), *failed]}, indent=2))
            elif answers:
                _show(answers, errors, wide=wide, shards_shown=None if all_shards else SHARDS_SHOWN)
                if not errors and (hint := not_named([answer.status for answer in answers])):
                    typer.echo(hint)
            for message in errors.values():
                typer.echo(f"pyps: {message}", err=True)
            if not watch:
                raise typer.Exit(1 if errors else 0)
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(0 if watch else INTERRUPTED) from None


def _query(address: str, token: str, *, num_events: int, checksums: bool) -> Answer:
    with Control(address, token=token) as control:
        events = control.call("ListEvents", pb.ListEventsRequest(limit=EVENTS_MAX)).events
        return Answer(
            control.address,
            control.call("GetStatus", pb.GetStatusRequest()),
            control.call("ListWorkers", pb.ListWorkersRequest()).workers,
            # Checksums read all parameters.
            control.call("ListShards", pb.ListShardsRequest(without_checksums=not checksums)).shards,
            _chosen(events, num_events),
            control.call("GetWork", work_wire.GetWorkRequest()),
            activity=activity_of(control).activities,
        )


def _chosen(events: Sequence[pb.Event], count: int) -> list[pb.Event]:
    """Return the newest events, a quarter of them at most of each kind while others remain."""
    newest_first: list[pb.Event] = []
    others: list[pb.Event] = []
    seen: Counter[str] = Counter()
    for event in reversed(events):
        seen[event.kind] += 1
        (newest_first if 4 * seen[event.kind] <= max(count, 4) else others).append(event)
    return sorted([*newest_first, *others][:count], key=lambda event: event.number)


def _show(answers: Sequence[Answer], errors: Mapping[str, str], *, wide: bool, shards_shown: int | None) -> None:
    console = Console()
    if not console.is_terminal and (wide or "COLUMNS" not in os.environ):
        console = Console(width=max(PIPE_COLUMNS, console.width))
    begun = any(answer.shards for answer in answers)
    if begun or any(answer.workers for answer in answers):
        console.print(harmless(f"{_verdict(answers, errors)}."))
    console.print(servers_table(answers))
    if begun or any(answer.workers for answer in answers):
        console.print(_workers_table(answers, wide=wide))
    for answer in answers:
        for table in work_tables(answer.work):
            console.print(table)
    if begun:
        console.print(_shards_table(answers, shards_shown, wide=wide))
        if tables := _tables(answers):
            console.print(_table("tables", tables, left=("table",)))
    elif not any(answer.status.state == common.RUN_STATE_STANDBY for answer in answers):
        data = ",".join(answer.status.data_address for answer in answers)
        console.print(Text(f"no run yet: a worker starts it (PYPS_SERVERS={data})"))
    for line in lines(answers):
        console.print(harmless(line))


def _verdict(answers: Sequence[Answer], errors: Mapping[str, str]) -> str:
    history = History([*(answer.address for answer in answers), *errors])
    for answer in answers:
        history.take(answer.address, answer)
    for address, error in errors.items():
        history.take(address, error)
    return history.verdict.sentence


def lines(answers: Sequence[Answer]) -> Iterable[str]:
    """Yield the lines below the tables: events, waits, warnings."""
    for answer in answers:
        yield from (f"{answer.address} {in_seconds(one.age_seconds)} ago: {one.message}" for one in answer.events)
    for answer in answers:
        if late := sorted({name for shard in answer.shards for name in shard.waiting_for}):
            yield f"{answer.address} its round waits for the gradients of {_names(late)}"
    for answer in answers:
        yield from (f"{answer.address} waits: {reason}" for reason in answer.status.waiting_for)
    for answer in answers:
        yield from (f"{answer.address} warns: {warning}" for warning in answer.status.warnings)


def servers_table(answers: Sequence[Answer]) -> Table:
    table = Table(title="servers")
    table.add_column("control")
    for answer in answers:
        table.add_column(Text(answer.address), overflow="fold")
    columns = [facts(answer.status) for answer in answers]
    for name in columns[0]:
        if any(column[name] != "" for column in columns):
            _add(table, name, *(column[name] for column in columns))
    return table


def facts(status: pb.Status) -> dict[str, object]:
    """Return the cells of a server's column by row, "" where there is nothing to show."""
    last = "never" if status.last_update_seconds < 0 else f"{in_seconds(status.last_update_seconds)} ago"
    missing = f"; {status.workers_missing} still to come" if status.workers_missing else ""
    low, high, tally = status.version_min, status.version_max, status.tally
    shown: dict[str, object] = {
        "data": status.data_address,
        "state": common.RunState.Name(status.state).removeprefix("RUN_STATE_").lower(),
        "run": status.run_id or "none",
        "restored or reset": {0: "", 1: "once"}.get(status.epoch, f"{status.epoch} times"),
        "place": f"{status.server_index} of {status.num_servers}" if status.num_servers else "",
        "in force": ", ".join(filter(None, (status.protocol, status.staleness, status.optimizer.rule))),
        "warm-up": status.warmup and f"{status.warmup} ({'under way' if status.warming_up else 'over'})",
        "learning rate": _rates(status),
        "schedule": "" if status.schedule == "constant" else status.schedule,
        "schedule of": status.schedule_owner,
        "batch size": f"{status.batch_size} ({status.batch_growth})" if status.batch_growth else "",
        "clipped to": f"{status.clip_norm:g}" if status.clip_norm else "",
        "workers alive": status.workers_alive,
        "in the round": f"{len(status.roster)}{': ' if status.roster else ''}{_names(status.roster)}{missing}"
        if status.roster or missing
        else "",
        "version": str(low) if low == high else f"{low} to {high}",
        "parameters": f"{status.num_parameters:,} of {status.model_parameters:,}",
        "updates of shards": f"{tally.updates:,}, the last {last}",
        "pushed shards": f"{tally.pushes_applied:,} applied, {tally.pushes_pending:,} kept for an update, "
        f"{tally.pushes_rejected:,} rejected ({tally.pushes_dropped:,} not needed), "
        f"{tally.pushes_duplicate:,} repeated",
        "waiting gradients": f"{status.pending_gradients:,}, {in_bytes(status.pending_bytes)}"
        if status.pending_gradients
        else "",
        "examples": f"{status.examples:,}" if status.examples or not tally.updates else "not counted",
        "staleness": f"mean {_staleness(tally)}",
        "step lost": f"{tally.step_lost:.1%} to staleness",
        "workers waited": f"{in_seconds(tally.blocked_seconds)} in all" if tally.blocked_seconds else "",
        "received, sent": f"{in_bytes(tally.bytes_in)}, {in_bytes(tally.bytes_out)}",
        "up for": in_seconds(status.uptime_seconds),
        "checkpoint": f"{status.checkpoint}, version {status.durable_version}" if status.checkpoint else "none",
        "not written": status.checkpoint_failure,
        "standby": status.standby,
    }
    is_standby = status.state == common.RUN_STATE_STANDBY
    return {name: "" if is_standby and name not in OF_A_STANDBY else fact for name, fact in shown.items()}


def _workers_table(answers: Sequence[Answer], *, wide: bool) -> Table:
    in_parts = any(worker.replica or worker.parts for answer in answers for worker in answer.workers)
    few_bits = any(codecs_of(worker) for answer in answers for worker in answer.workers)
    rows = []
    for name, known in workers_of(answers).items():
        # From the server that heard from it last.
        latest = known[0]
        tally = merged([worker.tally for worker in known])
        outside = latest.state == "alive" and not latest.counts
        row: dict[str, object] = {
            "worker": name,
            "state": "alive, not in the round" if outside else latest.state,
            "steps": latest.clock,
            "loss": f"{latest.scalars['loss']:.4g}" if "loss" in latest.scalars else "",
            "staleness": _staleness(tally),
        }
        row |= {"codecs up, down": codecs_of(latest) or "float32"} if few_bits else {}
        if wide:
            if in_parts:
                row |= {"replica": latest.replica, "parts": ", ".join(map(str, latest.parts)) or "all"}
            others = waits_for(known)
            row |= {
                "where": f"{latest.host} {latest.process_id} {latest.device}",
                "transport": ", ".join(sorted({worker.transport for worker in known})),
            }
            row |= {
                "received, sent": f"{in_bytes(tally.bytes_in)}, {in_bytes(tally.bytes_out)}",
                # A push counts once for each of its shards.
                "shards taken": taken(tally),
                "rejected": tally.pushes_rejected,
                "repeated": tally.pushes_duplicate,
                "step lost": f"{tally.step_lost:.1%}",
                "waited": in_seconds(tally.blocked_seconds) + (f", now for {_names(others)}" if others else ""),
                "silent for": in_seconds(latest.silent_seconds),
                "reports": ", ".join(f"{key}={value:.4g}" for key, value in sorted(latest.scalars.items())),
            }
        rows.append(row)
    return _table("workers", rows, left=("worker", "state", "replica", "parts", "where", "transport"))


def _shards_table(answers: Sequence[Answer], shown: int | None, *, wide: bool) -> Table:
    all_shards = [
        (answer.address, shard) for answer in answers for shard in answer.shards if not shard.HasField("table")
    ]
    in_parts = any(shard.part for _, shard in all_shards)
    rows = []
    for address, shard in all_shards[:shown]:
        row: dict[str, object] = {
            "server": address,
            "shard": shard.shard_id,
            "parameters": f"{shard.num_parameters:,}",
            "version": shard.version,
            "waiting": shard.pending_gradients,
            "staleness": _staleness(shard.tally),
        }
        if wide:
            row |= {"part": shard.part, "workers": shard.num_workers} if in_parts else {}
            row |= {"group": shard.group, "from": f"{shard.offset:,}"}
            row |= {"CRC-32": shard.checksum} if shard.checksum else {}
            row |= {"taken": taken(shard.tally), "step lost": f"{shard.tally.step_lost:.1%}"}
        rows.append(row)
    hidden = len(all_shards) - len(rows)
    return _table("shards", rows, left=("server",), caption=f"{hidden} more: --all shows them" if hidden else None)


def _tables(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Return a row a table: the sums of its shards."""
    shards = [shard for answer in answers for shard in answer.shards if shard.HasField("table")]
    rows: list[dict[str, object]] = []
    for name, total in tables_of(shard.table for shard in shards).items():
        own = [shard for shard in shards if shard.table.name == name]
        rows.append(
            {
                "table": name,
                "shards": len(own),
                "row": own[0].num_parameters,
                "version": max(shard.version for shard in own),
                "rows": f"{total['rows']:,}",
                "MiB": f"{total['bytes'] / 2**20:.1f}",
                "hits": f"{total['hits'] / max(1, total['lookups']):.1%}",
                **{each: f"{total[each]:,}" for each in TABLE_COUNTS[4:]},
            }
        )
    return rows


def _table(title: str, rows: Sequence[dict[str, object]], *, left: Sequence[str], caption: str | None = None) -> Table:
    """Return a table of rows that have the same columns; long cells are folded."""
    table = Table(title=title, caption=caption)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        _add(table, *row.values())
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(harmless(str(cell)) for cell in cells))


def _staleness(tally: pb.Tally) -> str:
    return f"{tally.staleness_mean:.2f}, max {tally.staleness_max}"


def _rates(status: pb.Status) -> str:
    texts = [
        f"{rate.current:.4g}" if rate.current == rate.base else f"{rate.current:.4g} of {rate.base:.4g}"
        for rate in status.learning_rates
    ]
    if len(set(texts)) <= 1:
        return "".join(texts[:1])
    return ", ".join(f"{text} (group {rate.group})" for text, rate in zip(texts, status.learning_rates, strict=True))


def _names(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def work_tables(work: work_wire.WorkProgress) -> Iterator[Table]:
    """Yield a table of the pass and one of its workers, where server 0 hands out a data set."""
    if not work.HasField("data"):
        return
    facts = {
        "data set": f"{work.data.name or 'unnamed'}, {work.data.num_examples:,} examples",
        # `pass` is a keyword of Python's.
        "pass": f"{getattr(work, 'pass'):,} ({'the work has ended' if work.ended else f'{work.passes_done:,} done'})",
        "portions": f"{work.done:,} of {work.num_portions:,} done, {work.running:,} running, {work.pending:,} pending",
        "ahead": f"{work.ahead:,} done of later passes" if work.ahead else "",
        "backup copies": f"{work.copies:,}, {work.stolen:,} of them finished first" if work.copies else "",
        "lost": f"{work.lost:,} leases of portions that went to others" if work.lost else "",
        "thrown away": f"{work.wasted:,} results" if work.wasted else "",
        "coordinator": ", ".join(f"{name} {value:.4g}" for name, value in sorted(work.scalars.items())),
    }
    table = Table(title="work", show_header=False)
    for name, fact in facts.items():
        if fact:
            _add(table, name, fact)
    yield table
    if work.workers:
        rows: list[dict[str, object]] = [
            {
                "worker": worker.worker_id,
                "done": f"{worker.done:,}",
                "running": f"{worker.running:,}",
                "examples/s": f"{worker.examples_per_second:,.3g}" if worker.examples_per_second else "not known yet",
            }
            for worker in work.workers
        ]
        yield _table("portions of this pass", rows, left=("worker",))


def harmless(words: str) -> Text:
    """Return the words without control characters and markup, which names from workers may contain."""
    return Text(printable(words))
