"""Starts a whole job on this machine: servers on free ports, workers that find them, and their end.

`Job` is what `pyps run` and `pyps demo` are made of; `process` holds one child, `replica` the processes of a
worker, `environment` what they are told, `ports` where they meet, `output` how lines of many processes share a
terminal, `server_output` which of the servers' lines matter there.
"""

from pyps.launcher.job import Job, JobError
from pyps.launcher.settings import JobSettings

__all__ = ["Job", "JobError", "JobSettings"]
