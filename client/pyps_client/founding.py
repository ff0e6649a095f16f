"""Moved: pyps_client.join."""

import sys

from pyps_client.join import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.join"]
