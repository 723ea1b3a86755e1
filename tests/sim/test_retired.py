"""A group that is over for good is not opened again, whatever its router has read."""

from __future__ import annotations

import pytest

from muster.errors import Refused
from muster.types import EpisodeKey, SamplingParams
from services.router import events as e
from services.router.adapters.durable import Durable
from sim.client import ModelRedis
from sim.streams import RUN, ModelStreams, Store, at_once
from sim.world import World


def test_opening_a_retired_group_is_refused() -> None:
    store = Store(World(1))
    streams = ModelStreams(store)
    durable = Durable(ModelRedis(store), streams)  # type: ignore[arg-type]
    group, key = e.OpenGroup("job-00004", "job", "t", "d", 1, 0, SamplingParams()), "job-00004"
    at_once(durable.open_group(group, EpisodeKey(RUN, key, 0, 0, 1)))
    at_once(streams.retire(key, job="job", index=4, totals={}, delete=()))
    with pytest.raises(Refused, match="over"):
        at_once(durable.open_group(group, EpisodeKey(RUN, key, 0, 0, 1)))
