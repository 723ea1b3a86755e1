"""`muster --help` must stay quick: declaring the commands loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "vllm", "transformers", "tokenizers", "zstandard", "uvloop", "grpc", "numpy"}


def test_declaring_the_commands_loads_nothing_heavy() -> None:
    code = "import sys, muster.cli.main; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY & set(done.stdout.split()) == set()


def test_the_client_needs_the_base_install_only() -> None:
    code = "import sys, muster.client; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (HEAVY - {"grpc"}) & set(done.stdout.split()) == set()
