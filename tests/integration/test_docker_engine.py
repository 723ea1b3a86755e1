"""The engine that tests start for themselves does not touch the machine's own."""

from __future__ import annotations

import os

import pytest

from tests.integration.docker_engine import NoEngine, own_daemon


@pytest.mark.root
def test_a_daemon_for_tests_cannot_remove_bridges_of_another(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("engine")  # short: it holds sockets
    try:
        with own_daemon(folder):
            pid = (folder / "engine" / "pid").read_text()
            assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except NoEngine as reason:
        pytest.skip(str(reason))
