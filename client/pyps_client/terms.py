"""Moved: pyps_client.run_state."""

import sys

from pyps_client import run_state
from pyps_client.run_state import *  # noqa: F403

sys.modules[__name__] = run_state
