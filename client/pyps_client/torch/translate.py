"""Moved: pyps_client.torch.rules."""

import sys

from pyps_client.torch import rules
from pyps_client.torch.rules import *  # noqa: F403

sys.modules[__name__] = rules
