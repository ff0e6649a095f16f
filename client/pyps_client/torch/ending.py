"""Moved: pyps_client.torch.remote_optimizer."""

import sys

from pyps_client.torch.remote_optimizer import *  # noqa: F403

sys.modules[__name__] = sys.modules["pyps_client.torch.remote_optimizer"]
