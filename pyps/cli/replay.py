"""`pyps replay`: makes logged updates again and compares the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyps.cli.control import fail
from pyps.storage.replay import Replayed, log_paths
from pyps.storage.replay import replay as replay_log
from pyps_wire.errors import PypsError


def replay(
    folder: Annotated[Path, typer.Argument(help="A server's --update-log, or a folder in it.")],
) -> None:
    """Make logged updates again, shard by shard, and tell whether they give the logged bits.

    Needs the gradients (--log-gradients). Exits with 1 when a shard comes out otherwise, and names the first
    update that differs.
    """
    paths = log_paths(folder)
    if not paths:
        fail(f"there is no update log in {folder}: start a server with --update-log and --log-gradients to make one")
    table = Table("run", "epoch", "shard", "version", "updates", "pulls", "CRC-32", "as logged")
    different, unread = [], []
    for path in paths:
        try:
            replayed = replay_log(path)
        except PypsError as error:
            unread.append(str(error))
            continue
        table.add_row(*map(Text, _row(replayed)))
        if replayed.difference:
            different.append(f"{path}: {replayed.difference}")
    if table.rows:
        Console().print(table)
    for message in (*different, *unread):
        typer.echo(message)
    if different:
        rest = f"; {len(unread)} could not be replayed" if unread else ""
        fail(f"{len(different)} of {len(paths)} logs do not replay to what was logged{rest}")
    if unread:
        fail(f"{len(unread)} of {len(paths)} logs could not be replayed, so nothing is said of what they hold")


def _row(replayed: Replayed) -> tuple[str, ...]:
    if replayed.difference:
        verdict = "NO"
    elif replayed.cut_short:
        verdict = "yes, up to here: later gradients were not kept (--log-gradients-max-bytes)"
    elif not replayed.ended:
        verdict = "yes; the log has no end"
    else:
        verdict = "yes"
    numbers = (replayed.epoch, replayed.shard_id, replayed.version, replayed.updates, replayed.pulls)
    return (replayed.run_id, *map(str, numbers), replayed.checksum, verdict)
