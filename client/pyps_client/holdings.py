"""Moved: pyps_client.pull."""

import sys

from pyps_client import pull
from pyps_client.pull import *  # noqa: F403

sys.modules[__name__] = pull
