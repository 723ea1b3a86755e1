"""A forked child of PID 1 gives up every right and becomes the shell of one step.

Promise: what runs after it is in the step's cgroups, has the agent's capabilities only, can gain
none, and holds no descriptor but 0, 1 and 2. It never returns: a failure before the shell runs is
written to `failed`. Standard library only.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import NoReturn

from services.sandbox.adapters.native import blame
from services.sandbox.adapters.native import syscalls as sc

BASH = "/usr/bin/bash"
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_UNTOUCHABLE = {signal.SIGKILL, signal.SIGSTOP, 32, 33}


@dataclass
class Rules:
    """How the processes of an agent are confined; tests leave one thing out at a time.

    caps: those they keep, as a mask; below 0 all.
    """

    caps: int
    filter: bytes | None
    kill_tree: bool = True
    no_new_privileges: bool = True
    close_descriptors: bool = True


@dataclass
class Shell:
    """What to run: `folders` are tried in order, `groups` are cgroup.procs files to enter."""

    arguments: list[str]
    env: dict[str, str]
    folders: list[str]
    leaf: str
    group: int
    joins: list[int]
    null: int
    out: int
    failed: int


def become(shell: Shell, rules: Rules) -> NoReturn:
    """Only in a forked child."""
    what = blame.ENTER
    try:
        flags = os.O_WRONLY | os.O_CLOEXEC
        procs = os.open(f"{shell.leaf}/cgroup.procs", flags, dir_fd=shell.group)
        for handle in (procs, *shell.joins):
            os.write(handle, b"0")
        what = blame.PREPARE
        signal.set_wakeup_fd(-1)
        for number in set(range(1, signal.NSIG)) - _UNTOUCHABLE:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.umask(0o022)
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        for source, target in ((shell.null, 0), (shell.out, 1), (shell.out, 2)):
            os.dup2(source, target)
        sc.die_with_parent()
        if rules.no_new_privileges:
            sc.no_new_privileges()
        if rules.filter is not None:
            sc.install_filter(rules.filter)  # while there are rights for it in any case
        if rules.caps >= 0:
            sc.drop_capabilities(rules.caps)
        env = shell.env | {"PWD": _enter(shell.folders)}  # with no more rights than its own
        if not rules.close_descriptors:
            os.set_inheritable(shell.group, True)
        what = blame.EXEC
        os.execve(BASH, shell.arguments, env)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return
        number = error.errno if isinstance(error, OSError) and error.errno else 0
        os.write(shell.failed, blame.told(what, number, str(error)))
    finally:
        os._exit(127)


def _enter(folders: list[str]) -> str:
    """The first of these that is there, else `/`. Their names are the agent's, and we still hold
    descriptors that it must not have: what /proc makes of those is not followed."""
    root = os.open("/", _FOLDER)
    for folder in folders:
        try:
            os.fchdir(sc.open_in_root(root, folder, _FOLDER))
            return folder
        except OSError:
            continue  # the agent removed it
    os.chdir("/")
    return "/"
