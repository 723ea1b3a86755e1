"""What a result warns of: each difference by name, with both values."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from muster.evaluation import Asked, EvaluationResult, Serving, Training
from muster.evaluation_doubts import compared, result
from muster.evaluation_view import render_evaluation
from muster.fingerprint import ServingFingerprint
from muster.types import SamplingParams
from muster.view import console
from sim.builders import INFRA
from tests.unit.evaluation.test_figures import FAILED, PASSED, group, sibling

HERE = ServingFingerprint(
    "vllm", "0.32.0", "bfloat16", "", "CPU_ATTN", "cpu", "float32", ("block_size=16",)
)
ASKED = Asked(
    "main", "v", "done", SamplingParams(0.6), groups=1, group_size=2, submitted_unix_s=1.0
)
GROUPS = [group("a", sibling(PASSED), sibling(FAILED))]
TRAINED = Training("t", SamplingParams(0.6), (HERE,))


def found(**changed: object) -> EvaluationResult:
    given: dict = {
        "asked": ASKED,
        "groups": GROUPS,
        "serving": [Serving("r0", HERE)],
        "training": TRAINED,
    } | changed
    return result(**given)


def test_an_evaluation_served_and_sampled_as_in_training_warns_of_nothing() -> None:
    same = found()
    assert same.warnings == ()
    assert same.complete
    assert same.wall_s == 4.0


@pytest.mark.parametrize(
    ("field", "there"),
    [
        ("engine_version", "0.31.0"),
        ("dtype", "float32"),
        ("quantization", "fp8"),
        ("attention_backend", "FLASH"),
        ("head_dtype", "bfloat16"),
        ("device", "cuda"),
    ],
)
def test_each_field_of_the_serving_that_differs_is_named_with_both_values(
    field: str, there: str
) -> None:
    known = replace(HERE, **{field: there})
    (warning,) = found(training=replace(TRAINED, serving=(known,))).warnings
    here = getattr(HERE, field) or "none"
    assert f"served otherwise than in training: {field}: {here}, {there}" in warning


def test_a_flag_that_differs_is_named() -> None:
    known = replace(HERE, flags=("block_size=32",))
    (warning,) = found(training=replace(TRAINED, serving=(known,))).warnings
    assert "block_size: 16, 32" in warning


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", 1.0, "temperature: 0.6 here, 1 there"),
        ("top_p", 0.9, "top_p: 1 here, 0.9 there"),
        ("top_k", 5, "top_k: 0 here, 5 there"),
    ],
)
def test_each_sampling_parameter_that_differs_is_named(field: str, value: float, told: str) -> None:
    sampling = replace(ASKED.sampling, **{field: value})
    assert found(training=replace(TRAINED, sampling=sampling)).warnings == (
        f"sampling differs from training: {told}",
    )


def test_the_seed_of_sampling_is_none_of_it() -> None:
    other = replace(TRAINED, sampling=replace(ASKED.sampling, seed=9))
    assert found(training=other).warnings == ()


def test_a_run_without_training_is_compared_with_nothing_and_says_so() -> None:
    assert found(training=Training()).warnings == (
        "unknown how the training rollouts were sampled: nothing was compared",
        "unknown how the training rollouts were served: nothing was compared",
    )
    assert found(training=replace(TRAINED, serving=())).warnings == (
        "unknown how the training rollouts were served: nothing was compared",
    )


def test_what_becomes_known_later_is_no_longer_unknown() -> None:
    assert compared(found(training=Training()), TRAINED).warnings == ()
    still = compared(found(training=Training()), Training())
    assert still.warnings == found(training=Training()).warnings


def test_replicas_that_differ_among_themselves_are_told() -> None:
    two = [Serving("r0", HERE), Serving("r1", replace(HERE, dtype="float32"))]
    first, second = found(serving=two).warnings
    assert first == "replicas r0 and r1 differ in dtype: bfloat16, float32"
    assert second.startswith("served otherwise than in training: dtype: float32, bfloat16")


def test_a_replica_that_does_not_say_how_it_serves_is_told() -> None:
    (warning,) = found(serving=[Serving("r0", None, "fake")]).warnings
    assert warning == "unknown how it was served: r0 does not say"


def test_an_evaluation_that_spans_versions_says_so() -> None:
    groups = [group("a", sibling(PASSED, versions=(3,)), sibling(PASSED, versions=(3, 4)))]
    (warning,) = found(groups=groups).warnings
    assert warning.startswith("it spans policy versions 3, 4")


def test_samples_lost_to_infrastructure_and_groups_that_are_missing_are_told() -> None:
    asked = replace(ASKED, groups=2, state="cancelled")
    partial = found(asked=asked, groups=[group("a", sibling(PASSED), sibling(INFRA))])
    assert not partial.complete
    assert partial.warnings == (
        "1 of 2 groups are not in it: the job is cancelled",
        "1 of 2 samples failed by infrastructure: they are in no figure",
    )


def test_what_is_shown_has_the_figures_and_no_markup_of_a_tasks_name() -> None:
    screen = console()
    with screen.capture() as shown:
        groups = [group("[red]a\x1b[31m", sibling(PASSED), sibling(FAILED))]
        screen.print(render_evaluation(found(groups=groups, training=Training())))
    text = shown.get()
    assert "[red]a" in text
    assert "\x1b[31m" not in text
    assert "pass rate 50% (mean over 1 tasks" in text
    assert "replica r0: vllm 0.32.0 dtype=bfloat16" in text
