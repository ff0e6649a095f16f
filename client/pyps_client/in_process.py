"""Moved: pyps_client.transport.in_process."""

import sys

from pyps_client.transport.in_process import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.transport.in_process"]
