"""A checkpoint's manifest: written last, with a checksum of itself, so that what has none was never completed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyps import __version__
from pyps.checkpoint.disk import Disk
from pyps_wire.errors import PypsError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"


class CheckpointError(PypsError):
    """Raised when a checkpoint cannot be written or used; the message says which and why."""

    status = "FAILED_PRECONDITION"


class CheckpointDamaged(CheckpointError):
    """Raised when a checkpoint is incomplete or not what was written. An older one may be whole."""

    status = "DATA_LOSS"


def write_manifest(path: Path, body: dict[str, Any], disk: Disk) -> None:
    """Writes the manifest of the checkpoint in that folder."""
    manifest = {
        "format": "pyps checkpoint",
        "format_version": FORMAT_VERSION,
        "software": f"pyps {__version__}",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **body,
    }
    manifest["checksum"] = _checksum(manifest)
    with disk.create(path / MANIFEST) as file:
        disk.write(file, json.dumps(manifest, indent=1).encode())
        disk.sync(file)


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of the checkpoint in that folder. Raises CheckpointDamaged."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} has no {MANIFEST}: it was never completed") from None
    except OSError as error:
        raise CheckpointDamaged(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{file} is no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _checksum(manifest):
        raise CheckpointDamaged(f"{file} is not what was written: its checksum differs")
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{path} has format version {manifest['format_version']}, this software reads {FORMAT_VERSION}"
        )
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"
