"""Of what evaluations found, the newest stay in Redis; the rest lies on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.history import History
from muster.streams import RunStreams, StreamEntry
from muster.v1 import events_pb2 as ev
from services.readybank.adapters import clearing as module
from tests.unit.readybank.test_clearing import OVER, clearing


async def test_all_but_the_newest_go_to_the_history(
    valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUPS_KEPT", 3)
    monkeypatch.setattr(module, "PAGE", 2)
    streams = RunStreams(valkey, "r")
    for number in range(8):
        data = ev.EvaluatedGroup(group=f"v-{number}", job="v").SerializeToString()
        await streams.append([StreamEntry("evaluations", "evaluations", f"v-{number}", data)])
    ids = [m.id for m in await streams.read_all("evaluations")]
    await (await clearing(valkey, tmp_path)).trim(OVER)
    assert [m.id for m in await streams.read_all("evaluations")] == ids[5:]
    assert [m.id for m in History(tmp_path).read("evaluations")] == ids[:5]
    assert await valkey.hlen(streams.key("seen", "evaluations")) == 3
    await (await clearing(valkey, tmp_path)).trim(OVER)
    assert len(await streams.read_all("evaluations")) == 3
