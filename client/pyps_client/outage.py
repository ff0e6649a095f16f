"""Moved: pyps_client.retry."""

import sys

from pyps_client.retry import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.retry"]
