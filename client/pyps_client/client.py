"""Moved: pyps_client.arrays."""

import sys

from pyps_client.arrays import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.arrays"]
