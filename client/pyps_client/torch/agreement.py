"""Moved: pyps_client.torch.rates."""

import sys

from pyps_client.torch import rates
from pyps_client.torch.rates import *  # noqa: F403

sys.modules[__name__] = rates
