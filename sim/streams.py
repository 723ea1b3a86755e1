"""What Redis holds of a run, in memory: the semantics of muster/streams.py without a server.

Owns: streams, dedupe hashes, payloads, epochs, leader keys, the registry. Promise: the same rules
as the scripts of muster.streams (tests/property/test_sim_streams.py runs both): an older epoch is
refused, a dedupe field is taken once, `needs` must be there before, a set of entries is whole or
nothing. Ids never go back, whatever the server's clock does. With `everysec`, a power cut undoes
what the last second wrote, deleted and trimmed (undo.py); not the leader keys and the registry,
which are liveness only. Does not cover: who calls, and what gets lost on the way (net.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, TypeVar

from muster.errors import Fenced, Refused
from muster.stream_ids import id_order
from muster.streams import Received, StreamEntry
from sim.undo import WINDOW_S, Undo
from sim.world import WALL_START_S, World

T = TypeVar("T")
RUN = "sim"


class Effect:
    """One call to the store from within a coroutine: `await` it. Its runner makes it a call over
    the lines (led.py, `slowly`); see `at_once` for the other way."""

    def __init__(self, op: str, do: Callable[[], Any]):
        self.op, self.do = op, do

    def __await__(self) -> Generator[Effect, Any, Any]:
        result = yield self
        return result


def at_once(effect: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine whose every effect happens now."""
    told: Any = None
    while True:
        try:
            wanted = effect.send(told)
        except StopIteration as end:
            found: T = end.value
            return found
        told = wanted.do()


