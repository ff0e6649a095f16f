"""Moved: pyps_client.torch.memory."""

import sys

from pyps_client.torch import memory
from pyps_client.torch.memory import *  # noqa: F403

sys.modules[__name__] = memory
