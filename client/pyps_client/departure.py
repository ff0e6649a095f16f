"""Moved: pyps_client.leave."""

import sys

from pyps_client.leave import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.leave"]
