"""A power cut takes back the end of what the modelled store was told, whole, and nothing else.

What would be seen: a script of which one effect stays while another goes (an entry without its
tokens, a trim that keeps what a power cut takes), so that the search would play what no server
does.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import Refused
from muster.streams import StreamEntry
from sim.client import ModelRedis
from sim.streams import ModelStreams, Store, at_once
from sim.world import World

LOST_S = 0.5
_GROUPS = st.sampled_from(("job-0", "job-1"))
_KEYS = st.sampled_from(("x", "y"))
_CALLS = st.one_of(
    st.tuples(st.just("append"), _GROUPS, st.sampled_from(("opened", "a", "b")), _KEYS),
    st.tuples(st.just("retire"), _GROUPS, _KEYS),
    st.tuples(st.just("trim"), st.integers(0, 5), st.sampled_from(("a", "b"))),
    st.tuples(st.just("drop"), _KEYS),
    st.tuples(st.just("mark"), st.integers(0, 5)),
    st.tuples(st.just("read"), st.sampled_from(("5-0", "7-1"))),
    st.tuples(st.just("hset"), _KEYS),
    st.tuples(st.just("hdel"), _KEYS),
    st.tuples(st.just("unlink"), _KEYS),
    st.tuples(st.just("epoch")),
)


def _append(store: Store, group: str, dedupe: str, key: str) -> None:
    needs = "" if dedupe == "opened" else "opened"
    bit = (("retired", "job"), int(group[-1]))
    entry = StreamEntry("events", f"g:{group}", dedupe, b"entry", needs=needs, unless_bit=bit)
    with contextlib.suppress(Refused):
        at_once(ModelStreams(store).append([entry], {key: dedupe.encode()}))


def _retire(store: Store, group: str, key: str) -> None:
    index = int(group[-1])
    effect = ModelStreams(store).retire(
        group, job="job", index=index, totals={"n": 2}, delete=[key]
    )
    at_once(effect)


def _trim(store: Store, first: int, field: str) -> None:
    found = store.after("events", "-")
    if first < len(found):
        at_once(ModelStreams(store).trim("events", found[first].id, [field]))


_EFFECTS: dict[str, Callable[..., object]] = {
    "append": _append,
    "retire": _retire,
    "trim": _trim,
    "drop": lambda store, key: at_once(ModelStreams(store).drop([key])),
    "mark": lambda store, step: at_once(ModelStreams(store).advance_mark(step, b"[1.5]")),
    "read": lambda store, at: at_once(ModelStreams(store).mark_read({"fates": at})),
    "hset": lambda store, key: at_once(ModelRedis(store).hset("jobs", key, "spec")),
    "hdel": lambda store, key: at_once(ModelRedis(store).hdel("jobs", key)),
    "unlink": lambda store, key: at_once(ModelRedis(store).unlink(key)),
    "epoch": lambda store: store.next_epoch("router"),
}


def _do(store: Store, call: tuple[Any, ...]) -> None:
    _EFFECTS[call[0]](store, *call[1:])


def _held(store: Store) -> Any:
    return copy.deepcopy((store.streams, store.hashes, store.values, store.bits))


def _wait(world: World, for_s: float) -> None:
    over: list[bool] = []
    world.after(for_s, lambda: over.append(True))
    world.run(lambda: bool(over), lambda: None, until_s=world.now + 2 * for_s)


@given(kept=st.lists(_CALLS, max_size=12), lost=st.lists(_CALLS, max_size=12))
def test_what_came_after_the_last_sync_was_never_there_and_all_else_is(
    kept: list[tuple[Any, ...]], lost: list[tuple[Any, ...]]
) -> None:
    world = World(0)
    store = Store(world)
    for call in kept:
        _do(store, call)
    _wait(world, LOST_S + 0.1)
    synced = _held(store)
    for call in lost:
        _do(store, call)
    store.power_cut(LOST_S)
    assert _held(store) == synced


@pytest.mark.parametrize("lost_s", [0.2, 5.0])
def test_a_cut_reaches_back_by_as_much_as_it_says_and_never_by_more_than_a_second(
    lost_s: float,
) -> None:
    world = World(0)
    store = Store(world)
    for key in ("long ago", "lately", "just now"):
        store.undo.put(store.values, key, b"")
        _wait(world, {"long ago": 0.7, "lately": 0.5, "just now": 0.1}[key])
    store.power_cut(lost_s)
    assert set(store.values) == ({"long ago", "lately"} if lost_s == 0.2 else {"long ago"})


def test_what_waited_for_the_disk_stays() -> None:
    store = Store(World(0))
    _do(store, ("mark", 3))
    at_once(store.take_epoch("router"))
    store.power_cut(1.0)
    assert (store.hashes["mark"]["step"], store.epoch("router")) == ("3", 1)
