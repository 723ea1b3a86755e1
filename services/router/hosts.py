"""Which host gives an episode its box.

Owns: boxes per host, suspicion after failures. Promise: pure; a departed host is chosen no more.
Does not cover: replicas (fleet.py), what a host may refuse (builders.py).
"""

from __future__ import annotations

from muster.types import Value
from services.router.events import Host

_WEIGHED = 8  # hosts that one choice names


class Picked(Value, frozen=True):
    """The host of a box, "" when there is none, and why; `terms`: boxes that it and the next best
    had, by host."""

    host: str
    why: str = ""
    terms: dict[str, float] = {}


class Hosts:
    """The sandbox hosts of a run."""

    def __init__(self, suspect_s: float = 2.0):
        self._suspect_s = suspect_s
        self._hosts: dict[str, Host] = {}
        self._boxes: dict[str, int] = {}
        self._suspect_until: dict[str, float] = {}

    def listed(self, hosts: tuple[Host, ...]) -> None:
        self._hosts = {h.id: h for h in hosts}

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def __contains__(self, host: str) -> bool:
        return host in self._hosts

    @property
    def builds(self) -> bool:
        """Whether one of them builds whole Dockerfiles."""
        return any(host.builds for host in self._hosts.values())

    @property
    def boxes(self) -> dict[str, int]:
        """Counted boxes, by host."""
        return self._boxes

    def failed(self, host: str, now: float) -> None:
        """Prefer others for a while."""
        self._suspect_until[host] = now + self._suspect_s

    def pick(self, now: float, *, avoid: str = "", builds: bool = False) -> Picked:
        """The live host with the fewest boxes; counts the box.

        `avoid` is chosen only when there is no other. `builds`: only one that builds Dockerfiles.
        """
        fit = sorted(h.id for h in self._hosts.values() if h.builds or not builds)
        known = [h for h in fit if h != avoid] or fit
        live = [h for h in known if self._suspect_until.get(h, now) <= now]
        ranked = sorted(live or known, key=lambda h: self._boxes.get(h, 0))
        if not ranked:
            return Picked("")
        terms: dict[str, float] = {h: self._boxes.get(h, 0) for h in ranked[:_WEIGHED]}
        self.adopted(ranked[0])
        return Picked(ranked[0], "fewest_boxes" if len(ranked) > 1 else "only_host", terms)

    def adopted(self, host: str) -> None:
        """Count a box there."""
        self._boxes[host] = self._boxes.get(host, 0) + 1

    def box_gone(self, host: str) -> None:
        if self._boxes.get(host, 0) > 0:
            self._boxes[host] -= 1
