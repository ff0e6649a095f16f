"""Moved: pyps_client.transport.shared_memory."""

import sys

from pyps_client.transport.shared_memory import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.transport.shared_memory"]
