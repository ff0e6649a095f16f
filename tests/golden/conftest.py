"""The flag that writes the golden traces anew: pytest tests/golden --regenerate."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden traces instead of comparing them")
