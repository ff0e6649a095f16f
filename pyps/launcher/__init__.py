"""A whole job on this machine: servers on free ports, workers that find them, and their end."""

from pyps.launcher.environment import JobSettings
from pyps.launcher.job import Job, JobError

__all__ = ["Job", "JobError", "JobSettings"]
