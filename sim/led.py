"""A service of which one process leads and another stands by, as muster.leader has it.

Owns: taking the lead, the beat, the end when a newer one leads. Promise: like muster.leader, the
key with its time to live is liveness only; the epoch is taken before anything is read. Does not
cover: what the leader does (router.py, bank.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from muster.errors import Fenced, MusterError, Unavailable
from muster.streams import Received
from sim.net import Net, Respond
from sim.process import Process
from sim.streams import Effect, Store
from sim.truth import Truth
from sim.world import World

_BEAT_S = 0.5
_TTL_S = 3.0
_CALL_S = 5.0
PATIENCE_S = 60.0
_AWAY = Unavailable("it was restarted, and this process counts on what it may have lost")
ANNOUNCED_S = 6.0  # muster.registry: an older beat is no presence


class Shared:
    """What all processes of one world share: lines, the store, who is there."""

    def __init__(self, world: World, net: Net, store: Store, server: Process):
        self.world, self.net, self.store, self.server = world, net, store, server
        self.processes: dict[str, Process] = {}
        self.keeps_all = True  # the store loses nothing that it has acknowledged
        self.store_s = 0.0  # mean time from an effect on the store until it is acknowledged
        self.truth = Truth()
        self.problem: Callable[[str], None] = lambda text: None  # hears what does not hold
        self.archive: list[Received] = []  # what banks keep on disk before they trim

    def add(self, process: Process) -> None:
        self.processes[process.name] = process

    def of_role(self, role: str) -> list[Process]:
        return [p for p in self.processes.values() if p.role == role]

    def listed(self, kind: str, reader: Process) -> list[str]:
        """The registry as that reader sees it: names, in order."""
        now = reader.wall()
        return sorted(
            name
            for key, (beat, name) in self.store.registry.items()
            if key.startswith(f"{kind}/") and now - beat <= ANNOUNCED_S
        )

    def announce(self, process: Process) -> None:
        """As muster.registry: now, and again every second."""

        beat = 0.0

        def write(respond: Respond) -> None:
            self.store.registry[f"{process.role}/{process.name}"] = (beat, process.name)
            respond(None)

        def again() -> None:
            nonlocal beat
            beat = process.wall()
            self.net.call(process, self.server, "announce", write, lambda _: None, _CALL_S)

        again()
        process.every(1.0, again)


class Led(Process, ABC):
    """`lead(epoch)` is the subclass's beginning; `epoch` 0 means that it stands by."""

    def __init__(self, shared: Shared, name: str, role: str):
        super().__init__(shared.world, name, role)
        self.shared, self.net, self.store = shared, shared.net, shared.store
        self.epoch = 0
        self._server: int | None = None  # the incarnation of the store that it counts on

    def boot(self) -> None:
        self.epoch, self._server = 0, None
        self._stand_by()

    @abstractmethod
    def lead(self) -> None:
        """It leads now, under `epoch`: read what is there, then serve."""

    def _stand_by(self) -> None:
        me = f"{self.name}/{self.life}"

        def heard(found: Any) -> None:
            if found is True:
                self._take()
            else:
                self.soon(_BEAT_S, self._stand_by)

        self.at_store("lead", lambda: self.store.take_lead(self.role, me, _TTL_S), heard)

    def _take(self) -> None:
        def heard(found: Any) -> None:
            if isinstance(found, MusterError):
                self.exit("could not take its epoch")
                return
            self.epoch = found
            self.world.note(self.name, f"leads, epoch {found}")
            self.every(_BEAT_S, self._beat)
            self.lead()

        def counted(_: Any) -> None:
            self.slowly(self.store.take_epoch(self.role), heard, "epoch")

        if not self.shared.keeps_all:
            self._server = self.shared.server.life
        counted(None)

    def _beat(self) -> None:
        me = f"{self.name}/{self.life}"

        def once() -> bool:
            if self.store.epoch(self.role) != self.epoch:
                raise Fenced("a newer one leads")
            if not self.store.take_lead(self.role, me, _TTL_S):
                raise Fenced("a newer one takes its epoch next")
            return True

        def heard(found: Any) -> None:
            if isinstance(found, Fenced):
                self.exit("fenced")
            elif self._restarted:
                self.exit("the store was restarted, and may have lost what this one counts on")

        self.at_store("beat", once, heard)

    # calls to the store

    @property
    def _restarted(self) -> bool:
        """As muster.redis_link.ServerWatch: no call reaches another server than that."""
        return self._other(self._server)

    def _other(self, server: int | None) -> bool:
        """The store is another incarnation than this one; None: any will do."""
        return server not in (None, self.shared.server.life)

    def news(self, after: Mapping[str, str], hear: Callable[[Any], None]) -> None:
        """Wait for entries behind these ids; `hear` gets None, or the error."""

        def serve(respond: Respond) -> None:
            if self._restarted:
                respond(_AWAY)
            else:
                self.store.when_news(after, lambda: respond(None))

        self.net.call(self, self.shared.server, "tail", serve, hear, _CALL_S)

    def at_store(self, op: str, effect: Callable[[], Any], hear: Callable[[Any], None]) -> None:
        """One try. What it writes is written under the epoch that this process has now."""
        epoch, server = self.epoch, self._server  # of this incarnation, however late it arrives

        def serve(respond: Respond) -> None:
            self.store.writer = (self.role, epoch)
            try:
                result = _AWAY if self._other(server) else effect()
            except MusterError as error:
                result = error
            finally:
                self.store.writer = ("", 0)
            wait = self.world.spread("store", self.shared.store_s)
            if wait:
                self.shared.server.soon(wait, lambda: respond(result))
            else:
                respond(result)

        self.net.call(self, self.shared.server, op, serve, hear, _CALL_S)

    def slowly(
        self, work: Coroutine[Any, Any, Any], hear: Callable[[Any], None], op: str = ""
    ) -> None:
        """Run a coroutine, each of whose effects on the store is a call of its own. `hear` gets
        its result, or the error that it raised."""

        def step(told: Any) -> None:
            try:
                failed = isinstance(told, MusterError)
                wanted: Effect = work.throw(told) if failed else work.send(told)
            except StopIteration as end:
                hear(end.value)
                return
            except MusterError as error:
                hear(error)
                return
            self.at_store(op or wanted.op, wanted.do, step)

        step(None)

    def stubbornly(
        self, work: Coroutine[Any, Any, Any], hear: Callable[[Any], None], op: str
    ) -> None:
        """The same, each effect repeated while the store is away; else the process ends."""

        def step(told: Any) -> None:
            try:
                wanted: Effect = work.send(told)
            except StopIteration as end:
                hear(end.value)
                return
            self.patiently(op, wanted.do, step)

        step(None)

    def patiently(self, op: str, effect: Callable[[], Any], hear: Callable[[Any], None]) -> None:
        """Again while the store is away, within a bound; then, or fenced, the process ends."""
        self._again(op, lambda told: self.at_store(op, effect, told), hear)

    def patiently_slowly(
        self, work: Callable[[], Coroutine[Any, Any, Any]], hear: Callable[[Any], None], op: str
    ) -> None:
        """The same of a coroutine, which is begun anew each time."""
        self._again(op, lambda told: self.slowly(work(), told, op), hear)

    def _again(
        self, op: str, begin: Callable[[Callable[[Any], None]], None], hear: Callable[[Any], None]
    ) -> None:
        since, pause = self.world.now, 0.05

        def heard(found: Any) -> None:
            nonlocal pause
            if not isinstance(found, MusterError):
                hear(found)
            elif isinstance(found, Unavailable) and self.world.now - since < PATIENCE_S:
                self.soon(pause, attempt)
                pause = min(2 * pause, 2.0)
            else:
                self.exit(f"{op}: {found.problem}")

        def attempt() -> None:
            begin(heard)

        attempt()
