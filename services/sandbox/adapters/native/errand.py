"""One errand of PID 1 inside its box, done by a forked child with the agent's rights.

Promise: what a path of the agent's or of a task's author can lead to, it leads to with their own
rights and no descriptor of PID 1's; the child is outside of the agent's cgroups, so that a full box
can be worked in, and has a time limit. The agent's processes may stop or kill it, as root of their
box: the errand then fails, PID 1 goes on. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.confine import Rules
from services.sandbox.adapters.native.parcel import Refused

_TIME_S = 10.0
_MESSAGE = 1 << 14
_FULL = {errno.ENOSPC, errno.EDQUOT}


def run(work: Callable[[], None], rules: Rules, keep: int = -1) -> dict[str, Any]:
    """What the child says of `work`: `ok`, `refused` with `path`, or `error`.

    keep: a descriptor that the child needs, beside 0, 1 and 2.
    """
    told, tell = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _child(work, tell, rules, keep)
    os.close(tell)
    try:
        message = _heard(told, time.monotonic() + _TIME_S)
    finally:
        os.close(told)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.waitpid(pid, 0)
    if message is None:
        return {"error": f"a copy was not done in {_TIME_S:g} s"}
    try:
        found = json.loads(message)
    except ValueError:
        return {"error": "a copy was ended by a process of the box"}
    return found if isinstance(found, dict) else {"error": "a copy said nonsense"}


def _heard(told: int, deadline: float) -> bytes | None:
    """All that the child says; None when it is late."""
    message = b""
    poll = select.poll()
    poll.register(told, select.POLLIN)
    while len(message) < _MESSAGE:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        part = os.read(told, _MESSAGE)
        if not part:
            break
        message += part
    return message


def _child(work: Callable[[], None], tell: int, rules: Rules, keep: int) -> NoReturn:
    answer: dict[str, Any] = {}
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.umask(0o022)
        _close_others({tell, keep} - {-1})
        sc.die_with_parent()
        sc.no_new_privileges()
        if rules.filter is not None:
            sc.install_filter(rules.filter)
        if rules.caps >= 0:
            sc.drop_capabilities(rules.caps)
        work()
        answer = {"ok": True}
    except Refused as refusal:
        answer = {"refused": refusal.why, "path": refusal.path[:500]}
    except OSError as error:
        answer = {"error": error.strerror or str(error)}
        if error.errno in _FULL:
            answer = {"refused": "does not fit into the box's disk limit"}
    except BaseException as error:  # noqa: BLE001 - a forked child must never return
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        os.write(tell, json.dumps(answer).encode())
        os._exit(0)


def _close_others(keep: set[int]) -> None:
    """All but these and 0, 1 and 2, none of which leads anywhere."""
    last = 2
    for handle in (*sorted(keep), 1 << 20):
        os.closerange(last + 1, handle)
        last = handle
