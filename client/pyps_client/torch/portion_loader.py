"""Moved: pyps_client.lbfgs.gradient."""

import sys

from pyps_client.lbfgs import gradient
from pyps_client.lbfgs.gradient import *  # noqa: F403

sys.modules[__name__] = gradient
