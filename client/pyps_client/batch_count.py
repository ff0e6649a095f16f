"""Moved: pyps_client.data.portions."""

import sys

from pyps_client.data import portions
from pyps_client.data.portions import *  # noqa: F403

sys.modules[__name__] = portions
