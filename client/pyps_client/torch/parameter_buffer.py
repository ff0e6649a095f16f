"""Moved: pyps_client.torch.parameters."""

import sys

from pyps_client.torch import parameters
from pyps_client.torch.parameters import *  # noqa: F403

sys.modules[__name__] = parameters
