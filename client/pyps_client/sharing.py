"""Moved: pyps_client.transport.lent."""

import sys

from pyps_client.transport.lent import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.transport.lent"]
