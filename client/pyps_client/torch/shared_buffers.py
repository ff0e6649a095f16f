"""Moved: pyps_client.torch.buffers."""

import sys

from pyps_client.torch import buffers
from pyps_client.torch.buffers import *  # noqa: F403

sys.modules[__name__] = buffers
