"""Moved: pyps_client.torch.gradients."""

import sys

from pyps_client.torch import gradients
from pyps_client.torch.gradients import *  # noqa: F403

sys.modules[__name__] = gradients
