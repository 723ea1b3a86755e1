"""`pytest tests/scenarios --rewrite` writes what the machines say now into the stories."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="accept today's output as right")
