"""`pyps export` writes the model for plain PyTorch; `pyps replay` applies logged updates again."""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.numpy import save_file

from pyps import logs
from pyps.cli.control import DataServers, ObserverTokenFile, fail, observe
from pyps.core.store import Rows
from pyps.storage.checkpoint import CheckpointDamaged
from pyps.storage.checkpoint_set import differing, newest_set
from pyps.storage.folder import checkpoint_paths
from pyps.storage.opposed import pairs_of
from pyps.storage.parameter_file import save_for_torch
from pyps.storage.replay import Replayed, log_paths
from pyps.storage.replay import replay as replay_log
from pyps_client.arrays import split_tensors
from pyps_client.credentials import read_token
from pyps_wire.codecs import BFLOAT16
from pyps_wire.errors import ConfigurationError, PypsError

log = logs.get("pyps.export")

Arrays = dict[str, npt.NDArray[np.float32]]


class Form(StrEnum):
    """The formats of an export."""

    safetensors = "safetensors"
    torch = "torch"
    dcp = "dcp"
    parquet = "parquet"


# By a file's ending.
_FORMS = {".pt": Form.torch, ".pth": Form.torch, ".dcp": Form.dcp, ".parquet": Form.parquet}


def export(
    file: Annotated[Path, typer.Argument(help="The file to write, or the folder for dcp and parquet.")],
    servers: DataServers = "127.0.0.1:7610",
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(help="Instead: a job's checkpoint folder; or a server's, or one checkpoint in it, once a server."),
    ] = None,
    token_file: ObserverTokenFile = None,
    wait_seconds: Annotated[float, typer.Option(help="How long to wait for servers.", min=0.0)] = 10.0,
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="safetensors, torch.save's, torch.distributed.checkpoint's, or of a checkpoint's tables of rows alone "
            "parquet, a file a table. [default: by the ending .pt, .pth, .dcp or .parquet, else safetensors]",
        ),
    ] = None,
) -> None:
    """Write the model to a file: every tensor under its own name and shape, in float32.

    A tensor that is split over the parts of a model is joined. Load a safetensors file by
    `model.load_state_dict(safetensors.torch.load_file(FILE))`.
    """
    # A checkpoint that cannot be used is logged with the reason.
    logs.configure(level=logging.WARNING)
    if not file.parent.is_dir():
        fail(f"{file} cannot be written: there is no folder {file.parent}")
    try:
        if checkpoint:
            tensors = from_checkpoints(checkpoint)
        else:
            waits = {"start_wait_seconds": wait_seconds, "loss_wait_seconds": wait_seconds}
            with observe(servers, read_token(token_file), **waits) as observer:
                tensors = observer.snapshot()
                if observer.tables:
                    named = ", ".join(observer.tables)
                    log.warning("tables of rows are exported from a --checkpoint only", left_out=named)
        form = form or _FORMS.get(file.suffix, Form.safetensors)
        if form is Form.parquet:
            tensors = _write_tables(file, tensors)
        else:
            _write_whole(file, tensors, form)
    except PypsError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    size = sum(array.size for array in tensors.values() if array.dtype == np.float32)
    typer.echo(f"{file}: {len(tensors)} tensors, {size:,} parameters.")


def from_checkpoints(folders: Sequence[Path]) -> Arrays:
    """Return the model from the newest checkpoints of all its servers; of a table "name.ids" and "name.rows"."""
    own = newest_set(folders)
    if words := differing(own.checkpoints.values()):
        log.warning(words)
    plan = own.partition
    vectors = [np.zeros(size, np.float32) for size in plan.without_tables().model.group_sizes]
    rows: defaultdict[str, list[Rows]] = defaultdict(list)
    for shard in plan.shards:
        try:
            state, _ = own.read_shard(shard.shard_id)
        except CheckpointDamaged as error:
            path = own.checkpoints[plan.server_of(shard.shard_id)].path
            if older := [str(one) for one in checkpoint_paths(path.parent) if one.name < path.name]:
                raise CheckpointDamaged(
                    f"{path} is damaged: {error}. Name an older one: --checkpoint {older[0]}"
                ) from None
            raise
        if state.rows is not None:
            rows[plan.model.tables[shard.group].name].append(state.rows)
            continue
        vectors[shard.group][shard.offset : shard.offset + shard.length] = state.parameters
    tensors, tables = split_tensors(plan.without_tables().model, vectors), _tables(rows)
    if twice := tensors.keys() & tables.keys():
        raise ConfigurationError(f"tensor {min(twice)!r} has the name that a table's export takes: rename the table")
    return tensors | tables


