"""Moved: pyps_client.transport.grpc."""

import sys

from pyps_client.transport.grpc import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.transport.grpc"]
