"""A log of every push and update of a run's shards, and the replay that proves it. No gRPC in here.

One folder a run and epoch, in it two files a shard:

shard-000003.jsonl     one line an event: how the shard began, pushes, updates, pulls, changes, its end
shard-000003.payloads  the first parameters and slots, then the gradients, as the lines say; only with --log-gradients

lines.py     a line and its checksum
writer.py    writes the log while the run goes on
reader.py    reads one shard's log
replay.py    makes the same updates again, through the same core and kernels, and compares
"""

from pyps.update_log.lines import UpdateLogError
from pyps.update_log.reader import Completed, Configured, Ended, LoggedPush, Pulled, ShardLog, Updated, log_paths
from pyps.update_log.replay import Replayed, replay
from pyps.update_log.writer import UpdateLog

__all__ = [
    "Completed",
    "Configured",
    "Ended",
    "LoggedPush",
    "Pulled",
    "Replayed",
    "ShardLog",
    "UpdateLog",
    "UpdateLogError",
    "Updated",
    "log_paths",
    "replay",
]