def _tables(rows: Mapping[str, Sequence[Rows]]) -> dict[str, Any]:
    """Return the ids and rows of each table, in float32, by ascending ids."""
    tensors: dict[str, Any] = {}
    for name, of_shards in rows.items():
        ids = np.concatenate([each.ids for each in of_shards])
        numbers = np.concatenate([each.parameters for each in of_shards])
        if numbers.dtype != np.float32:
            numbers = BFLOAT16.decode(numbers.data, numbers.size).reshape(numbers.shape)
        order = np.argsort(ids)
        tensors[f"{name}.ids"] = ids[order]
        tensors[f"{name}.rows"] = numbers[order]
    return tensors


def _write_tables(folder: Path, tensors: Arrays) -> Arrays:
    """Write a parquet file of each table's ids and rows; return these tensors."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        fail("parquet needs pyarrow, which is not installed: pip install pyarrow", status=2)
    names = [name.removesuffix(".ids") for name, array in tensors.items() if array.dtype == np.int64]
    if not names:
        fail("there are no tables of rows, which alone are written as parquet: name a --checkpoint of a run with some")
    folder.mkdir(exist_ok=True)
    for name in names:
        rows = tensors[f"{name}.rows"]
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), rows.shape[1])
        file = folder / f"{quote(name, safe=' ')}.parquet"
        parquet.write_table(pyarrow.table({"id": tensors[f"{name}.ids"], "row": lists}), file)
    return {each: tensors[each] for name in names for each in (f"{name}.ids", f"{name}.rows")}


def _write_whole(file: Path, tensors: Mapping[str, npt.NDArray[np.float32]], form: Form) -> None:
    """Write the file; after an error there is no part of it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    if form is Form.dcp:
        # Whose own metadata, written last, says that it is whole.
        save_for_torch(file, tensors, distributed=True)
        return
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    try:
        if form is Form.torch:
            save_for_torch(temporary, contiguous, distributed=False)
        else:
            save_file(contiguous, temporary, {"format": "pt"})
        temporary.replace(file)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from None
    finally:
        temporary.unlink(missing_ok=True)


def replay(
    folder: Annotated[Path, typer.Argument(help="A server's --update-log, or a folder in it.")],
    opposed: Annotated[
        bool,
        typer.Option("--opposed", help="Also show how often pushes point against those they were computed beside."),
    ] = False,
) -> None:
    """Apply logged updates again, shard by shard, and compare the result with the logged bits.

    Needs the gradients (--log-gradients). Exits with 1 when a shard differs, and names the first such update.
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
    if opposed and not unread:
        Console().print(_opposed(paths))
    for message in (*different, *unread):
        typer.echo(message)
    if different:
        rest = f"; {len(unread)} could not be replayed" if unread else ""
        fail(f"{len(different)} of {len(paths)} logs do not replay to what was logged{rest}")
    if unread:
        fail(f"{len(unread)} of {len(paths)} logs could not be replayed, so nothing is said of what they hold")


def _opposed(paths: Sequence[Path]) -> Table:
    table = Table("versions apart", "pairs of pushes", "opposed", "mean cosine")
    for pairs in pairs_of(paths):
        apart = str(pairs.apart_min) + (f" to {pairs.apart_max}" if pairs.apart_max > pairs.apart_min else "")
        table.add_row(apart, f"{pairs.num_pairs:,}", f"{100 * pairs.opposed:.1f} %", f"{pairs.mean_cosine:.3f}")
    table.caption = None if table.rows else "no push was computed while another came"
    return table


def _row(replayed: Replayed) -> tuple[str, ...]:
    if replayed.difference:
        verdict = "NO"
    elif replayed.cut_short:
        verdict = "yes, up to here: later gradients were not kept (--log-gradients-max-bytes)"
    elif not replayed.ended:
        verdict = "yes; the log has no end"
    else:
        verdict = "yes"
    numbers = (replayed.run.epoch, replayed.shard_id, replayed.version, replayed.updates, replayed.pulls)
    return (replayed.run.run_id, *map(str, numbers), replayed.checksum, verdict)
