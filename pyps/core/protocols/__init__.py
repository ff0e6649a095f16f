"""The protocols: one small class each, which decides how pushed gradients become updates, and the table of their names.

    base.py           what a protocol decides on, its possible decisions, and the base class
    asynchronous.py   async, asgd, softsync: no worker waits
    barrier.py        hardsync, backup, and ssp with strict_bsp: an update is a round of gradients of one version
    paced.py          serial, ssp, sandblaster: a worker waits before it computes

To add one: a frozen dataclass whose fields are its settings, and its entry in PROTOCOLS.
"""

from __future__ import annotations

import re

from pyps.core import spec
from pyps.core.protocols.asynchronous import Asgd, Async, Softsync
from pyps.core.protocols.barrier import Backup, Hardsync
from pyps.core.protocols.base import Aggregation
from pyps.core.protocols.paced import Sandblaster, Serial, Ssp

PROTOCOLS: dict[str, type[Aggregation]] = {
    kind.name: kind for kind in (Async, Softsync, Hardsync, Backup, Ssp, Serial, Asgd, Sandblaster)
}

# Other names in use. The STT chapter calls serial training "synchronous" and hardsync "hybrid".
ALIASES = {
    "downpour": "async",
    "asynchronous": "async",
    "synchronous": "serial",
    "hybrid": "hardsync",
    "bsp": "hardsync",
}

# Their sources apply every gradient in full, however old: Dean et al. 2012, the STT chapter, Zhang et al. 2013, Ho et
# al. 2013.
IN_FULL = ("downpour", "asynchronous", "asgd", "ssp")


def parse(text: str) -> Aggregation:
    """Return the protocol that the text names, such as "softsync:n=4"; "4-softsync" is the same.

    Raise InvalidArgument, with the protocols and settings that there are, for any other text.
    """
    name, separator, settings = text.strip().partition(":")
    if match := re.fullmatch(r"(\d+)-softsync", name):
        name, separator, settings = "softsync", ":", f"n={match[1]}"
    name = ALIASES.get(name.lower(), name.lower())
    return spec.make(name + separator + settings, PROTOCOLS, what="protocol")


def brought_policy(text: str) -> str:
    """Return the staleness policy that a protocol's name implies where none is chosen; empty for none."""
    return "none" if text.strip().partition(":")[0].lower() in IN_FULL else ""
