"""Starts a whole job on this machine: servers on free ports, workers that find them, and their end.

`Job` is what `pyps run` and `pyps demo` are made of; `process` holds one child, `replica` the processes of a
worker, `environment` the settings of the job and the environment of its workers, `ports` where they meet.
"""

from pyps.launcher.environment import JobSettings
from pyps.launcher.job import Job, JobError

__all__ = ["Job", "JobError", "JobSettings"]
