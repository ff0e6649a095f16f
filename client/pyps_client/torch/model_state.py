"""Moved: pyps_client.torch.layout."""

import sys

from pyps_client.torch import layout
from pyps_client.torch.layout import *  # noqa: F403

sys.modules[__name__] = layout
