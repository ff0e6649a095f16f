"""Moved: pyps_client.push."""

import sys

from pyps_client import push
from pyps_client.push import *  # noqa: F403

sys.modules[__name__] = push
