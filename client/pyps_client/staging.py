"""Moved: pyps_client.lbfgs.worker."""

import sys

from pyps_client.lbfgs import worker
from pyps_client.lbfgs.worker import *  # noqa: F403

sys.modules[__name__] = worker
