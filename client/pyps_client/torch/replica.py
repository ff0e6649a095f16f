"""Moved: pyps_client.replica.processes."""

import sys

from pyps_client.replica import processes
from pyps_client.replica.processes import *  # noqa: F403

sys.modules[__name__] = processes
