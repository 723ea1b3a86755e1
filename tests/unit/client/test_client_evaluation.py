"""Evaluations from Python: what is asked for, what comes back, which instances."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster import evaluated_codec
from muster.client import MusterClient
from muster.errors import InvalidInput
from muster.instances import EVAL_SEEDS, draw, held_out, parse
from muster.types import SamplingParams
from muster.v1 import common_pb2 as common
from muster.v1 import router_pb2 as pb
from tests.unit.cli.test_tasks_submit import set_ as set_
from tests.unit.client.router_double import RouterDouble
from tests.unit.evaluation.test_figures import FAILED, PASSED, group, sibling


class Evaluating(RouterDouble):
    """Answers with one group."""

    async def GetEvaluation(self, request: Any, context: Any) -> AsyncIterator[Any]:
        header = pb.EvaluationHeader(run="main", job=request.job, groups=1, group_size=2)
        header.sampling.CopyFrom(common.SamplingParams(temperature=0.5, top_p=1.0))
        header.state = pb.JOB_STATE_DONE
        header.serving.add(replica="r0", fingerprint="fake")
        yield pb.GetEvaluationResponse(header=header)
        found = group("easy@1000003", sibling(PASSED), sibling(FAILED))
        yield pb.GetEvaluationResponse(group=evaluated_codec.to_pb("main", found))


def done() -> pb.JobProgress:
    return pb.JobProgress(
        job="v",
        state=pb.JOB_STATE_DONE,
        groups_total=1,
        groups_evaluated=1,
        purpose=common.JOB_PURPOSE_EVALUATE,
    )


async def test_an_evaluation_is_submitted_followed_and_read(set_: Path) -> None:
    router = Evaluating([[done()]])
    async with router.serving() as server, MusterClient(server.address) as client:
        found = await client.evaluate(
            set_, samples=1, split="train", instances=3, rounds=2, sampling=SamplingParams(0.5)
        )
    [sent] = router.submitted
    assert sent.purpose == common.JOB_PURPOSE_EVALUATE
    assert (sent.groups, sent.group_size) == (2, 1)
    assert [package.name for package in sent.tasks] == ["easy@1000003", "easy@1000004"]
    assert (found.asked.job, found.overall.pass_rate) == (sent.job, 0.5)
    assert found.warnings == (
        "unknown how the training rollouts were sampled: nothing was compared",
        "unknown how it was served: r0 does not say",
        "unknown how the training rollouts were served: nothing was compared",
    )


@pytest.mark.parametrize("split", ["train", "eval", "all"])
async def test_its_instances_are_held_out_whatever_the_split(set_: Path, split: str) -> None:
    router = Evaluating([[done()]])
    async with router.serving() as server, MusterClient(server.address) as client:
        await client.evaluate(set_, samples=1, split=split)
    seeds = {int(package.name.partition("@")[2]) for package in router.submitted[0].tasks}
    assert min(seeds) >= EVAL_SEEDS


def test_no_held_out_instance_is_one_that_training_can_draw() -> None:
    """Of few values, so that most combinations come up on one side or the other."""
    parameters = parse({"n": {"range": [1, 60]}, "word": {"choice": ["a", "b", "c"]}})
    trained = [draw("t", parameters, seed) for seed in range(2000)]
    kept = [draw("t", parameters, EVAL_SEEDS + seed) for seed in range(2000)]
    assert not any(map(held_out, trained))
    assert not {str(one) for one in trained} & {str(one) for one in kept}
    assert len({str(one) for one in kept}) > 10
    assert [draw("t", parameters, EVAL_SEEDS + seed) for seed in range(9)] == kept[:9]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"samples": 0}, "group_size"),
        ({"rounds": 5000}, "groups"),
        ({"sampling": SamplingParams(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": SamplingParams(temperature=0.0)}, "sampling.temperature"),
        ({"split": "nonsense"}, "split"),
    ],
)
async def test_what_cannot_be_evaluated_is_refused_before_a_router_is_asked(
    set_: Path, given: dict[str, Any], field: str
) -> None:
    async with MusterClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidInput) as refused:
            await client.evaluate(set_, **given)
    assert refused.value.field == field


async def test_greedy_sampling_is_for_evaluations_alone(set_: Path) -> None:
    async with MusterClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidInput, match="not a number of tokens to choose from"):
            await client.submit(
                set_, groups=1, group_size=2, sampling=SamplingParams(top_k=1), split="all"
            )
