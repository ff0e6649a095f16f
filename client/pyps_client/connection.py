"""Moved: pyps_client.transport.connection."""

import sys

from pyps_client.transport.connection import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.transport.connection"]
