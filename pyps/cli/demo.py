"""`pyps demo`: the command of examples/demo.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# In a checkout the examples are next to the package, in an installation inside it.
_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE.parent / "examples" / "demo.py", _PACKAGE / "examples" / "demo.py")
_SPEC = importlib.util.spec_from_file_location("demo", next((place for place in _PLACES if place.exists()), _PLACES[0]))
assert _SPEC is not None and _SPEC.loader is not None
example = importlib.util.module_from_spec(_SPEC)
# A dataclass looks for its module there.
sys.modules[_SPEC.name] = example
_SPEC.loader.exec_module(example)
demo = example.demo
