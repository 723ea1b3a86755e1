"""Snapshots: what stands on what, what is pinned, what goes first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import Exhausted
from services.sandbox.box import Snapshot
from services.sandbox.layers import Layer, LayerRules, Layers


def layer(name: str, under: str = "", content: str = "", *, size: int = 1, depth: int = 1) -> Layer:
    return Layer(name, under, Snapshot(size, depth), content)


def gone(layers: Layers) -> list[str]:
    return [one.name for one in layers.collect()]


def test_the_snapshot_of_a_set_up_stays_when_nobody_uses_it() -> None:
    layers = Layers(LayerRules())
    layers.add(layer("a", content="c"), 0)
    layers.use("box", "a", 1)
    layers.leave("box", 2)
    assert gone(layers) == []
    assert layers.of_content("c") == layer("a", content="c")


def test_that_of_a_forked_box_goes_with_its_last_user() -> None:
    layers = Layers(LayerRules())
    layers.add(layer("a"), 0)
    layers.use("box", "a", 1)
    layers.use("twin", "a", 1)
    layers.leave("box", 2)
    assert gone(layers) == []
    layers.leave("twin", 2)
    assert gone(layers) == ["a"]


def test_what_another_snapshot_stands_on_goes_after_it() -> None:
    layers = Layers(LayerRules())
    layers.add(layer("below"), 0)
    layers.add(layer("above", "below", depth=2), 0)
    layers.use("box", "above", 0)
    assert gone(layers) == []
    layers.leave("box", 1)
    assert gone(layers) == ["above", "below"]


def test_too_many_go_by_how_long_nobody_used_them() -> None:
    layers = Layers(LayerRules(snapshots_max=2))
    for number in range(4):
        layers.add(layer(f"l{number}", content=f"c{number}"), number)
    layers.use("box", "l0", 9)
    assert gone(layers) == ["l1", "l2"]
    assert layers.of_content("c1") is None
    assert layers.of_content("c0") is not None


def test_too_large_ones_go_too_and_a_used_one_never() -> None:
    layers = Layers(LayerRules(bytes_max=10))
    layers.add(layer("used", content="a", size=100), 0)
    layers.use("box", "used", 0)
    layers.add(layer("unused", content="b", size=1), 1)
    assert gone(layers) == ["unused"]
    assert layers.size == 100


def test_a_newer_snapshot_of_the_same_content_replaces_the_older() -> None:
    layers = Layers(LayerRules())
    layers.add(layer("old", content="c"), 0)
    layers.add(layer("new", content="c"), 1)
    assert gone(layers) == ["old"]
    assert layers.of_content("c") == layer("new", content="c")


def test_a_snapshot_is_too_deep_only_beyond_the_bound() -> None:
    layers = Layers(LayerRules(depth_max=3))
    layers.add(layer("fits", depth=3), 0)
    layers.add(layer("deep", "fits", depth=4), 0)
    assert not layers.too_deep("fits")
    assert layers.too_deep("deep")
    assert [one.name for one in layers.chain("deep")] == ["deep", "fits"]


def test_a_squashed_one_keeps_the_set_ups_that_it_came_from() -> None:
    layers = Layers(LayerRules(snapshots_max=1))
    layers.add(layer("set-up", content="c"), 0)
    layers.add(layer("fork", "set-up", depth=2), 1)
    assert layers.set_ups_below("fork") == ("set-up",)
    layers.add(Layer("flat", "", Snapshot(1, 1), needs=("set-up",)), 2)
    layers.use("box", "flat", 2)
    assert gone(layers) == ["fork"]
    layers.add(layer("again", "flat", depth=2), 3)
    assert layers.set_ups_below("again") == ("set-up",)
    assert [one.name for one in layers.chain("again")] == ["again", "flat", "set-up"]
    layers.forget("c")
    assert gone(layers) == ["again"]
    layers.leave("box", 4)
    assert gone(layers) == ["flat", "set-up"]


def test_a_chain_names_what_is_needed_twice_once_and_last() -> None:
    layers = Layers(LayerRules())
    layers.add(layer("set-up", content="c"), 0)
    layers.add(Layer("flat", "", Snapshot(), needs=("set-up",)), 0)
    layers.add(Layer("top", "flat", Snapshot(), needs=("set-up",)), 0)
    assert [one.name for one in layers.chain("top")] == ["top", "flat", "set-up"]


def test_there_is_room_for_a_fork_while_those_in_use_are_within_the_bounds() -> None:
    layers = Layers(LayerRules(snapshots_max=2, bytes_max=10))
    layers.add(layer("unused", content="c", size=100), 0)
    layers.add(layer("used", size=9), 0)
    layers.use("box", "used", 0)
    layers.use("twin", "used", 0)
    layers.check_room(1)
    with pytest.raises(Exhausted) as caught:
        layers.check_room(2)
    assert caught.value.field == "sandbox.snapshots_max"
    layers.add(layer("more", "used", size=2), 0)
    layers.use("twin", "more", 0)
    with pytest.raises(Exhausted) as caught:
        layers.check_room(0)
    assert caught.value.field == "sandbox.snapshot_bytes_max"


@given(st.integers(0, 1 << 32), st.integers(1, 60))
def test_nothing_that_is_stood_on_ever_goes(seed: int, steps: int) -> None:
    """Against a list of who stands on what, kept by hand."""
    chance = random.Random(seed)
    layers = Layers(LayerRules(snapshots_max=3))
    under: dict[str, str] = {}
    users: dict[str, str] = {}
    for number in range(steps):
        verb = chance.choice(("add", "add", "use", "leave", "collect"))
        if verb == "add":
            name, below = f"l{number}", chance.choice(["", *under])
            content = chance.choice(("", f"c{number}")) if not below else ""
            under[name] = below
            layers.add(layer(name, below, content), number)
        elif verb == "use" and under:
            user = users[f"b{number}"] = chance.choice(list(under))
            layers.use(f"b{number}", user, number)
        elif verb == "leave" and users:
            user = chance.choice(list(users))
            del users[user]
            layers.leave(user, number)
        else:
            for one in layers.collect():
                assert one.name not in users.values()
                assert one.name not in under.values()
                del under[one.name]
        assert layers.count == len(under)
