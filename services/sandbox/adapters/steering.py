"""Files of `/`, the folder above a verifier's /tests, that would steer its test runner. Pure.

An agent's are not there for its verifier: pytest would take them for the tests' own. Standard
library only: native boxes have it in PID 1.
"""

from __future__ import annotations

NAMES = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml",
    "tox.ini", "setup.cfg", "setup.py",
)  # fmt: skip
