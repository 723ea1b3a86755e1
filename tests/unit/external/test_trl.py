"""What TRL is fed: one batch is one step, also with one sample read ahead."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from muster.errors import InvalidInput, Refused
from muster.samples import Batch, batch_of
from muster.trl import MusterRollouts, MusterWeights
from muster.types import SamplingParams
from muster.version_sender import Published
from tests.unit.trainer.stories import batch, group, prompt, sampled, trajectory

PER_STEP = 5


@dataclass
class RolloutSample:
    """TRL's carrier, as its interface has it."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one name of TRL that is needed, so that it need not be installed here."""
    name = "trl.experimental.async_grpo.async_rollout_worker"
    made = ModuleType(name)
    made.RolloutSample = RolloutSample  # type: ignore[attr-defined]
    for parent in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, made)


class FakeBank:
    """Leases what it was given, then waits until it is let go."""

    def __init__(self, *batches: Batch):
        self._batches, self.next_step = list(batches), 1
        self.let_go = threading.Event()

    def lease(self) -> Batch:
        if not self._batches:
            self.let_go.wait(30)
            raise Refused("closed")
        return self._batches.pop(0)


class FakePublisher:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], int, bool]] = []

    def publish(self, source: dict[str, Any], *, step: int, if_changed: bool = False) -> Published:
        self.calls.append((source, step, if_changed))
        return Published(len(self.calls), "d", 1, ())


def of(step: int, *rewards: float) -> Batch:
    return batch_of(batch(*group(f"g{step}", *rewards), step=step))


def feeding(*batches: Batch, steps: int | None = None, temperature: float = 1.0) -> MusterRollouts:
    bank: Any = FakeBank(*batches)
    made = MusterRollouts(bank, PER_STEP, steps=steps, temperature=temperature)
    made.start()
    return made


def taken(rollouts: MusterRollouts, count: int) -> list[RolloutSample]:
    return [rollouts.rollout_buffer.get(timeout=10) for _ in range(count)]


@pytest.fixture
def two_steps() -> Iterator[MusterRollouts]:
    made = feeding(of(1, 1.0, 0.0, 1.0), of(2, 0.0, 1.0, 0.0, 1.0), steps=2)
    yield made
    made.stop()


def test_a_step_with_one_read_ahead_has_its_batch_and_no_other(two_steps: MusterRollouts) -> None:
    found = taken(two_steps, 2 * PER_STEP + 1)  # what TRL takes for two steps
    first, second = found[:PER_STEP], found[PER_STEP : 2 * PER_STEP]
    assert {sample.group_id for sample in first} == {1}
    assert sorted(sample.advantage for sample in first if sample.advantage) == pytest.approx(
        sorted(sample.advantage for sample in of(1, 1.0, 0.0, 1.0).samples)
    )
    assert [sample.group_id for sample in second] == [1, 2, 2, 2, 2]  # the first is a blank
    assert [bool(sample.advantage) for sample in second] == [False, True, True, True, True]
    assert found[-1].advantage == 0.0


def test_no_sample_of_the_next_step_is_needed_to_end_one() -> None:
    """At lag 0 it does not exist before this step's version is served."""
    rollouts = feeding(of(1, 1.0, 0.0, 1.0, 0.0))
    found = taken(rollouts, PER_STEP + 1)
    assert sum(bool(sample.advantage) for sample in found[:PER_STEP]) == 4
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get_nowait()
    rollouts.stop()


def test_observations_are_masked_and_what_sampled_them_is_passed_on() -> None:
    turns = [prompt(1, 2), sampled(3, logprob=-0.5)]
    item = batch_of(batch(trajectory("g", 0, 1.0, turns), trajectory("g", 1, 0.0, turns)))
    rollouts = feeding(item, steps=1)
    rollouts.update_model_version(7)
    sample = taken(rollouts, 2)[1]
    assert sample.input_ids.tolist() == [1, 2, 3]
    assert sample.completion_mask.tolist() == [0, 0, 1]
    assert sample.old_log_probs.tolist() == [0.0, 0.0, -0.5]
    assert sample.metrics == {"reward": 1.0}
    rollouts.stop()


def test_a_batch_that_leaves_no_place_is_refused_with_the_number_it_takes() -> None:
    rollouts = feeding(of(1, 1.0, 0.0, 1.0, 0.0, 1.0))
    rollouts._thread.join(10)
    with pytest.raises(InvalidInput, match="room for 4") as caught:
        rollouts.check_health(300.0)
    assert "6 or more" in caught.value.way_out


def test_another_temperature_than_the_trainers_is_refused() -> None:
    cold = SamplingParams(temperature=0.7)
    item = batch_of(batch(trajectory("g", 0, 1.0, sampling=cold)))
    rollouts = feeding(item)
    rollouts._thread.join(10)
    with pytest.raises(InvalidInput, match="at temperature 1"):
        rollouts.check_health(300.0)


def test_what_top_p_or_top_k_left_is_refused_as_trls_softmax_is_over_all_tokens() -> None:
    item = of(1, 1.0, 0.0)
    first, *others = item.samples
    cut = replace(first, allowed=((10, 12), (11,)))
    rollouts = feeding(replace(item, samples=(*others, cut)))
    rollouts._thread.join(10)
    with pytest.raises(InvalidInput, match="top-p or top-k") as caught:
        rollouts.check_health(300.0)
    assert caught.value.field == "sampling"
    assert rollouts.rollout_buffer.empty()


def test_a_long_wait_for_a_batch_is_no_ill_health() -> None:
    rollouts = feeding()
    rollouts.check_health(0.0)
    rollouts.stop()


def test_each_sync_after_the_first_is_the_version_of_one_batch(two_steps: MusterRollouts) -> None:
    publisher = FakePublisher()
    weights = MusterWeights(publisher, two_steps)  # type: ignore[arg-type]
    taken(two_steps, 2 * PER_STEP + 1)
    weights.init_weight_transfer()
    for value in (0, 1, 2):
        weights.pause()
        weights.send_weights(iter([("w", value)]))
        weights.resume()
    weights.destroy()
    assert publisher.calls == [({"w": 0}, 0, True), ({"w": 1}, 1, False), ({"w": 2}, 2, False)]
    assert two_steps.trained == [1, 2]


def test_a_sync_for_which_there_was_no_batch_is_refused() -> None:
    rollouts = feeding()
    with pytest.raises(Refused, match="out of no batch"):
        rollouts.next_trained()
    rollouts.stop()
