"""Looking at this machine says what is wrong with it, and does not break off because of it."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from muster.config import load_config
from muster.doctor_look import _autogroups, _refused, look_at_machine
from muster.errors import ConfigError
from muster.model import check_model

UNSEEN = "/" + "x" * 300  # a name that no file can have: looking at it fails, whoever looks


def test_folders_that_cannot_be_looked_at_are_told() -> None:
    config = load_config(None, {
        "MUSTER_STATE_DIR": UNSEEN, "MUSTER_MODEL__PATH": UNSEEN,
        "MUSTER_TRAINER__TRANSPORT": "stored", "MUSTER_TRAINER__TRANSPORT_FOLDER": UNSEEN,
    })  # fmt: skip
    facts = look_at_machine(config, ("router",), ())
    assert "no such model folder" in facts.model_error
    assert facts.state_dir == UNSEEN


def test_a_model_that_this_user_may_not_read_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(folder: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(ConfigError, match="may not read") as caught:
        check_model(str(tmp_path))
    assert "chmod" in caught.value.way_out


def test_a_port_that_is_taken_is_told_from_an_address_of_another_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = _refused("127.0.0.1", other.getsockname()[1])
    assert taken is not None
    assert taken.errno == errno.EADDRINUSE
    elsewhere = _refused("192.0.2.1", 7400)
    assert elsewhere is not None
    assert elsewhere.errno == errno.EADDRNOTAVAIL


@pytest.mark.parametrize(
    ("enabled", "own", "seen"),
    [
        ("1", "2:cpu,cpuacct:/\n0::/\n", True),
        ("0", "2:cpu,cpuacct:/\n0::/\n", False),
        ("1", "2:cpu,cpuacct:/docker/a\n0::/\n", False),
        ("1", "0::/\n", False),
        ("1", "0::/user.slice/a.scope\n", False),
    ],
)
def test_sessions_are_scheduled_as_groups_at_the_root_of_the_cpu_controller_alone(
    tmp_path: Path, enabled: str, own: str, seen: bool
) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/sched_autogroup_enabled").write_text(f"{enabled}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(own)
    assert _autogroups(tmp_path) is seen


def test_a_kernel_without_autogroups_is_no_trouble(tmp_path: Path) -> None:
    assert _autogroups(tmp_path) is False
