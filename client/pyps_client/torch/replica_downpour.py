"""Moved: pyps_client.replica.steps."""

import sys

from pyps_client.replica import steps
from pyps_client.replica.steps import *  # noqa: F403

sys.modules[__name__] = steps
