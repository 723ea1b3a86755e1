"""The few commands of a Redis client that services call beside RunStreams, over the modelled store.

Promise: those commands, with the meaning that Redis gives them.
Does not cover: anything else of Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.stream_ids import id_order
from sim.streams import RUN, Effect, Store


class ModelRedis:
    """The few commands of a Redis client that services call beside RunStreams."""

    def __init__(self, store: Store):
        self._store = store

    async def get(self, key: str) -> bytes | None:
        def do() -> bytes | None:
            short = _short(key)
            if short in self._store.bits:
                return _bitmap(self._store.bits[short])
            return self._store.values.get(key) or self._store.values.get(short)

        found: bytes | None = await Effect("get", do)
        return found

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        def do() -> dict[bytes, bytes]:
            found = self._store.hashes.get(_short(key), {})
            return {k.encode(): v.encode() for k, v in found.items()}

        found: dict[bytes, bytes] = await Effect("hgetall", do)
        return found

    async def hget(self, key: str, name: str) -> bytes | None:
        return (await self.hgetall(key)).get(name.encode())

    async def hset(
        self, key: str, name: str = "", value: object = "", mapping: Mapping[str, Any] | None = None
    ) -> None:
        told = dict(mapping or {}) | ({name: value} if name else {})

        def do() -> None:
            self._store.set_fields(_short(key), {k: str(v) for k, v in told.items()})

        await Effect("hset", do)

    async def hdel(self, key: str, *names: str) -> None:
        await Effect("hdel", lambda: self._store.delete_fields(_short(key), names))

    async def unlink(self, *keys: str) -> None:
        await Effect("unlink", lambda: self._store.drop(keys))

    async def xlen(self, key: str) -> int:
        found: int = await Effect("xlen", lambda: len(self._store.after(_short(key), "-")))
        return found

    async def xrange(self, key: str, max: str = "+", count: int = 1000) -> list[Any]:
        def do() -> list[Any]:
            found = self._store.after(_short(key), "-")
            if max != "+":
                last = id_order(max.removeprefix("("))
                open_end = max.startswith("(")
                found = [m for m in found if id_order(m.id) < last + (() if open_end else (0,))]
            return [(m.id.encode(), {b"d": m.data}) for m in found[:count]]

        page: list[Any] = await Effect("xrange", do)
        return page

    async def exists(self, key: str) -> int:
        return int(await self.get(key) is not None)


def _bitmap(bits: frozenset[int]) -> bytes:
    """As SETBIT lays them: the first bit is the highest of the first byte."""
    data = bytearray(max(bits) // 8 + 1)
    for bit in bits:
        data[bit // 8] |= 128 >> bit % 8
    return bytes(data)


def _short(key: str) -> str:
    return key.removeprefix(f"m:{{{RUN}}}:")
