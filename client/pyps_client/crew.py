"""Moved: pyps_client.transport.threads."""

import sys

from pyps_client.transport.threads import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.transport.threads"]
