"""Moved: pyps_client.torch.steps."""

import sys

from pyps_client.torch import steps
from pyps_client.torch.steps import *  # noqa: F403

sys.modules[__name__] = steps
