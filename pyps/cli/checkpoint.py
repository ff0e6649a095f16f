"""`pyps checkpoint`: the checkpoints in folders, without servers."""

from __future__ import annotations

import logging
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pyps import logs
from pyps.cli.control import fail
from pyps.cli.export import export
from pyps.storage.checkpoint import Checkpoint, CheckpointDamaged, CheckpointError
from pyps.storage.checkpoint_set import convert as convert_set
from pyps.storage.checkpoint_set import differing, paths_of
from pyps.storage.folder import CheckpointFolder, noted_epoch
from pyps.units import counted, in_bytes
from pyps_wire.partition import SERVERS_MAX

checkpoint = typer.Typer(
    help="List, check, remove and convert checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
checkpoint.command()(export)
COLUMNS = 120
Sources = Annotated[list[Path], typer.Argument(help="A job's folder, or those of servers.", show_default=False)]


@checkpoint.command("list")
def list_all(folders: Sources) -> None:
    """Show the checkpoints of each server, the newest first."""
    # In a narrow terminal lines run over, instead of columns that lose their ends.
    console = Console(width=max(Console().width, COLUMNS))
    latest: list[Checkpoint] = []
    for folder, paths in groupby(_paths(folders), lambda path: path.parent):
        table, whose = Table("checkpoint", "epoch", "versions", "written", "size", box=None), "unknown"
        damaged, own = [], []
        for path in paths:
            try:
                one = Checkpoint(path)
                one.require_files()
            except CheckpointDamaged as error:
                damaged.append(f"{path.name} cannot be used: {error}")
                continue
            own.append(one)
            header, oldest, newest = one.header, min(one.versions.values(), default=0), one.version_max
            whose = f"server {header.server_index} of {header.num_servers} of run {header.run_id}"
            versions = f"{oldest} to {newest}" if oldest < newest else str(newest)
            written = one.written.replace("+00:00", "Z")
            table.add_row(path.stem, str(header.epoch), versions, written, in_bytes(one.num_bytes))
        latest += own[:1]
        typer.echo(f"{folder}: {whose}")
        console.print(table)
        for line in damaged:
            typer.echo(line)
    if words := differing(latest):
        typer.echo(words)


@checkpoint.command()
def verify(folders: Sources) -> None:
    """Read all checkpoints and compare their checksums. Exits with 1 where one is damaged, and names it."""
    paths = _paths(folders)
    damaged, lost = [], []
    for folder in sorted({path.parent for path in paths}):
        try:
            noted_epoch(folder)
        except CheckpointError as error:
            lost.append(folder)
            typer.echo(str(error))
    for path in paths:
        try:
            one = Checkpoint(path)
            for _ in one.read():
                pass
            one.read_positions()
        except CheckpointDamaged as error:
            damaged.append(path)
            typer.echo(f"{path.name}: {error}")
    if damaged:
        fail(
            f"{len(damaged)} of {counted(len(paths), 'checkpoint')} cannot be used: --resume takes the newest that can"
        )
    if lost:
        fail(f"{counted(len(paths), 'checkpoint')} as written, but {counted(len(lost), 'epoch')} lost")
    typer.echo(f"{counted(len(paths), 'checkpoint')}: all as written.")


@checkpoint.command()
def prune(
    folders: Sources,
    keep: Annotated[int, typer.Option(help="Checkpoints of each server to keep, the newest.", min=1)],
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Remove those too that a reset or another number of servers set aside.")
    ] = False,
) -> None:
    """Remove old checkpoints, and the shards that no other checkpoint names. Their servers must have ended."""
    for parent in sorted({path.parent for path in _paths(folders, set_aside=set_aside)}):
        with closing(CheckpointFolder(parent)) as own:
            try:
                removed = own.prune(keep, set_aside=set_aside)
            except OSError as error:
                fail(f"a checkpoint in {parent} could not be removed: {error.strerror}")
        typer.echo(f"{parent}: {counted(removed, 'checkpoint')} removed.")


@checkpoint.command()
def convert(
    folders: Sources,
    servers: Annotated[int, typer.Option(help="Servers that are to go on.", min=1, max=SERVERS_MAX)],
    into: Annotated[Path, typer.Option(help="A folder that gets one for each server; FOLDERS itself sets them aside.")],
    shard_size: Annotated[
        int | None, typer.Option(help="The most parameters of a shard; by default shards stay as they are.", min=16)
    ] = None,
) -> None:
    """Write the newest checkpoints of a run for another number of servers, which go on from them with --resume."""
    logs.configure(level=logging.WARNING)
    written = convert_set(folders, into, num_servers=servers, shard_size=shard_size)
    header, version = written[0].header, max(one.version_max for one in written)
    typer.echo(
        f"{into}: run {header.run_id} at version {version} for {counted(servers, 'server')}, "
        f"{counted(header.partition.num_shards, 'shard')}."
    )


def _paths(folders: list[Path], *, set_aside: bool = False) -> list[Path]:
    paths = [path for folder in folders for path in paths_of(folder, set_aside=set_aside)]
    if not paths:
        fail(f"there is no checkpoint in {', '.join(map(str, folders))}")
    return paths
