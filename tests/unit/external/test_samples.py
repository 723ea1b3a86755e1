"""What a trainer of one's own gets: masks, log-probabilities, versions, credit, tensors."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.samples import NO_VERSION, Batch, batch_of, tensors
from muster.types import SamplingMask, SamplingParams, Segment, SegmentKind, VersionSpan
from tests.unit.trainer.stories import batch, group, observed, prompt, sampled, trajectory

TWO_TURNS = (prompt(1, 2), sampled(3, 4, logprob=-0.5), observed(5, 6), sampled(7, version=1))


def two_turns() -> Batch:
    return batch_of(
        batch(trajectory("g", 0, 1.0, TWO_TURNS), trajectory("g", 1, 0.0, [prompt(1), sampled(9)]))
    )


def test_only_what_was_sampled_is_trained_on() -> None:
    first = two_turns().samples[0]
    assert first.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert first.loss_mask == (0, 0, 1, 1, 0, 0, 1)
    assert first.logprobs == (0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -3.0)
    assert first.versions == (-1, -1, 0, 0, -1, -1, 1)


def test_a_better_sibling_has_the_better_advantage() -> None:
    first, second = two_turns().samples
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert first.advantage == pytest.approx(-second.advantage)
    assert first.advantage > 0


def test_a_failure_of_the_infrastructure_is_in_no_sample_and_no_mean() -> None:
    found = batch_of(batch(*group("g", 1.0, 0.0, None)))
    assert [sample.sibling for sample in found.samples] == [0, 1]
    assert found.excluded == 1
    assert sum(sample.advantage for sample in found.samples) == pytest.approx(0.0)


def test_a_context_that_began_anew_is_a_sample_of_the_same_episode() -> None:
    item = trajectory("g", 0, 1.0, [prompt(1), sampled(2), prompt(3), sampled(4)])
    first, second = batch_of(batch(item, trajectory("g", 1, 0.0))).samples[:2]
    assert first.episode == second.episode
    assert (first.token_ids, second.token_ids) == ((1, 2), (3, 4))
    assert first.advantage == second.advantage


def test_tokens_on_older_context_say_so() -> None:
    item = trajectory("g", 0, 1.0, [prompt(1), sampled(2, version=3, kv=2)])
    assert not batch_of(batch(item)).samples[0].clean
    assert two_turns().samples[0].clean


def test_tensors_are_padded_on_the_right_and_padding_counts_nowhere() -> None:
    found = two_turns().tensors(pad_token_id=99)
    assert found["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 9, 99, 99, 99, 99, 99]]
    assert found["attention_mask"].sum(1).tolist() == [7, 2]
    assert found["loss_mask"].tolist()[1] == [0, 1, 0, 0, 0, 0, 0]
    assert found["versions"].tolist()[1][2:] == [NO_VERSION] * 5
    assert found["logprobs"][1, 2:].abs().sum() == 0
    assert found["groups"].tolist() == [0, 0]
    assert found["rewards"].tolist() == [1.0, 0.0]


def test_minibatches_hold_each_sample_once() -> None:
    found = batch_of(batch(*group("a", 1.0, 0.0, 0.5), *group("b", 0.0, 1.0)))
    sizes = [len(part["rewards"]) for part in found.minibatches(2)]
    assert sizes == [2, 2, 1]
    rewards = sorted(r for part in found.minibatches(2) for r in part["rewards"].tolist())
    assert rewards == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert sum(int(part["loss_mask"].sum()) for part in found.minibatches(2)) == found.tokens


def test_an_empty_batch_has_empty_tensors() -> None:
    assert tensors(())["input_ids"].shape == (0, 0)


def test_one_temperature_or_none_for_all() -> None:
    hot = SamplingParams(temperature=1.0)
    cold = SamplingParams(temperature=0.5)
    both = batch_of(
        batch(trajectory("g", 0, 1.0, sampling=hot), trajectory("g", 1, 0.0, sampling=cold))
    )
    assert [sample.temperature for sample in both.samples] == [1.0, 0.5]
    with pytest.raises(InvalidInput, match="several temperatures"):
        _ = both.temperature
    assert two_turns().temperature == 1.0


def test_what_top_k_left_to_choose_from_is_no_full_softmax() -> None:
    mask = SamplingMask((2,), (4, 8))
    span = (VersionSpan(0, 0, 1, 0),)
    chosen = Segment(SegmentKind.MODEL, (8,), (-0.5,), span, mask=mask)
    item = trajectory("g", 0, 1.0, [prompt(1), chosen], sampling=SamplingParams(top_k=2))
    found = batch_of(batch(item))
    assert found.samples[0].allowed == ((4, 8),)
    with pytest.raises(InvalidInput, match="top-p or top-k"):
        found.tensors()
