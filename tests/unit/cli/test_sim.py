"""muster sim fit and what-if: what they print, write and refuse."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from muster.cli.main import main
from muster.streams import RunStreams, StreamEntry
from sim.rollout import fit_model
from sim.rollout.costs import EngineCosts
from sim.rollout.fit_model import Model
from sim.rollout.workload import TB_LIKE, Spread

Story = Any


def run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *arguments])
    return ended.value.code or 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The file of a model of tiny batches."""
    tiny = replace(
        TB_LIKE,
        groups=2,
        group_size=2,
        turns=Spread(3, 0.3),
        turns_max=6,
        verify=Spread(2, 0.3),
        boxes=4,
        replicas=1,
        context_limit=60_000,
        kv_tokens=80_000,
    )
    path = tmp_path / "model.json"
    note = "the number of boxes is taken to be the most that lived at once"
    fit_model.write(Model("run-1", tiny, EngineCosts(), 60.0, {}, (note,)), path)
    return path


def ask(model: Path, *more: str) -> object:
    return run("what-if", "--model", str(model), "--batches", "2", "--jobs", "1", *more)


def test_the_answer_names_time_cost_and_what_helps(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ask(model, "--gpu-hour-price", "2", "--box-hour-price", "0.1") == 0
    said = capfd.readouterr()
    for words in (
        "run run-1 on 1 replicas with 80,000 KV tokens, 4 warm boxes (2 batches, 1 seeds):",
        "time to batch",
        "waiting for boxes",
        "cost per batch",
        "(2.4 an hour)",
        "recorded was       60.0 s",
        "one more replica",
        "for each 1 an hour",
        "note: the number of boxes",
    ):
        assert words in said.out
    assert said.err.splitlines()[-1] == "4 of 4 simulations"


def test_programs_get_the_same_as_an_object(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(model, "--replicas", "2", "--boxes", "6", "--cold", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["base"]["replicas"], told["base"]["boxes"], told["base"]["warm"]) == (2, 6, False)
    assert told["base"]["batch_s"] > 0
    assert {change["fleet"]["name"] for change in told["changes"]} == {
        "one more replica",
        "one more box",
        "a tenth more KV",
        "warm boxes",
    }


def test_without_a_model_the_next_step_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("what-if", "--model", str(tmp_path / "none.json")) == 2
    assert "make one with `muster sim fit --out FILE`" in capfd.readouterr().err


async def test_a_recorded_run_becomes_a_model_that_answers(
    valkey: Redis, good: Story, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = RunStreams(valkey, good.run)
    entries = [StreamEntry(m.stream, "s", str(n), m.data) for n, m in enumerate(good.messages)]
    await streams.append(entries)
    url = f"unix://{valkey.connection_pool.connection_kwargs['path']}"
    out = tmp_path / "model.json"
    arguments = ("fit", good.run, "--redis", url, "--out", str(out), "--kv-tokens", "90000")
    assert await asyncio.to_thread(run, *arguments) == 0
    said = capfd.readouterr().out
    assert f"next: muster sim what-if --model {out}" in said
    assert "note: too few" in said
    found = fit_model.read(out)
    assert (found.run, found.regime.kv_tokens, found.regime.group_size) == (good.run, 90_000, 2)
