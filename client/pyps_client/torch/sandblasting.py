"""Moved: pyps_client.lbfgs.run."""

import sys

from pyps_client.lbfgs import run
from pyps_client.lbfgs.run import *  # noqa: F403

sys.modules[__name__] = run
