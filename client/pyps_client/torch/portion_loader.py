"""Moved: pyps_client.lbfgs.loader."""

import sys

from pyps_client.lbfgs import loader
from pyps_client.lbfgs.loader import *  # noqa: F403

sys.modules[__name__] = loader
