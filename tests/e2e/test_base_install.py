"""A client needs the wheel alone: no torch, no vllm, at most 80 MB, under 15 lines of code.

The services run with the scripted engine: what is tested is the client's side.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.leftovers import Muster

pytestmark = [pytest.mark.engine, pytest.mark.root]

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).with_name("client_example.py")
MIB = 1 << 20
SIZE_MAX = 80 * MIB
LINES_MAX = 15


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("base")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", str(ROOT), "--no-deps", "-w", str(folder)], check=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    limits = str(ROOT / "constraints.txt")
    subprocess.run(
        [*pip, "--python", python, "install", "-q", "-c", limits, str(wheel)], check=True
    )
    return folder / "venv"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    """Address of a router of a running `muster up`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = tmp_path / "muster.toml"
    config.write_text(f"[router]\nlisten = '{address}'\n[inference]\nengine = 'fake'\n")
    muster = Muster(tmp_path / "state", "up", config=config)
    muster.until(lambda line: line["event"] == "line" and line["text"].startswith("ready"))
    yield address
    assert muster.interrupt()[0] == 0


def test_the_base_install_is_small_and_light(installed: Path) -> None:
    [packages] = installed.glob("lib/python3*/site-packages")
    size = sum(f.lstat().st_size for f in packages.rglob("*") if f.is_file())
    assert size <= SIZE_MAX
    names = {path.name for path in packages.iterdir()}
    assert not names & {"torch", "vllm", "transformers", "numpy"}


def test_a_short_client_submits_and_follows(installed: Path, router: str) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < LINES_MAX
    task = str(ROOT / "tasks" / "write-word")
    command = [installed / "bin" / "python", "-u", EXAMPLE, router, task]
    # In another folder, else the source tree would be imported.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=installed) as client:
        assert client.stdout is not None
        seen = []
        for line in client.stdout:
            seen.append(line)
            if line.startswith("1 "):  # its one group is complete
                break
        client.terminate()
    assert len(seen) >= 2, "progress, not only the end"
    assert seen[-1].startswith("1 2 ")
