"""How the simulated workload is scaled to real services, and the words in which it meets them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench import _real_plan as plans
from bench import _real_setup as services
from bench import _results
from bench._real_plan import FULL, QUICK, Added, Book, Planned, Words
from bench._real_predict import Checked, Fitted, less, require_told
from bench._real_world import trained
from bench.collection_real import earlier_fit, earlier_result, fitted_figures
from muster.errors import InvalidInput, NotFound
from muster.types import FinishReason
from services.router import chat
from services.router.carriers import Message
from services.router.conversation import Conversation
from sim.rollout.costs import EngineCosts
from sim.rollout.muster import AHEAD_BATCHES
from sim.rollout.workload import TB_LIKE, Plan, Turn
from tests.unit.router.test_conversation import Letters

WORDS = Words(system=170, group=66, around=21)
SLOW = EngineCosts(0.02, 0.8, 0.05, 0.03, 0.005, 2e-7)
SMOLLM2 = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}


def regime(size: plans.Size = FULL):  # type: ignore[no-untyped-def]
    return plans.regime(size, WORDS, plans.kv_tokens(size.trajectories))


def drawn(book: Book) -> list[Plan]:
    workload = book.planned()
    return [workload.plan(g, s, 0) for g in range(32) for s in range(8)]


def plan(*turns: Turn, full: bool = False) -> Plan:
    prompt = 100
    tokens = prompt + sum(t.sampled_tokens + t.observation_tokens for t in turns)
    return Plan(turns, prompt, 1.0, False, 1e9, 5.0, 1.0, full, tokens, 1.0)


# -- sizes ---------------------------------------------------------------------------------


def test_a_trajectory_of_a_batch_has_as_much_kv_as_simulated_over_twenty() -> None:
    simulated = TB_LIKE.replicas * TB_LIKE.kv_tokens / 256 / 20
    for trajectories in (64, 256):
        whole = plans.REPLICAS * plans.kv_tokens(trajectories)
        assert whole / trajectories == pytest.approx(simulated, rel=0.01)


def test_kv_memory_is_that_of_the_model() -> None:
    one, more = (plans.kv_gib(tokens, SMOLLM2) * 2**30 for tokens in (0, 1000))
    assert more - one == pytest.approx(1000 * 23_040)
    assert one == pytest.approx(plans.BLOCK * 23_040), "the block that an engine keeps"


def test_both_arms_take_256_trajectories_and_launch_a_quarter_of_a_batch_in_turn() -> None:
    assert FULL.trajectories * FULL.batches == 256
    assert FULL.interleave_groups / FULL.groups == 8 / TB_LIKE.groups
    assert QUICK.interleave_groups == 1


def test_all_token_counts_are_divided_by_twenty() -> None:
    scaled = regime()
    assert scaled.observation.median == TB_LIKE.observation.median / 20
    assert scaled.sampled.median == TB_LIKE.sampled.median / 20
    assert (scaled.observation.sigma, scaled.turns) == (TB_LIKE.observation.sigma, TB_LIKE.turns)


# -- waits ---------------------------------------------------------------------------------


def test_tools_take_their_share_of_an_episode_that_is_alone() -> None:
    unscaled = regime()
    factor = plans.wait_factor(drawn(Book(unscaled, 1, WORDS)), SLOW)
    episodes = drawn(Book(plans.with_waits(unscaled, factor), 1, WORDS))
    tools = sum(turn.tool_s for episode in episodes for turn in episode.turns)
    engine = sum(plans.engine_alone_s(episode, SLOW) for episode in episodes)
    assert tools / (tools + engine) == pytest.approx(plans.TOOL_SHARE)


def test_an_engine_alone_computes_each_token_once() -> None:
    costs = EngineCosts(0.0, 1.0, 0.0, 0.0, 0.1, 0.0)
    two = plan(Turn(50, 10, 1.0), Turn(0, 20, 0.0))
    assert plans.engine_alone_s(two, costs) == pytest.approx((100 + 50) / 1000 + 30 * 0.1)


def test_waits_are_scaled_and_nothing_else_of_a_plan() -> None:
    for before, after in zip(
        drawn(Book(regime(), 1, WORDS)),
        drawn(Book(plans.with_waits(regime(), 0.1), 1, WORDS)),
        strict=True,
    ):
        assert [t[:2] for t in after.turns] == [t[:2] for t in before.turns]
        waits = [(p.verify_s, p.box_start_s, *(t.tool_s for t in p.turns)) for p in (before, after)]
        assert waits[1] == pytest.approx([0.1 * wait for wait in waits[0]])


def test_the_arms_meet_the_same_plans_but_for_the_start_of_boxes() -> None:
    cold = drawn(Book(regime(), 1, WORDS, cold=True))
    warm = drawn(Book(plans.with_warm(regime(), 0.1), 1, WORDS))
    assert [p._replace(box_start_s=0.0, alone_s=0.0) for p in cold] == [
        p._replace(box_start_s=0.0, alone_s=0.0) for p in warm
    ]
    assert all(p.box_start_s > 1 for p in cold)
    assert all(p.box_start_s == 0 for p in warm)


def test_what_real_services_add_is_added_once() -> None:
    book = Book(regime(), 1, WORDS)
    before = book.planned().plan(0, 0, 0)
    after = book.planned(Added(box_s=1.0, step_s=2.0, verify_s=3.0)).plan(0, 0, 0)
    assert after.box_start_s == before.box_start_s + 1.0
    assert after.verify_s == before.verify_s + 3.0
    assert after.turns[0].tool_s == before.turns[0].tool_s + 2.0


def test_nothing_is_added_to_a_verification_that_is_none() -> None:
    tiny = replace(regime(), context_limit=300)
    episodes = [Planned(Book(tiny, 1, WORDS), Added(verify_s=3.0)).plan(0, s, 0) for s in range(8)]
    waits = {episode.verify_s for episode in episodes if episode.context_full}
    assert waits == {0.0}


# -- plans ---------------------------------------------------------------------------------


def test_an_observation_is_never_shorter_than_the_words_around_it() -> None:
    found = plans.sayable(plan(Turn(3, 10, 1.0), Turn(90, 10, 1.0), Turn(7, 10, 2.0)), 22, 4096)
    assert found.turns == (Turn(22, 10, 1.0), Turn(90, 10, 1.0), Turn(0, 10, 0.0))
    assert found.tokens == 100 + 22 + 90 + 30
    assert not found.context_full


@pytest.mark.parametrize(
    ("limit", "last"),
    [(145, Turn(13, 10, 1.0)), (119, Turn(9, 10, 1.0)), (105, Turn(0, 5, 0.0))],
)
def test_an_episode_that_fills_its_context_ends_there_and_is_not_verified(
    limit: int, last: Turn
) -> None:
    longer = plan(Turn(12, 10, 1.0), Turn(90, 10, 1.0), Turn(0, 10, 0.0))
    found = plans.sayable(longer, 2, limit)
    assert found.turns[-1] == last
    assert (found.tokens, found.context_full) == (limit, True)
    assert (found.reward, found.verify_s) == (0.0, 0.0)


def test_a_plan_that_is_full_stays_so() -> None:
    full = plan(Turn(50, 10, 1.0), Turn(30, 10, 1.0), full=True)
    assert plans.sayable(full, 2, 200).turns == full.turns


# -- words ---------------------------------------------------------------------------------


def test_a_planned_reply_takes_its_time_and_prints_so_many_tokens() -> None:
    codec = Letters()
    talk = Conversation(codec)
    talk.open(chat.opening(plans.instruction(0)))
    words = plans.words(codec)
    assert words.system + words.group == len(talk)
    text = plans.reply(plan(Turn(80, 10, 0.25), Turn(0, 10, 0.0)), 0, "e", words.around)
    command = chat.parse(text, FinishReason.STOP).command
    sleep, printed = command.split("; printf %s ")
    assert sleep == "sleep 0.250"
    before = len(talk)
    talk.observe(Message("user", chat.observation(0, 0.3, printed, "none")))
    assert len(talk) - before == 80


def test_the_last_reply_of_a_plan_says_done_unless_its_context_is_full() -> None:
    for full in (False, True):
        text = plans.reply(plan(Turn(40, 10, 1.0), full=full), 0, "e", 21)
        assert chat.parse(text, FinishReason.STOP).done is not full


# -- services ------------------------------------------------------------------------------


def asked(arm: str, tmp_path: Path) -> services.Setup:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**SMOLLM2, "eos_token_id": 2}), "utf-8")
    return services.setup(arm, Book(regime(), 1, WORDS, cold=arm == "strong"), FULL, model)


def test_an_arm_is_the_rules_of_its_router(tmp_path: Path) -> None:
    muster, strong = (
        services.router_rules(services.configured(asked(arm, tmp_path), tmp_path / arm))
        for arm in ("muster", "strong")
    )
    assert (muster.placement, muster.admission, muster.lag_max) == (
        "predicted_finish",
        "kv_fit",
        16,
    )
    assert (muster.reserve_tokens, muster.interleave_groups) == (1_250, 2)
    told = (strong.placement, strong.admission, strong.lag_max, strong.repairs_max)
    assert told == ("sticky_least_loaded", "none", 0, 0)
    assert muster.groups_per_batch == strong.groups_per_batch == 8


def test_a_model_without_an_end_of_text_is_otherwise_the_same(tmp_path: Path) -> None:
    asked("muster", tmp_path)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 2}', "utf-8")
    (tmp_path / "model" / "tokenizer.json").write_text("{}", "utf-8")
    folder = services.unending(tmp_path / "model", tmp_path / "other")
    assert json.loads((folder / "config.json").read_text("utf-8")) == SMOLLM2
    assert json.loads((folder / "generation_config.json").read_text("utf-8")) == {}
    assert (folder / "tokenizer.json").read_text("utf-8") == "{}"


def test_each_group_has_a_task_of_its_own(tmp_path: Path) -> None:
    tasks = services.write_tasks(tmp_path / "tasks", asked("muster", tmp_path))
    texts = [(task / "instruction.md").read_text("utf-8") for task in tasks]
    assert len(set(texts)) == len(texts) == FULL.groups * (FULL.batches + AHEAD_BATCHES)
    assert {len(text) for text in texts} == {60}


def test_a_calibration_is_as_large_and_as_short_of_kv_as_the_runs(tmp_path: Path) -> None:
    strong = asked("strong", tmp_path)
    book = replace(strong.book, seed=9)
    calibration = services.calibration(book, FULL, Path(strong.model))
    assert calibration.book.regime == strong.book.regime
    assert (calibration.arm, calibration.for_s) == ("strong", FULL.calibration_s)


class Stuck:
    """A trainer to whom no batch ever comes, of a run in which little happens."""

    def __init__(self) -> None:
        self.looks = 0

    async def train(self, batches: int) -> None:
        await asyncio.Event().wait()

    async def recorded(self) -> int:
        self.looks += 1
        return self.looks


@pytest.mark.parametrize("entries", [0, 3, 1_000_000])
async def test_a_run_of_so_many_seconds_ends_soon_whatever_was_recorded(
    tmp_path: Path, entries: int
) -> None:
    await trained(Stuck(), replace(asked("strong", tmp_path), for_s=0.01, entries=entries))


class Late(Stuck):
    """A trainer who waited too long for a batch."""

    async def train(self, batches: int) -> None:
        raise TimeoutError


async def test_a_run_of_batches_does_not_end_without_them(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        await trained(Late(), asked("strong", tmp_path))


def test_less_is_the_share_of_time_saved() -> None:
    assert less(30.0, 120.0) == 0.75


def test_figures_of_the_fit_are_named_for_what_they_are() -> None:
    named = fitted_figures(Fitted(SLOW, Added(step_s=0.2)), Checked(300.0, 310.0), 0.1)
    assert (named["engine_decode_base_s"], named["added_step_s"]) == (0.03, 0.2)
    assert (named["calibration_measured_s"], named["calibration_predicted_s"]) == (300.0, 310.0)


def test_what_was_fitted_is_read_again_from_the_figures() -> None:
    known = Fitted(SLOW, Added(0.1, 0.2, 0.3))
    figures = fitted_figures(known, Checked(300.0, 310.0), 0.4)
    assert earlier_fit(figures) == (known, 0.4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no json", NotFound),
        ('{"name": "bank", "figures": {"measured_strong_s": 1}}', InvalidInput),
        ('{"name": "collection_real", "figures": {"predicted_strong_s": 1}}', InvalidInput),
    ],
)
def test_only_a_result_with_strong_is_compared_again(
    tmp_path: Path, text: str, error: type[Exception]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, "utf-8")
    with pytest.raises(error, match="--again"):
        earlier_result(path, tmp_path / "new.json")


@pytest.mark.parametrize(
    ("cpu", "into", "field"), [("another", "new", "--again"), ("", "result", "--json")]
)
def test_arms_of_two_machines_are_not_compared_and_nothing_is_overwritten(
    tmp_path: Path, cpu: str, into: str, field: str
) -> None:
    path = tmp_path / "result.json"
    machine = {"cpu": cpu or _results.machine()["cpu"]}
    figures = {"measured_strong_s": 1.0}
    path.write_text(
        json.dumps({"name": "collection_real", "machine": machine, "figures": figures}), "utf-8"
    )
    with pytest.raises(InvalidInput) as refused:
        earlier_result(path, tmp_path / f"{into}.json")
    assert refused.value.field == field


@pytest.mark.parametrize("predicted_s", [230.0, 370.0])
def test_a_fit_that_tells_its_own_run_may_predict(predicted_s: float) -> None:
    require_told(Checked(300.0, predicted_s))


@pytest.mark.parametrize("predicted_s", [220.0, 380.0, 49_648.0])
def test_a_fit_that_does_not_tell_its_own_run_predicts_nothing(predicted_s: float) -> None:
    with pytest.raises(InvalidInput, match="predict nothing") as refused:
        require_told(Checked(300.0, predicted_s))
    assert "calibration run longer" in refused.value.way_out
