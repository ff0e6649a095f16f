"""Moved: pyps_client.replica.arrangement."""

import sys

from pyps_client.replica import arrangement
from pyps_client.replica.arrangement import *  # noqa: F403

sys.modules[__name__] = arrangement
