"""The runs of `pyps bench`: a server forgets one by itself once its workers are gone, however they went."""

from __future__ import annotations

import re
import secrets

# Nobody calls a run of his own so by accident.
_NAME = re.compile(r"pyps-bench-[0-9a-f]{8}")


def new_name() -> str:
    """A name for a run that measures and is forgotten."""
    return f"pyps-bench-{secrets.token_hex(4)}"


def is_measurement(run_id: str) -> bool:
    """Whether the run of that name only measures: nothing of it is kept."""
    return _NAME.fullmatch(run_id) is not None
