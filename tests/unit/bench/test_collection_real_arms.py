"""The planned replies in the shipped calls, and the same arms in the simulator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import astuple, replace

from bench import _real_plan as plans
from bench import _real_predict as predict
from bench import _real_setup as services
from bench._real_plan import QUICK, Added, Book
from bench._real_predict import Fitted
from bench._real_router import PlannedCalls, written
from muster.entries import Opened, RunRecord, Turn
from muster.errors import InvalidInput
from muster.types import EpisodeKey, EpisodeState, SamplingParams, StateInterval
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from services.router import chat
from services.router import events as e
from services.router.rules import RouterRules
from sim.rollout.costs import EngineCosts
from sim.rollout.workload import TB_LIKE, Spread, Workload
from tests.unit.bench.test_collection_real import SLOW, WORDS, asked, regime
from tests.unit.rollout.recorded import Played
from tests.unit.router.test_conversation import Letters

KEY = EpisodeKey("r", "j-00003", 1, 0, 1)


class Answered(PlannedCalls):
    """Replicas that answer as many tokens as they are asked for."""

    async def _sample(self, command: e.Generate, context: bytes, room: int):  # type: ignore[no-untyped-def]
        span = pb.VersionSpan(version=0, start=0, end=room)
        finish = inf.GenerateFinish(reason=inf.FINISH_REASON_LENGTH, spans=[span])
        return ((ord("x"),) * room, (-0.5,) * room), finish


async def no_archive(digest: str) -> bytes:
    raise AssertionError(digest)


def book() -> Book:
    return Book(plans.with_waits(regime(QUICK), 0.01), 5, WORDS)


def ask(turn: int) -> e.Generate:
    opening = chat.opening("go") if turn == 0 else ()
    return e.Generate(KEY, "r0", turn, 0, opening, 4096, 1 << 20, SamplingParams(), 5.0)


async def test_each_request_asks_for_the_planned_tokens_and_is_read_as_the_planned_reply() -> None:
    calls = Answered(book(), Letters(), no_archive, box_start_timeout_s=1.0)
    plan = book().planned().plan(3, 1, 0)
    told = [await calls.generate(ask(turn)) for turn in range(len(plan.turns))]
    replies = [event for event in told if isinstance(event, e.Generated)]
    assert [r.sampled_tokens for r in replies] == [t.sampled_tokens for t in plan.turns]
    commands = [chat.parse(r.text, r.finish).command for r in replies]
    assert [c.startswith("sleep ") for c in commands] == [True] * (len(plan.turns) - 1) + [False]
    assert replies[-1].text == plans.DONE


async def test_a_plan_that_is_over_has_filled_its_context() -> None:
    calls = Answered(book(), Letters(), no_archive, box_start_timeout_s=1.0)
    beyond = len(book().planned().plan(3, 1, 0).turns)
    assert isinstance(await calls.generate(ask(beyond)), e.ContextFull)


def test_the_routers_process_reads_the_book_that_was_written() -> None:
    assert msgspec.json.decode(written(book()), type=Book) == book()


def rules(arm: str, tmp_path: Path) -> RouterRules:
    tmp_path.mkdir(exist_ok=True)
    setup = replace(asked(arm, tmp_path), book=book())
    return services.router_rules(services.configured(setup, tmp_path / arm))


def predicted(arm: str, rules: RouterRules, added: Added = plans.NOTHING) -> predict.Predicted:
    return predict.predicted(arm, rules, book(), 1, Fitted(SLOW, added), 24)


def test_equal_arms_are_predicted_equally(tmp_path: Path) -> None:
    muster = rules("muster", tmp_path)
    assert predicted("muster", muster) == predicted("muster", muster)


def test_an_arm_is_simulated_with_the_rules_of_its_router(tmp_path: Path) -> None:
    strong = rules("strong", tmp_path)
    fewer = replace(strong, episodes_max=4)
    assert predicted("strong", fewer).cuts_s[-1] > 1.5 * predicted("strong", strong).cuts_s[-1]


def test_what_services_take_beyond_the_plan_delays_the_predicted_batch(tmp_path: Path) -> None:
    strong = rules("strong", tmp_path)
    later, sooner = (predicted("strong", strong, Added(step_s=s)).cuts_s[-1] for s in (5.0, 0.0))
    assert later > sooner + 5.0


def test_the_likely_time_lies_within_its_range(tmp_path: Path) -> None:
    known = Fitted(SLOW, plans.NOTHING)
    found = predict.likely("strong", rules("strong", tmp_path), book(), 1, known, 24)
    least, most = found.range_s
    assert least <= found.cuts_s[-1] <= most
    assert least < most


def replied(*seconds: float) -> RunRecord:
    """A run that began at 1,000 s, with a reply after each of these."""
    turns = [
        Turn(str(n), replace(KEY, sibling=n), 0, 0, 9, 9, 0, (), "r0", (interval,))
        for n, s in enumerate(seconds)
        for interval in (StateInterval(EpisodeState.DECODE, 1_000.0, 1_000.0 + s),)
    ]
    opened = Opened("0", KEY, "j", "t", 8, 0, 1_000.0)
    return RunRecord("r", opened=(opened,), turns=tuple(turns))


def told_by(record: RunRecord, tmp_path: Path, costs: EngineCosts = SLOW) -> predict.Checked:
    known = Fitted(costs, plans.NOTHING)
    return predict.checked(record, rules("strong", tmp_path), book(), 1, known, 24)


def test_a_run_is_told_by_when_as_many_replies_were_simulated(tmp_path: Path) -> None:
    few = told_by(replied(1.0, 3.0, 2.0), tmp_path / "a")
    many = told_by(replied(*map(float, range(1, 31))), tmp_path / "b")
    assert (few.measured_s, many.measured_s) == (3.0, 30.0)
    assert 0 < few.predicted_s < many.predicted_s


def test_a_slower_engine_is_off_its_run(tmp_path: Path) -> None:
    run = replied(*map(float, range(1, 31)))
    slower = EngineCosts(*(10 * s for s in astuple(SLOW)))
    plain, slow = told_by(run, tmp_path / "a"), told_by(run, tmp_path / "b", slower)
    assert slow.predicted_s > 3 * plain.predicted_s


def test_a_run_without_a_reply_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no reply"):
        told_by(RunRecord("r"), tmp_path)


# -- what a recorded run tells ---------------------------------------------------------------

PLAYED = replace(
    TB_LIKE, groups=4, group_size=4, turns=Spread(5, 0.5), hazard_per_s=0.0, start_failure=0.0
)


def told(times: float) -> Fitted:
    """Of a run of other waits than its book has."""
    book = Book(plans.with_waits(PLAYED, times), 1, replace(WORDS, around=0))
    return predict.fitted(Played(PLAYED, EngineCosts(), seed=1).record(), book)


def test_services_that_take_as_long_as_planned_add_nothing() -> None:
    added = told(1.0).added
    assert (added.step_s, added.verify_s) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_what_services_take_beyond_the_plan_is_found() -> None:
    half = [Workload(PLAYED, 1).plan(g, s, 0) for g in range(4) for s in range(4)]
    tools = [turn.tool_s / 2 for plan in half for turn in plan.turns[:-1]]
    added = told(0.5).added
    assert added.step_s == pytest.approx(sum(tools) / len(tools))
    assert added.verify_s == pytest.approx(sum(plan.verify_s / 2 for plan in half) / len(half))
