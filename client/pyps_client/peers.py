"""Moved: pyps_client.replica.group."""

import sys

from pyps_client.replica import group
from pyps_client.replica.group import *  # noqa: F403

sys.modules[__name__] = group