class Store:
    """One run's part of a Redis server. `hears` is told of every new entry."""

    def __init__(self, world: World):
        self.world = world
        self.clock_offset_s = 0.0
        self.streams: dict[str, list[Received]] = {}
        self.hashes: dict[str, dict[str, str]] = {}
        self.values: dict[str, bytes] = {}
        self.bits: dict[str, frozenset[int]] = {}
        self.leaders: dict[str, tuple[str, float]] = {}  # role → (who, until on the server's clock)
        self.registry: dict[str, tuple[float, str]] = {}  # KIND/ID → (beat, process name)
        self.cut_at: list[float] = []  # its power
        self.writer = ("", 0)  # role and epoch of the process whose effect this is
        self.refused = 0  # writes of former owners
        self.hears: list[Callable[[Received, StreamEntry], None]] = []
        self.trims: list[Callable[[str, list[Received]], None]] = []
        self.retires: list[Callable[[str, Sequence[str]], None]] = []
        self.waiting: list[tuple[Mapping[str, str], Callable[[], None]]] = []
        self._last: dict[str, tuple[int, int]] = {}
        self.undo = Undo(world)

    # time

    @property
    def clock_s(self) -> float:
        return WALL_START_S + self.world.now + self.clock_offset_s

    def _next_id(self, stream: str) -> str:
        at, sequence = self._last.get(stream, (0, 0))
        now = int(self.clock_s * 1000)
        self._last[stream] = (now, 0) if now > at else (at, sequence + 1)
        return "{}-{}".format(*self._last[stream])

    def power_cut(self, lost_s: float) -> None:
        """Undo what was written within the last `lost_s` (at most 1 s)."""
        self.cut_at.append(self.world.now)
        self.undo.take_back(lost_s)

    def may_have_lost(self, since_s: float, until_s: float) -> bool:
        """Something that was written between these two."""
        return any(since_s <= at <= until_s + WINDOW_S for at in self.cut_at)

    # epochs and leaders

    def epoch(self, role: str) -> int:
        return int(self.values.get(f"epoch:{role}", b"0"))

    def next_epoch(self, role: str, used: int = 0) -> int:
        """`used`: one that is known to have been given, whatever the server has lost."""
        epoch = max(self.epoch(role), used) + 1
        self.undo.put(self.values, f"epoch:{role}", str(epoch).encode())
        return epoch

    async def take_epoch(self, role: str, used: int = 0) -> int:
        """As muster.streams.next_epoch: with WAITAOF, and so with all that was written before."""
        epoch: int = await Effect("epoch", lambda: self.next_epoch(role, used))
        await Effect("epoch", self.undo.settle)
        return epoch

    def take_lead(self, role: str, who: str, ttl_s: float) -> bool:
        """As muster.leader: the key is free, expired or ours."""
        known = self.leaders.get(role)
        if known and known[0] != who and known[1] > self.clock_s:
            self.leaders[role] = (known[0], min(known[1], self.clock_s + ttl_s))
            return False
        self.leaders[role] = (who, self.clock_s + ttl_s)
        return True

    # writes

    def check(self, role: str, epoch: int | None) -> None:
        newest = self.epoch(role)
        if epoch is not None and epoch != newest:
            self.refused += 1
            raise Fenced(f"epoch {newest} of {role} is in charge", field="epoch", value=epoch)

    def append(self, entries: Sequence[StreamEntry], payloads: Mapping[str, bytes]) -> list[bool]:
        """The append script, behind its fence."""
        answer: list[bool] = []
        closed = False
        for entry in entries:
            field, bit = entry.unless_bit or ((), -1)
            if bit in self.bits.get(":".join(field), ()):
                raise Refused("it is over", field="dedupe", value=entry.dedupe)
        for entry in entries:
            seen = self._hash(f"seen:{entry.scope}")
            fresh = False
            if entry.needs and entry.needs not in seen:
                closed = True
            elif entry.dedupe not in seen:
                fresh = True
                self.undo.put(seen, entry.dedupe, "1")
                self._add(entry)
            answer.append(fresh)
            if not seen:
                self.undo.pop(self.hashes, f"seen:{entry.scope}")
        if not closed and (any(answer) or not entries):
            for key, value in payloads.items():
                self.undo.put(self.values, key, value)
        if any(answer):
            self._wake()
        return answer

    def _add(self, entry: StreamEntry) -> None:
        message = Received(entry.stream, self._next_id(entry.stream), entry.data, "")
        stream = self.undo.within(self.streams, entry.stream, list)
        stream.append(message)
        self.undo.note(lambda: self.streams[entry.stream].remove(message))
        for hear in self.hears:
            hear(message, entry)

    def _hash(self, name: str) -> dict[str, str]:
        return self.undo.within(self.hashes, name, dict)

    def set_fields(self, name: str, fields: Mapping[str, str]) -> None:
        """HSET."""
        for field, value in fields.items():
            self.undo.put(self._hash(name), field, value)

    def delete_fields(self, name: str, fields: Sequence[str]) -> None:
        """HDEL."""
        for field in fields:
            self.undo.pop(self.hashes.get(name, {}), field)

    def retire(
        self, group: str, job: str, index: int, totals: Mapping[str, int], delete: Sequence[str]
    ) -> bool:
        """The retire script, behind its fence."""
        if f"seen:g:{group}" not in self.hashes:
            return False
        counted = self.hashes.get(f"totals:{job}", {})
        sums = {name: str(int(counted.get(name, "0")) + added) for name, added in totals.items()}
        self.set_fields(f"totals:{job}", sums)
        bits = self.bits.get(f"retired:{job}", frozenset[int]())
        self.undo.put(self.bits, f"retired:{job}", bits | {index})
        self.delete_fields("seen:fates", [group])
        self.undo.pop(self.hashes, f"seen:g:{group}")
        self.drop(delete)
        for told in self.retires:
            told(group, delete)
        return True

    def drop(self, payloads: Sequence[str]) -> None:
        for key in payloads:
            self.undo.pop(self.values, key)

    def mark_read(self, role: str, positions: Mapping[str, str]) -> None:
        self.set_fields(f"read:{role}", positions)

    def advance_mark(self, step: int, opened: bytes) -> None:
        """The script of the mark, behind its fence."""
        if step >= int(self.hashes.get("mark", {}).get("step", "0")):
            self.set_fields("mark", {"step": str(step), "opened": opened.decode()})

    def trim(self, stream: str, first_kept: str, forget: Sequence[str]) -> int:
        """The trim script, behind its fence."""
        self.delete_fields(f"seen:{stream}", forget)
        found = self.streams.get(stream, [])
        gone = [m for m in found if id_order(m.id) < id_order(first_kept)]
        self.undo.put(self.streams, stream, found[len(gone) :])
        for told in self.trims:
            told(stream, gone)
        return len(gone)

    # reads

    def after(self, stream: str, id_: str) -> list[Received]:
        found = self.streams.get(stream, [])
        if id_ in ("-", "0", "0-0"):
            return list(found)
        at = len(found)
        while at and id_order(found[at - 1].id) > id_order(id_):
            at -= 1
        return found[at:]

    def when_news(self, after: Mapping[str, str], do: Callable[[], None]) -> None:
        """A blocking read: at once when there is something, else when it comes."""
        if any(self.after(stream, id_) for stream, id_ in after.items()):
            do()
        else:
            self.waiting.append((dict(after), do))

    def _wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for after, do in waiting:
            self.when_news(after, do)

    @property
    def keys(self) -> int:
        """Keys that hold something."""
        return len(self.values) + len(self.hashes) + len(self.streams) + len(self.bits)


