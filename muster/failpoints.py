"""Named places around durable effects at which a test may end, hold or deceive a process.

Owns: the list of names, the actions, their configuration. Promise: without MUSTER_TEST_FAILPOINTS
in the environment a failpoint costs one look-up and does nothing; a name that is not listed here is
a bug that raises at once. Does not cover: which faults a test asks for (tests/faults/).

MUSTER_TEST_FAILPOINTS is `NAME=ACTION[@N]`, separated by commas; each acts at the N-th pass
(default: the first):
`kill`   SIGKILL to the own process;
`hold`   writes the file NAME.held into MUSTER_TEST_FAILPOINT_DIR and waits until it is removed;
`lie`    raises Unavailable: what came before has happened and is reported as failed.
With MUSTER_TEST_FAILPOINT_DIR set, every pass is appended as one line to the file `hits.PID` there,
and an action happens once in all, also when the process is started again (file `NAME.done`).

`NAME=fail%P` raises HostUnfit at P of 100 passes, drawn by the number of the pass, again and again:
for runs in which infrastructure is to fail at a known rate.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from pathlib import Path

from muster.errors import ConfigError, HostUnfit, Unavailable
from muster.types import Value

# service.effect.before|after: around every effect that another process or a restart can see.
NAMES = frozenset(
    f"{effect}.{when}"
    for effect in (
        "router.submit",
        "router.cancel",
        "router.open_group",
        "router.acquire",
        "router.generate",
        "router.intend",
        "router.exec",
        "router.record_turn",
        "router.restore_box",
        "router.verify",
        "router.record_episode",
        "router.release",
        "readybank.freeze",
        "readybank.return",
        "readybank.top_up",
        "readybank.send",
        "readybank.train",
        "readybank.filter",
        "readybank.mark",
        "readybank.retire",
        "readybank.archive",
        "readybank.trim",
        "trainer.register",
        "trainer.lease",
        "trainer.return",
        "trainer.save",
        "trainer.record_trained",
        "trainer.record_durable",
        "trainer.acknowledge",
        "trainer.prepare",
        "trainer.commit",
        "trainer.record_published",
        "trainer.prune",
        "sandbox.snapshot",
        "sandbox.start",
        "sandbox.exec",
        "sandbox.keep",
        "sandbox.verify",
        "sandbox.release",
        "inference.generate",
        "inference.prepare",
        "inference.stage",
        "inference.commit",
    )
    for when in ("before", "after")
)
_HOLD_POLL_S = 0.05


class _Plan(Value, frozen=True):
    action: str
    at: int = 1
    percent: int = 0  # of `fail`


def _parse(text: str) -> dict[str, _Plan]:
    plans: dict[str, _Plan] = {}
    for item in filter(None, text.split(",")):
        name, _, rest = item.partition("=")
        action, _, at = rest.partition("@")
        rate, _, percent = rest.partition("%")
        if name in NAMES and rate == "fail" and percent.isdigit() and int(percent) <= 100:
            plans[name] = _Plan(rate, percent=int(percent))
            continue
        if name not in NAMES or action not in ("kill", "hold", "lie") or not (at or "1").isdigit():
            raise ConfigError(
                "not a failpoint",
                field="MUSTER_TEST_FAILPOINTS",
                value=item,
                way_out="write NAME=kill|hold|lie[@N] or NAME=fail%P; names are in "
                "muster/failpoints.py",
            )
        plans[name] = _Plan(action, int(at or "1"))
    return plans


_plans = _parse(os.environ.get("MUSTER_TEST_FAILPOINTS", ""))
_folder = os.environ.get("MUSTER_TEST_FAILPOINT_DIR", "")
_active = bool(_plans or _folder)
_passes: dict[str, int] = {}


async def at(name: str) -> None:
    """A failpoint in a coroutine. Raises Unavailable for `lie`, HostUnfit for `fail`."""
    if not _active:
        return
    plan = _passed(name)
    if plan == "hold":
        held = _held(name)
        while held.exists():  # noqa: ASYNC110 - another process removes the file
            await asyncio.sleep(_HOLD_POLL_S)


def _held(name: str) -> Path:
    held = Path(_folder) / f"{name}.held"
    held.touch()
    return held


def _first(name: str) -> bool:
    """True for the first process that comes to act here."""
    if not _folder:
        return True
    try:
        with open(Path(_folder) / f"{name}.done", "x", encoding="ascii"):
            return True
    except FileExistsError:
        return False


def _due(name: str, plan: _Plan) -> bool:
    if plan.action == "fail":
        drawn = hashlib.sha256(f"{name} {_passes[name]}".encode()).digest()
        return int.from_bytes(drawn) % 100 < plan.percent
    return plan.at == _passes[name] and _first(name)


def _passed(name: str) -> str:
    """Count one pass and do what is due now; answers the action that the caller has to do."""
    if name not in NAMES:
        raise AssertionError(f"{name} is not in muster.failpoints.NAMES")
    _passes[name] = _passes.get(name, 0) + 1
    plan = _plans.get(name)
    due = plan is not None and _due(name, plan)
    if _folder:
        action = plan.action if plan and due else "pass"
        with open(Path(_folder) / f"hits.{os.getpid()}", "a", encoding="ascii") as hits:
            hits.write(f"{name} {action}\n")
    if plan is None or not due:
        return "pass"
    if plan.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)  # the first process of a PID namespace ignores its own
    if plan.action == "fail":
        raise HostUnfit(f"{name}: failed by a failpoint", way_out="it is repaired")
    if plan.action == "lie":
        raise Unavailable(f"{name}: reported as failed by a failpoint", way_out="it is repeated")
    return plan.action
