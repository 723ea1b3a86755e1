"""What the simulation takes for granted of the services' mains: who leads writes under its epoch.

The simulated router and bank are given fenced streams; a main that left the epoch out would lead by
its heartbeat alone, and no simulated fault would show it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SERVICES = Path(__file__).resolve().parents[2] / "services"


def fences(role: str) -> list[ast.expr | None]:
    """The `epoch` of each RunStreams that this service's main makes for its role."""
    tree = ast.parse((SERVICES / role / "__main__.py").read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("RunStreams"):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if isinstance(given.get("role"), ast.Constant):
                found.append(given.get("epoch"))
    return found


@pytest.mark.parametrize("role", ["router", "readybank"])
def test_who_leads_writes_under_its_epoch(role: str) -> None:
    found = fences(role)
    assert found
    assert all(isinstance(epoch, ast.Name) for epoch in found)
