"""Moved: pyps_client.replica.dtensor."""

import sys

from pyps_client.replica import dtensor
from pyps_client.replica.dtensor import *  # noqa: F403

sys.modules[__name__] = dtensor
