"""The modelled store does what the scripts do on a real server, over random calls.

What would be seen: a dedupe, fence, `needs`, bit, retire, drop or trim that the model has otherwise
than muster.streams, so that the fault bench would prove nothing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis as Plain
from redis.asyncio import Redis

from muster.errors import Refused
from muster.streams import RunStreams, StreamEntry
from muster.supervise.plan import server_binary
from sim.streams import RUN, ModelStreams, Store, at_once
from sim.world import World

_GROUPS = st.sampled_from(("job-0", "job-1"))
_DEDUPE = st.sampled_from(("opened", "a", "b"))


@st.composite
def _entries(draw: Any) -> StreamEntry:
    group, dedupe = draw(_GROUPS), draw(_DEDUPE)
    needs = "" if dedupe == "opened" else draw(st.sampled_from(("", "opened")))
    bit = (("retired", "job"), int(group[-1])) if draw(st.booleans()) else None
    data = f"{group}/{dedupe}".encode()
    return StreamEntry("events", f"g:{group}", dedupe, data, needs=needs, unless_bit=bit)


_CALLS = st.one_of(
    st.tuples(
        st.just("append"),
        st.lists(_entries(), min_size=1, max_size=3),
        st.sampled_from((b"", b"tokens", b"other tokens")),
    ),
    st.tuples(st.just("drop")),
    st.tuples(st.just("mark_read"), st.sampled_from(("0", "5-0", "7-1"))),
    st.tuples(st.just("mark"), st.integers(0, 5)),
    st.tuples(st.just("retire"), _GROUPS),
    st.tuples(st.just("trim"), st.integers(0, 5)),
    st.tuples(st.just("epoch")),
)


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("valkey")
    path = folder / "s"
    options = ("--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--save", "")
    with subprocess.Popen([server_binary(), *options], stdout=subprocess.PIPE) as server:
        assert server.stdout
        for line in server.stdout:
            if b"ready to accept" in line.lower():
                break
        yield path
        server.terminate()


class Both:
    """The same calls on the model and on the real thing."""

    def __init__(self, client: Redis):
        self.client, self.store = client, Store(World(0))
        self.owners = [0]  # epochs handed out; the newest is last

    def _streams(self, owner: int) -> tuple[ModelStreams, RunStreams]:
        model = ModelStreams(self.store, role="router", epoch=owner)
        return model, RunStreams(self.client, RUN, role="router", epoch=owner)

    async def step(self, call: tuple[Any, ...], owner: int) -> None:
        told = [
            await self._one(streams, call, side)
            for side, streams in enumerate(self._streams(owner))
        ]
        assert told[0] == told[1], call

    async def _one(
        self, streams: ModelStreams | RunStreams, call: tuple[Any, ...], side: int
    ) -> Any:
        try:
            if call[0] == "append":
                payloads = {streams.key("p", "x"): call[2]} if call[2] else {}
                return await _now(streams.append(call[1], payloads), side)
            if call[0] == "drop":
                return await _now(streams.drop([streams.key("p", "x")]), side)
            if call[0] == "mark_read":
                return await _now(streams.mark_read({"fates": call[1]}), side)
            if call[0] == "mark":
                return await _now(streams.advance_mark(call[1], b"[%d.5]" % call[1]), side)
            if call[0] == "retire":
                index = int(call[1][-1])
                return await _now(
                    streams.retire(
                        call[1],
                        job="job",
                        index=index,
                        totals={"turns": 2},
                        delete=[streams.key("p", "x")],
                    ),
                    side,
                )
            found = await _now(streams.read_all("events"), side)
            ids = [message.id for message in found]
            if call[1] >= len(ids):
                return 0
            return await _now(streams.trim("events", ids[call[1]], ["x"]), side)
        except Refused as error:  # a former owner, or a group that is gone
            return type(error)

    async def same(self) -> None:
        model, real = self._streams(self.owners[-1])
        left = [m.data for m in await _now(model.read_all("events"), 0)]
        assert left == [m.data for m in await real.read_all("events")]
        keys = [real.key("p", "x")]
        assert await _now(model.payloads(keys), 0) == await real.payloads(keys)
        assert await _now(model.read_by("router"), 0) == await real.read_by("router")
        mark: Any = await self.client.hgetall(real.key("mark"))  # type: ignore[misc]
        assert {k.decode(): v.decode() for k, v in mark.items()} == self.store.hashes.get(
            "mark", {}
        )
        bits = await self.client.get(real.key("retired", "job"))
        assert bool(bits) == bool(self.store.bits.get("retired:job"))
        totals: Any = await self.client.hgetall(real.key("totals", "job"))  # type: ignore[misc]
        known = self.store.hashes.get("totals:job", {})
        assert {k.decode(): v.decode() for k, v in totals.items()} == known


async def _now(effect: Any, side: int) -> Any:
    """The model's effects happen at once, the server's are waited for."""
    if side == 1:
        return await effect
    return at_once(effect)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.tuples(_CALLS, st.booleans()), max_size=25))
async def test_model_and_server_agree(socket: Path, calls: list[tuple[Any, bool]]) -> None:
    Plain(unix_socket_path=str(socket)).flushall()
    client = Redis(unix_socket_path=str(socket))
    both = Both(client)
    for call, former in calls:
        if call[0] == "epoch":
            both.owners.append(both.store.next_epoch("router"))
            await client.incr(f"m:{{{RUN}}}:epoch:router")
            continue
        await both.step(call, both.owners[-2 if former and len(both.owners) > 1 else -1])
    await both.same()
    await client.aclose()
