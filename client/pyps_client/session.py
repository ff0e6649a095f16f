"""Moved: pyps_client.worker."""

import sys

from pyps_client import worker
from pyps_client.worker import *  # noqa: F403

sys.modules[__name__] = worker
