"""`pyps replay`: applies recorded pushes again and compares the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pyps.cli.control import fail
from pyps.record import Replayed, record_paths
from pyps.record import replay as replay_record
from pyps_wire.errors import PypsError


def replay(
    folder: Annotated[Path, typer.Argument(help="A server's --record-dir, or a folder in it.")],
) -> None:
    """Replay recorded pushes, shard by shard, and tell whether they give the recorded bits.

    Exits with 1 when a shard comes out otherwise.
    """
    paths = record_paths(folder)
    if not paths:
        fail(f"there is no record in {folder}: start a server with --record-dir to make one")
    table = Table("run", "epoch", "shard", "version", "updates", "pulls", "CRC-32", "as recorded")
    unfaithful = []
    for path in paths:
        try:
            replayed = replay_record(path)
        except PypsError as error:
            fail(str(error))
        table.add_row(*_row(replayed))
        if not replayed.faithful:
            unfaithful.append(replayed)
    console = Console()
    console.print(table)
    for replayed in unfaithful:
        reason = replayed.difference or f"the recorded CRC-32 is {replayed.recorded_checksum}"
        console.print(f"{replayed.path}: {reason}", markup=False)
    if unfaithful:
        fail(f"{len(unfaithful)} of {len(paths)} records do not replay to what was recorded")


def _row(replayed: Replayed) -> tuple[str, ...]:
    if not replayed.faithful:
        verdict = "NO"
    elif replayed.recorded_checksum is None:
        verdict = "receipts yes; no end was recorded"
    else:
        verdict = "yes"
    numbers = (replayed.epoch, replayed.shard_id, replayed.version, replayed.updates, replayed.pulls)
    return (replayed.run_id, *map(str, numbers), replayed.checksum, verdict)