class ModelStreams:
    """What a service takes for muster.streams.RunStreams. Nothing waits: see `at_once`."""

    def __init__(self, store: Store, *, role: str = "", epoch: int | None = None):
        self._store, self.run, self._role, self._epoch = store, RUN, role, epoch

    def key(self, *parts: str) -> str:
        return ":".join((f"m:{{{self.run}}}", *parts))

    async def append(
        self, entries: Sequence[StreamEntry], payloads: Mapping[str, bytes] | None = None
    ) -> list[bool]:
        def do() -> list[bool]:
            self._store.check(self._role, self._epoch)
            return self._store.append(entries, payloads or {})

        found: list[bool] = await Effect("append", do)
        return found

    async def retire(
        self, group: str, *, job: str, index: int, totals: Mapping[str, int], delete: Sequence[str]
    ) -> bool:
        def do() -> bool:
            self._store.check(self._role, self._epoch)
            return self._store.retire(group, job, index, totals, delete)

        found: bool = await Effect("Retire", do)
        return found

    async def trim(self, stream: str, first_kept: str, forget: Sequence[str] = ()) -> int:
        def do() -> int:
            self._store.check(self._role, self._epoch)
            return self._store.trim(stream, first_kept, forget)

        found: int = await Effect("Trim", do)
        return found

    async def drop(self, payloads: Sequence[str]) -> None:
        def do() -> None:
            self._store.check(self._role, self._epoch)
            self._store.drop(payloads)

        await Effect("drop", do)

    async def mark_read(self, positions: Mapping[str, str]) -> None:
        def do() -> None:
            self._store.check(self._role, self._epoch)
            self._store.mark_read(self._role, positions)

        await Effect("mark_read", do)

    async def advance_mark(self, step: int, opened: bytes) -> None:
        def do() -> None:
            self._store.check(self._role, self._epoch)
            self._store.advance_mark(step, opened)

        await Effect("WriteMark", do)

    async def read_by(self, role: str) -> dict[str, str]:
        hashes = self._store.hashes
        found: dict[str, str] = await Effect("read", lambda: dict(hashes.get(f"read:{role}", {})))
        return found

    async def read_all(self, stream: str, after: str = "-") -> list[Received]:
        found: list[Received] = await Effect("read", lambda: self._store.after(stream, after))
        return found

    async def tail(self, after: Mapping[str, str], block_ms: int = 1000) -> list[Received]:
        del block_ms
        return [m for stream, id_ in after.items() for m in self._store.after(stream, id_)]

    async def payloads(self, keys: Sequence[str]) -> list[bytes | None]:
        def do() -> list[bytes | None]:
            return [self._store.values.get(key) for key in keys]

        found: list[bytes | None] = await Effect("payloads", do)
        return found
