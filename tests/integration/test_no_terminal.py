"""What runs in the background has no terminal: one that asked it for something would be stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.terminals import terminal

# Each ends with a line of two numbers: the caller's own terminal, and that of what it started.
ISOLATED = """
import sys
from muster import isolate
from tests.integration.terminals import terminal_of
own = terminal_of("self")
isolate.enter()
print(own, terminal_of("self"), flush=True)
isolate.leave(0)
"""
KEEPER = """
import asyncio, os, sys
from pathlib import Path
from services.sandbox.adapters.native.backend import open_native
from tests.integration.terminals import terminal_of
async def main():
    async with open_native(Path(sys.argv[1])):
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "muster-keeper":
                print(terminal_of("self"), terminal_of(pid), flush=True)
asyncio.run(main())
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="isolation and boxes need root")
@pytest.mark.parametrize("program", [ISOLATED, KEEPER], ids=["an isolated service", "the keeper"])
def test_what_is_started_on_a_terminal_has_none(program: str, tmp_path: Path) -> None:
    with terminal() as on_it:
        command = [sys.executable, "-c", program, str(tmp_path / "run")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, **on_it)
    assert done.returncode == 0, done.stderr
    own, started = map(int, done.stdout.split())
    assert (own != 0, started) == (True, 0)
