"""What a server says of itself when it starts, and of the run that it then holds, in words."""

from __future__ import annotations

from pyps.config import ServerConfig
from pyps.run.run import Run
from pyps.units import in_bytes


def access(config: ServerConfig) -> str:
    """Who may call the server."""
    if config.token_file is not None:
        return f"with the token in {config.token_file}"
    if config.insecure:
        return "open to everybody who can reach it (--insecure)"
    return "this machine only"


def staleness_in_words(config: ServerConfig, run: Run) -> str:
    """What staleness costs, and where that comes from if nobody chose it."""
    policy = run.staleness.text
    if policy != config.brought_policy:
        return policy
    return f"{policy}, as {config.protocol.partition(':')[0].strip()} brings it (--staleness)"


def shards_in_words(run: Run) -> str:
    """How much of the run lies here."""
    total = run.partition.num_shards if run.partition else 0
    held = sum(shard.length for shard in run.shards.values())
    return f"{len(run.shards)} of {total}, {held:,} parameters"


def memory_in_words(run: Run) -> str:
    """What that takes."""
    parameters = sum(4 * shard.length for shard in run.shards.values())
    slots = sum(shard.slots_bytes for shard in run.shards.values())
    return f"{in_bytes(parameters)} of parameters, {in_bytes(slots)} of slots"


def update_log_in_words(config: ServerConfig) -> str:
    """Where updates are logged, and what of them."""
    if config.update_log is None:
        return "none (--update-log)"
    if not config.log_gradients:
        return f"{config.update_log}, without gradients (--log-gradients)"
    return f"{config.update_log}, with gradients up to {in_bytes(config.log_gradients_max_bytes)}"
