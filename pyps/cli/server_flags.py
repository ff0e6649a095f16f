"""What the servers of a job are told: spelled as flags, and checked before any of them is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyps.config import ConfigError, ServerConfig, flag_name, resolve
from pyps_wire.errors import BadRequest


def spelled(settings: Mapping[str, str], config: Path | None = None) -> tuple[str, ...]:
    """The flags of `pyps serve` for settings by their names; empty ones are left out."""
    given = [part for name, value in settings.items() if value for part in (flag_name(name), value)]
    return (*given, *(("--config", str(config)) if config else ()))


def check_servers_flags(settings: Mapping[str, Any], config: Path | None = None, *, num_servers: int) -> ServerConfig:
    """What every server is told, by flags, file and environment.

    Raises ConfigError for what every server would refuse at its start, or the run once it has all its servers.
    """
    given = {name: value for name, value in settings.items() if value not in ("", None)}
    # A launcher takes free ports whatever the environment says; each server warns by itself of what it ignores.
    ports = {"port": "0", "control_port": "0", "metrics_port": "0"}
    resolved = resolve(given | ports, os.environ, config, warn=lambda line: None)
    try:
        resolved.behaviour.aggregation.check_servers(num_servers)
    except BadRequest as error:
        raise ConfigError(str(error)) from None
    return resolved
