"""A modelled engine, checked by hand: a prefill takes a second and 10 ms per token where it says
so, a decode step a tenth of a second; blocks of ten tokens."""

from __future__ import annotations

import math

import pytest

from muster.errors import InvalidInput
from sim.rollout.chain import Chain
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import Done, EngineModel

FLAT = EngineCosts(1.0, 0.0, 0.0, 0.1, 0.0, 0.0)
PER_TOKEN = EngineCosts(1.0, 10.0, 0.0, 0.1, 0.0, 0.0)


def engine(kv_tokens: int = 1000, costs: EngineCosts = FLAT, **more: int) -> EngineModel:
    return EngineModel(kv_tokens=kv_tokens, block=10, costs=costs, **more)


def chain(tokens: int) -> Chain:
    made = Chain([])
    made.extend(tokens)
    return made


def lived(model: EngineModel, until: float = math.inf) -> dict[str, Done]:
    done: list[Done] = []
    while (at := model.next_at()) is not None and at <= until:
        done += model.advance(at)
    return {each.id: each for each in done}


def test_one_request_alone() -> None:
    costs = EngineCosts(1.0, 10.0, 1.0, 0.1, 0.01, 0.001)
    model = engine(costs=costs)
    model.submit("a", chain(100), 5, 2.0)

    done = lived(model)["a"]

    assert (done.queue_s, done.cached_tokens) == (0.0, 0)
    assert done.prefill_s == pytest.approx(1 + 10 * 0.1 + 0.1**2)
    # The first token is the prefill's; four steps on contexts of 101 to 104 tokens.
    assert done.decode_s == pytest.approx(4 * 0.11 + 0.001 * (101 + 102 + 103 + 104))
    assert done.at == pytest.approx(2 + done.prefill_s + done.decode_s)
    assert model.busy_s == pytest.approx(done.prefill_s + done.decode_s)
    assert (model.prefilled_tokens, model.sampled_tokens) == (100, 5)
    assert model.steps == 5  # one that ends the prefill, four that decode


def test_steps_move_on_within_a_long_prefill() -> None:
    model = engine(costs=PER_TOKEN, running_max=10, chunk_tokens=100)
    model.submit("a", chain(900), 1, 0.0)
    model.advance(2.5)  # the first chunk took two seconds, the others take one each
    assert [model.steps_by(at) for at in (2.5, 4.5, 7.5)] == [1, 3, 6]


def test_two_requests_share_a_prefix_and_the_second_begins_at_a_step() -> None:
    model = engine(costs=PER_TOKEN)
    for name in ("a", "b"):
        prompt = Chain.shared(("system", 50))
        prompt.extend(25)
        model.submit(name, prompt, 2, 0.0)

    done = lived(model)

    assert done["b"].cached_tokens == 50
    assert done["b"].queue_s == pytest.approx(1.75)
    # a's second token and b's 25 tokens are one step.
    assert done["b"].prefill_s == pytest.approx(0.1 + 1.25)
    assert done["a"].at == pytest.approx(1.75 + 1.35)
    assert done["b"].at == pytest.approx(1.75 + 1.35 + 0.1)


def test_the_head_of_the_line_waits_for_room_and_the_line_behind_it() -> None:
    model = engine(200)
    model.submit("a", chain(150), 11, 0.0)
    model.submit("b", chain(100), 1, 0.5)
    model.submit("c", chain(20), 1, 0.6)

    done = lived(model)

    assert done["a"].at == pytest.approx(2.0)
    assert done["b"].queue_s == pytest.approx(1.5)
    assert done["c"].queue_s == pytest.approx(1.4)
    assert done["b"].at == done["c"].at == pytest.approx(4.0)  # one step, two prefills


def test_a_smaller_priority_goes_first() -> None:
    model = engine(200)
    model.submit("a", chain(150), 11, 0.0)
    model.submit("b", chain(100), 1, 0.5)
    model.submit("c", chain(20), 1, 0.6, priority=-1.0)

    assert lived(model)["c"].queue_s == pytest.approx(0.4)  # at the end of a's prefill


def test_the_newest_gives_way_and_computes_again_what_it_lost() -> None:
    model = engine(100)
    model.submit("a", chain(40), 21, 0.0)
    model.submit("b", chain(40), 21, 0.0)

    done = lived(model)

    # b starts at 1.0; both have five blocks from 2.1. At 3.0 a works on its 51st token, and b, of
    # 50 tokens with 49 computed, gives way. Of its blocks the four full ones stay until it is back.
    assert done["a"].at == pytest.approx(1 + 1.1 + 19 * 0.1)
    assert (done["a"].preemptions, done["b"].preemptions) == (0, 1)
    assert done["b"].recomputed_tokens == 9
    assert done["b"].at == pytest.approx(4.0 + 1 + 10 * 0.1)
    assert model.sampled_tokens == 42


def test_a_clear_makes_running_requests_prefill_again() -> None:
    model = engine()
    model.submit("a", chain(20), 5, 0.0)
    model.advance(1.15)
    model.clear(1.15)  # the step in progress ends at 1.2 with the third token

    done = lived(model)["a"]

    assert done.at == pytest.approx(1.2 + 1 + 0.1)
    assert (done.cached_tokens, done.recomputed_tokens) == (0, 22)
    assert done.decode_s == pytest.approx(1.3)


