"""Moved: pyps_client.data.queue."""

import sys

from pyps_client.data import queue
from pyps_client.data.queue import *  # noqa: F403

sys.modules[__name__] = queue
