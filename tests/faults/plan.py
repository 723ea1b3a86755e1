"""Which faults the kill matrix injects, and how they are packed into runs.

Owns: the list, the packing. Promise: every failpoint is met by a SIGKILL, every one after an effect
also by "done but reported failed", every one around a Redis write also by the death of the server
while the service is held there; no run kills one service more often than its supervisor forgives.
Does not cover: running them (kill_matrix.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from muster import failpoints

# Passes before it acts: in the middle of things, where an effect happens often enough.
_OFTEN = {
    "acquire": 4,
    "generate": 9,
    "intend": 5,
    "exec": 6,
    "record_turn": 7,
    "verify": 5,
    "record_episode": 6,
    "release": 4,
    "open_group": 2,
    "start": 5,
    "keep": 7,
}
REDIS_WRITES = frozenset(
    (
        "router.submit",
        "router.cancel",
        "router.open_group",
        "router.intend",
        "router.record_turn",
        "router.restore_box",
        "router.record_episode",
        "readybank.freeze",
        "readybank.return",
        "readybank.top_up",
        "readybank.train",
        "readybank.filter",
        "readybank.mark",
        "readybank.retire",
        "readybank.trim",
        "trainer.record_trained",
        "trainer.record_durable",
        "trainer.record_published",
    )
)
_KILLS_MAX = 2  # of one service in one run; its supervisor gives up after the fifth death


@dataclass(frozen=True)
class Fault:
    """One action at one failpoint."""

    name: str
    action: str  # kill, lie, or hold (and the server of the streams is killed meanwhile)

    @property
    def service(self) -> str:
        return "redis" if self.action == "hold" else self.name.partition(".")[0]

    @property
    def plan(self) -> str:
        """As MUSTER_TEST_FAILPOINTS has it."""
        effect = self.name.split(".")[1]
        return f"{self.name}={self.action}@{_OFTEN.get(effect, 1)}"


def faults() -> list[Fault]:
    """Every fault of the matrix."""
    names = sorted(failpoints.NAMES)
    found = [Fault(name, "kill") for name in names]
    found += [Fault(name, "lie") for name in names if name.endswith(".after")]
    writes = [name for name in names if name.rpartition(".")[0] in REDIS_WRITES]
    return found + [Fault(name, "hold") for name in writes]


def engine_faults() -> list[Fault]:
    """Ten of them, two of each service, for runs whose parts are all real and take minutes."""
    names = (
        "inference.generate.after",
        "inference.commit.before",
        "trainer.save.before",
        "trainer.acknowledge.after",
        "router.exec.after",
        "router.record_turn.before",
        "readybank.freeze.after",
        "readybank.train.before",
        "sandbox.exec.after",
        "sandbox.verify.before",
    )
    return [Fault(name, "kill") for name in names]


def runs(wanted: list[Fault]) -> list[list[Fault]]:
    """Packed: in one run each failpoint acts once, and no service dies too often."""
    packed: list[list[Fault]] = []
    for fault in wanted:
        for run in packed:
            if _fits(fault, run):
                run.append(fault)
                break
        else:
            packed.append([fault])
    return packed


def _fits(fault: Fault, run: list[Fault]) -> bool:
    if any(other.name == fault.name for other in run) or len(run) >= 8:
        return False
    deaths = Counter(other.service for other in run if other.action != "lie")
    return fault.action == "lie" or deaths[fault.service] < _KILLS_MAX
