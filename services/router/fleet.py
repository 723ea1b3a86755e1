"""What the router knows of replicas and hosts: who lives, who is busy, who failed lately.

Owns: in-flight counts per replica, boxes per host, suspicion after failures. Promise: pure; a
departed replica or host is chosen no more, its counts go with it. Does not cover: the choice
among replicas (policy.py).
"""

from __future__ import annotations

from services.router.events import Host, Replica
from services.router.policy import Choice, Placement, PlacementRequest, ReplicaView


class Fleet:
    """Replicas and hosts of a run."""

    def __init__(self, placement: Placement, suspect_s: float = 2.0):
        self._placement, self._suspect_s = placement, suspect_s
        self._replicas: dict[str, Replica] = {}
        self._hosts: dict[str, Host] = {}
        self._in_flight: dict[str, int] = {}
        self._homes: dict[str, str] = {}  # episode id → replica with its KV
        self._boxes: dict[str, int] = {}
        self._suspect_until: dict[str, float] = {}

    def replicas_are(self, replicas: tuple[Replica, ...]) -> None:
        self._replicas = {r.id: r for r in replicas}
        for gone in set(self._in_flight) - set(self._replicas):
            del self._in_flight[gone]
        self._homes = {e: r for e, r in self._homes.items() if r in self._replicas}

    def hosts_are(self, hosts: tuple[Host, ...]) -> None:
        self._hosts = {h.id: h for h in hosts}

    @property
    def has_replica(self) -> bool:
        return bool(self._replicas)

    @property
    def has_host(self) -> bool:
        return bool(self._hosts)

    def knows_host(self, host: str) -> bool:
        return host in self._hosts

    def place(
        self, episode: str, context_tokens: int, now: float, *, home: str = "", avoid: str = ""
    ) -> Choice:
        """Choose a replica for a turn and count it as in flight there.

        `home`: where its former turn was sampled, for an episode that is not known here.
        `avoid` is chosen only when there is no other.
        """
        sessions: dict[str, int] = {}
        for replica in self._homes.values():
            sessions[replica] = sessions.get(replica, 0) + 1
        views = tuple(
            ReplicaView(
                id=r,
                in_flight=self._in_flight.get(r, 0),
                sessions=sessions.get(r, 0),
                suspect=r == avoid or self._suspect_until.get(r, now) > now,
            )
            for r in sorted(self._replicas)
        )
        request = PlacementRequest(episode, self._homes.get(episode, home), context_tokens)
        choice = self._placement.choose(request, views)
        if choice.replica:
            self._homes[episode] = choice.replica
            self._in_flight[choice.replica] = self._in_flight.get(choice.replica, 0) + 1
        return choice

    def replied(self, replica: str) -> None:
        """A request ended there, well or badly."""
        if self._in_flight.get(replica, 0) > 0:
            self._in_flight[replica] -= 1

    def failed(self, replica: str, now: float) -> None:
        """Prefer others for a while."""
        self._suspect_until[replica] = now + self._suspect_s

    def host_failed(self, host: str, now: float) -> None:
        self._suspect_until[host] = now + self._suspect_s

    @property
    def has_builder(self) -> bool:
        return any(host.builds for host in self._hosts.values())

    def pick_host(self, now: float, *, avoid: str = "", builds: bool = False) -> str:
        """The live host with the fewest boxes, "" when there is none; counts the box.

        `avoid` is chosen only when there is no other. `builds`: only one that builds Dockerfiles.
        """
        fit = sorted(h.id for h in self._hosts.values() if h.builds or not builds)
        known = [h for h in fit if h != avoid] or fit
        live = [h for h in known if self._suspect_until.get(h, now) <= now]
        chosen = min(live or known, key=lambda h: self._boxes.get(h, 0), default="")
        if chosen:
            self.adopted(chosen)
        return chosen

    def adopted(self, host: str) -> None:
        """Count a box there."""
        self._boxes[host] = self._boxes.get(host, 0) + 1

    def box_gone(self, host: str) -> None:
        if self._boxes.get(host, 0) > 0:
            self._boxes[host] -= 1

    def session_over(self, episode: str) -> None:
        """Explicit end of a conversation: nothing waits for a time-out."""
        self._homes.pop(episode, None)
