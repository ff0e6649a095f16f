"""Moved: pyps_client.lease."""

import sys

from pyps_client.lease import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.lease"]
