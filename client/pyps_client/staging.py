"""Moved: pyps_client.lbfgs.staging."""

import sys

from pyps_client.lbfgs import staging
from pyps_client.lbfgs.staging import *  # noqa: F403

sys.modules[__name__] = staging
