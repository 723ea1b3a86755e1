"""The real policy on a model of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaForCausalLM

from muster.errors import InvalidInput, Refused
from muster.types import SamplingParams
from services.trainer.adapters import model_files
from services.trainer.adapters.checkpoint import CheckpointMeta, CheckpointStore
from services.trainer.adapters.torch_policy import TorchPolicy, TorchSettings
from services.trainer.figures import Mismatch
from services.trainer.plan import plan_step, report_step
from services.trainer.policy import SentBack, Stopped
from tests.unit.trainer.stories import group, prompt, sampled, trajectory
from tests.unit.trainer.torch_stories import (
    EXACT,
    LINE,
    going,
    plan,
    reference,
    story,
    tiny_llama,
    weights,
    with_logprobs,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("budget", [1, 16, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_shared_prompts_change_no_log_probability(
    base: Path, budget: int, temperature: float
) -> None:
    items = [
        replace(item, sampling=SamplingParams(temperature=temperature))
        for item in story().trajectories
    ]
    step = plan(*items)
    step = with_logprobs(step, reference(base, step))
    policy = TorchPolicy.load(base, replace(EXACT, micro_batch_tokens=budget, logit_rows=3))
    found = policy.train(step, going).mismatch
    assert found.tokens == step.tokens
    assert found.max_abs < 2e-5
    assert found.ess_fraction == pytest.approx(1.0, abs=1e-4)


def test_micro_batches_change_no_gradient(base: Path) -> None:
    results = []
    for budget in (1, 1024):
        policy = TorchPolicy.load(base, replace(EXACT, micro_batch_tokens=budget))
        figures = policy.train(plan(), going)
        results.append((figures.grad_norm, figures.loss))
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)


def test_a_step_makes_rewarded_tokens_likelier(base: Path, tmp_path: Path) -> None:
    step = with_logprobs(plan(), reference(base, plan()))
    policy = TorchPolicy.load(base, EXACT)
    policy.train(step, going)
    policy.write(str(tmp_path), going)
    after = reference(tmp_path, step)
    for name in ("a", "b"):
        gain = sum(
            step.advantages[i] * (float(after[i].sum()) - sum(sequence.logprobs))
            for i, sequence in enumerate(step.sequences)
            if sequence.group == name
        )
        assert gain > 0


def test_the_step_is_measured(base: Path) -> None:
    step = with_logprobs(plan(), reference(base, plan()))
    figures = TorchPolicy.load(base, EXACT).train(step, going)
    assert figures.step_kl > 0
    assert figures.grad_norm > 0
    assert set(figures.per_trajectory) == {"a.0.0", "a.1.0", "a.2.0", "b.0.0", "b.1.0"} | {
        "c.0.0",
        "c.1.0",
    }


@pytest.mark.parametrize("flat", [False, True])
def test_a_step_that_the_judge_does_not_want_leaves_no_trace(base: Path, flat: bool) -> None:
    """It hears of each trajectory what the step would report of it, before a weight moves."""
    step = plan(*group("g", 1.0, 1.0)) if flat else plan()
    policy, heard = TorchPolicy.load(base, EXACT), []
    before = weights(policy)

    def judge(measured: dict[str, Mismatch]) -> bool:
        heard.append(measured)
        return len(heard) > 1

    with pytest.raises(SentBack):
        policy.train(step, going, judge)
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())
    figures = policy.train(step, going, judge)
    assert heard[0] == heard[1] == figures.per_trajectory
    assert figures == TorchPolicy.load(base, EXACT).train(step, going)


def test_a_batch_without_contrast_moves_nothing(base: Path) -> None:
    policy = TorchPolicy.load(base, EXACT)
    before = weights(policy)
    figures = policy.train(plan(*group("g", 1.0, 1.0, None)), going)
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())
    assert figures.step_kl == 0.0
    assert figures.mismatch.tokens == 4


def test_a_batch_without_valid_episodes_moves_nothing(base: Path) -> None:
    policy = TorchPolicy.load(base, EXACT)
    figures = policy.train(plan(*group("g", None, None)), going)
    assert figures.mismatch.tokens == 0
    assert figures.grad_norm == 0.0


def test_later_epochs_are_clipped_against_the_first(base: Path) -> None:
    step = with_logprobs(plan(), reference(base, plan()))
    once = TorchPolicy.load(base, EXACT).train(step, going)
    more = TorchPolicy.load(base, replace(EXACT, epochs=8, lr=5e-2)).train(step, going)
    assert once.clipped_share == 0.0
    assert more.clipped_share > 0.0


def test_tokens_on_older_kv_are_left_out_of_the_mismatch(base: Path) -> None:
    mixed = trajectory("g", 0, 1.0, [prompt(), sampled(9, 9, kv=-1), sampled(10)])
    figures = TorchPolicy.load(base, EXACT).train(plan(mixed, *group("g", 1.0, 0.0)[1:]), going)
    assert figures.per_trajectory["g.0.0"].tokens == 1


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_resuming_gives_the_same_weights_as_going_on(
    base: Path, tmp_path: Path, compute: str
) -> None:
    settings = replace(EXACT, compute=compute, lr=1e-3)
    straight = TorchPolicy.load(base, settings)
    for step in (1, 2):
        straight.train(plan_step(story(step), LINE), going)
    first = TorchPolicy.load(base, settings)
    first.train(plan_step(story(1), LINE), going)
    first.write(str(tmp_path), going)
    second = TorchPolicy.load(tmp_path, settings)
    second.train(plan_step(story(2), LINE), going)
    for name, expected in weights(straight).items():
        assert torch.equal(expected, second.engine_state()[name]), name
    for name, expected in straight._masters.items():
        assert torch.equal(expected, second._masters[name]), name


def test_a_checkpoint_is_a_model_folder(base: Path, tmp_path: Path) -> None:
    policy = TorchPolicy.load(base, TorchSettings(lr=1e-2, threads=1))
    policy.train(plan(), going)
    policy.write(str(tmp_path), going)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = dict(model.named_parameters())
    for name, tensor in policy.engine_state().items():
        assert torch.equal(tensor, loaded[name]), name
    assert (tmp_path / "tokenizer.json").is_file()
    # An engine reads every weights file beside the config: there may be only one.
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_every_checkpoint_after_a_restart_is_a_model_folder(base: Path, tmp_path: Path) -> None:
    """The one that the trainer began with is pruned on the way."""
    store = CheckpointStore(tmp_path, "run", keep=2, required=model_files.side_names(base))
    policy, lineage, step = TorchPolicy.load(base, EXACT), LINE, 0
    for steps in (1, 3):  # an incarnation each
        found = store.newest()
        if found:
            policy, lineage = TorchPolicy.load(found[0], EXACT), found[1].lineage
        for _ in range(steps):
            step += 1
            step_plan = plan_step(story(step), lineage)
            report = report_step(step_plan, policy.train(step_plan, going), 0.0)
            lineage = lineage.grow(step)
            meta = CheckpointMeta("run", step, step, step - 1, "d", 1, lineage, report)
            folder = store.save(meta, partial(policy.write, stop=going), going)
            assert TorchPolicy.load(folder, EXACT).train(step_plan, going).mismatch.tokens
            assert (folder / "tokenizer.json").read_text() == "{}"
    assert step == 4


def test_the_engine_gets_no_tied_copy(base: Path) -> None:
    state = TorchPolicy.load(base, TorchSettings(threads=1)).engine_state()
    assert "lm_head.weight" not in state
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_a_stop_leaves_the_weights_as_they_were(base: Path) -> None:
    policy = TorchPolicy.load(base, replace(EXACT, micro_batch_tokens=8))
    before, asked = weights(policy), 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4

    with pytest.raises(Stopped):
        policy.train(plan(), stop)
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_step_cut_after_it_moved_something_is_never_used(
    base: Path, tmp_path: Path, epochs: int
) -> None:
    """A stop while the drift is measured, or in the second epoch."""
    policy = TorchPolicy.load(base, replace(EXACT, epochs=epochs))
    before = weights(policy)

    def moved() -> bool:
        return any(not torch.equal(before[name], now) for name, now in policy._params.items())

    with pytest.raises(Stopped):
        policy.train(plan(), moved)
    assert moved()
    with pytest.raises(Refused, match="of no version"):
        policy.write(str(tmp_path), going)
    with pytest.raises(Refused, match="of no version"):
        policy.engine_state()
    with pytest.raises(Refused, match="of no version"):
        policy.train(plan(), going)


def test_the_token_mean_does_not_depend_on_the_last_bit_of_an_advantage(base: Path) -> None:
    """A sibling at its group's mean counts in the mean, as one beside it does."""
    norms = []
    for middle in (0.5, 0.5 + 1e-9):
        step = plan(*group("g", 0.0, middle, 1.0))
        assert (step.advantages[1] == 0.0) == (middle == 0.5)
        norms.append(TorchPolicy.load(base, EXACT).train(step, going).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_drift_is_measured_on_tokens_held_aside_where_there_are_some(base: Path) -> None:
    settings = replace(EXACT, micro_batch_tokens=1, step_kl_tokens=3)
    figures = TorchPolicy.load(base, settings).train(plan(), going)
    assert (figures.step_kl_tokens, figures.step_kl_tokens_aside) == (4, 4)  # both of group c
    assert figures.step_kl > 0
    mixed = TorchPolicy.load(base, replace(settings, step_kl_tokens=512)).train(plan(), going)
    assert mixed.step_kl_tokens == plan().tokens
    assert mixed.step_kl_tokens_aside == 4


def test_drift_is_measured_on_episodes_of_any_length(base: Path) -> None:
    """A row per episode, and room for one: which one differs from step to step."""
    settings = replace(EXACT, micro_batch_tokens=1, step_kl_tokens=1, frozen=True)
    policy = TorchPolicy.load(base, settings)
    items = [
        trajectory("g", i, float(i == 0), [prompt(), sampled(*range(9, 10 + i))]) for i in range(4)
    ]
    seen = set()
    for step in range(1, 5):
        step_plan = replace(plan(*items), step=step)
        figures = policy.train(step_plan, going)
        assert policy.train(step_plan, going) == figures
        seen.add(figures.step_kl_tokens)
    assert len(seen) > 1


def test_a_gradient_that_is_not_finite_moves_nothing(base: Path) -> None:
    policy = TorchPolicy.load(base, EXACT)
    with torch.no_grad():
        policy._params["model.norm.weight"].fill_(float("nan"))
    before = weights(policy)
    with pytest.raises(Refused, match="not finite"):
        policy.train(plan(), going)
    for name in before:
        assert torch.equal(before[name], policy.engine_state()[name]) or "norm" in name


def test_a_sequence_beyond_the_model_is_refused(base: Path) -> None:
    long = trajectory("g", 0, 1.0, [prompt(*[3] * 64), sampled(4)])
    with pytest.raises(InvalidInput, match="64 positions"):
        TorchPolicy.load(base, EXACT).train(plan(long, *group("g", 1.0, 0.0)[1:]), going)
