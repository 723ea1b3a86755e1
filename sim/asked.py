"""What a router asks of each replica beside turns: a credit, and a short request to prove itself.

Owns: the calls and the events that their answers become, as services/router/adapters/replicas.py
has them. Promise: each asked becomes one event, or ends a router that is fenced. Does not cover:
turns (calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.errors import MusterError
from services.router import events as e
from sim.engine import Grant, Replica
from sim.led import Led
from sim.net import Serve

Tell = Callable[[e.RouterEvent], None]
_GRANT_S = 2.0


class ReplicaCalls:
    """Of one router incarnation; `fenced` looks at every answer first."""

    def __init__(self, router: Led, fenced: Callable[[Any], bool]):
        self.router, self.net, self._fenced = router, router.net, fenced

    def _peer(self, name: str) -> Replica:
        replica = self.router.shared.processes[name]
        assert isinstance(replica, Replica)
        return replica

    def grant(self, name: str, epoch: int, tell: Tell) -> None:
        """Ask a replica for a credit."""
        replica = self._peer(name)

        def heard(found: Any) -> None:
            if self._fenced(found):
                return
            if not isinstance(found, Grant):
                tell(e.ReplicaSilent(name, str(found)))
                return
            tell(
                e.ReplicaTold(
                    replica=name,
                    life=found.life,
                    version=found.version,
                    serving=found.serving,
                    credit_tokens=found.credit_tokens,
                    ttl_s=found.ttl_s,
                    block_size=found.block_size,
                    running=found.running,
                    steps=found.steps,
                )
            )

        serve: Serve = lambda respond: replica.grant(epoch, respond)  # noqa: E731
        self.net.call(self.router, replica, "GrantKv", serve, heard, _GRANT_S)

    def probe(self, command: e.ProbeReplica, tell: Tell) -> None:
        """A short request to a replica that takes no turn yet."""
        replica, began = self._peer(command.replica), self.router.world.now

        def heard(found: Any) -> None:
            if self._fenced(found):
                return
            passed = not isinstance(found, MusterError)
            took_s = self.router.world.now - began
            at = (command.replica, command.life)
            tell(e.ReplicaProbed(*at, passed, "" if passed else str(found), took_s))

        serve: Serve = lambda respond: replica.probe(respond)  # noqa: E731
        self.net.call(self.router, replica, "Probe", serve, heard, command.timeout_s)