def test_nothing_is_found_after_a_clear() -> None:
    model, prompt = engine(), chain(40)
    model.submit("a", prompt, 1, 0.0)
    lived(model)
    model.clear(5.0)
    assert model.cache.match(prompt) == 0


@pytest.mark.parametrize("chunk", [33, 700, 5000])
def test_chunks_cost_what_the_whole_does(chunk: int) -> None:
    costs = EngineCosts()
    model = EngineModel(kv_tokens=10_000, costs=costs, running_max=8, chunk_tokens=chunk)
    model.submit("a", chain(4321), 1, 0.0)
    assert lived(model)["a"].at == pytest.approx(costs.prefill_s(4321))


def test_decoding_goes_on_beside_chunks_and_the_time_is_the_sum() -> None:
    model = engine(10_000, PER_TOKEN, running_max=8, chunk_tokens=101)
    model.submit("a", chain(50), 100, 0.0)
    model.submit("b", chain(500), 1, 1.4)

    done = lived(model)

    # A hundred tokens of b in each step of a: five steps.
    assert done["b"].queue_s == pytest.approx(0.1)
    assert done["b"].prefill_s == pytest.approx((1 + 5.0) + 5 * 0.1)
    assert done["a"].at == pytest.approx(1.5 + 99 * 0.1 + 6.0)
    assert model.busy_s == pytest.approx(done["a"].at)


def test_an_aborted_request_is_not_told_and_its_cache_stays() -> None:
    model, prompt = engine(), chain(40)
    model.submit("a", prompt, 50, 0.0)
    model.advance(1.05)
    assert model.abort("a", 1.05)
    assert not model.abort("a", 1.06)

    assert lived(model) == {}
    assert (model.running, model.cache.used) == (0, 0)
    assert model.cache.match(prompt, 41) == 40


def test_the_head_of_the_line_makes_way_when_it_is_aborted() -> None:
    model = engine(200)
    model.submit("a", chain(150), 11, 0.0)
    model.submit("b", chain(100), 1, 0.5)
    model.submit("c", chain(20), 1, 0.6)
    model.advance(1.05)
    assert model.abort("b", 1.05)

    done = lived(model)

    assert "b" not in done
    assert done["c"].queue_s == pytest.approx(0.5)


def test_a_pause_begins_after_the_step_in_progress() -> None:
    model = engine()
    model.submit("a", chain(20), 3, 0.0)
    model.advance(0.5)
    model.pause(7.0)
    assert lived(model)["a"].at == pytest.approx(7.2)


def test_an_idle_replica_has_nothing_due_in_a_pause() -> None:
    model = engine()
    model.submit("a", chain(20), 1, 0.0)
    model.pause(7.0)
    assert lived(model)["a"].at == pytest.approx(1.0)
    assert model.next_at() is None


def test_an_abort_in_a_pause_frees_the_blocks_at_once() -> None:
    model = engine()
    model.submit("a", chain(20), 3, 0.0)
    model.pause(7.0)
    model.advance(2.0)
    assert model.cache.used == 2
    assert model.abort("a", 2.0)
    assert model.cache.used == 0


def test_a_slow_replica_takes_longer_from_the_next_step_on() -> None:
    model = engine()
    model.submit("a", chain(20), 4, 0.0)
    model.advance(1.05)
    model.speed = 0.5
    assert lived(model)["a"].at == pytest.approx(1.1 + 2 * 0.2)


def test_a_killed_replica_loses_all_and_serves_again_empty() -> None:
    model, prompt = engine(200), chain(20)
    model.submit("a", prompt, 100, 0.0)
    model.submit("b", chain(190), 1, 0.1)
    model.touch(chain(30), 0.2)
    model.advance(3.0)

    assert model.kill() == ["a", "b"]
    assert model.next_at() is None
    model.submit("a", prompt, 1, 3.0)
    done = lived(model)["a"]
    assert (done.at, done.cached_tokens) == (pytest.approx(4.0), 0)
    assert done.recomputed_tokens == 20


def test_a_touched_cache_outlives_a_newer_one() -> None:
    model, old, new = engine(100), chain(40), chain(40)
    for at, prompt in enumerate((old, new)):
        model.submit(f"r{at}", prompt, 1, 10.0 * at)
    lived(model)
    model.touch(old, 20.0)
    assert lived(model) == {}
    model.submit("large", chain(60), 1, 30.0)
    lived(model)
    assert (model.cache.match(old, 41), model.cache.match(new, 41)) == (40, 0)


def test_tokens_are_counted_within_a_stretch() -> None:
    model = engine()
    model.submit("a", chain(20), 100, 0.0)
    model.advance(1.0)
    assert model.sampled_by(1.0) == 1
    assert model.sampled_by(3.05) == 21


@pytest.mark.parametrize(("tokens", "sampled"), [(990, 11), (10, 0), (0, 1)])
def test_what_can_never_be_served_is_refused(tokens: int, sampled: int) -> None:
    with pytest.raises(InvalidInput):
        engine(1000).submit("a", chain(tokens), sampled, 0.0)


def test_an_id_that_is_live_is_refused() -> None:
    model = engine()
    model.submit("a", chain(20), 5, 0.0)
    with pytest.raises(InvalidInput):
        model.submit("a", chain(20), 5, 0.1)


def test_a_step_needs_room_for_prefill() -> None:
    with pytest.raises(InvalidInput):
        engine(running_max=64, chunk_tokens=64)
