"""`muster demo` on real parts with two replicas, one of them killed in the middle.

The same job on a single replica says what share of its prompts a cache can serve at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from muster import rpc
from muster.attach import attached
from muster.config import load_config
from muster.errors import MusterError
from muster.record import RunRecord, read_record
from muster.registry import Registry
from muster.supervise import state
from muster.v1 import inference_pb2 as inf
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.leftovers import Muster
from tests.e2e.test_demo import DEMO_S, MUSTER

if TYPE_CHECKING:  # this name is in the generated stubs only
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

pytestmark = [pytest.mark.engine, pytest.mark.root, pytest.mark.timeout(1800)]

DEMO = ("demo", "--timeout-s", str(DEMO_S))
KILLED, OTHER = "inference-1", "inference-2"
_BUSY_S = 300.0  # in which the one that is to be killed must have requests
_TOKENS_MIN = 60  # that it has sampled by then: a few turns
Line = dict[str, Any]


@dataclass(frozen=True)
class Demo:
    """What a demo said and recorded."""

    status: int
    report: Line
    record: RunRecord
    folder: Path

    def journal(self) -> Iterator[tuple[Line, list[Line]]]:
        """Events of the router with the commands that they led to."""
        for path in sorted((self.folder / "journal").glob("router-*.jsonl")):
            for text in path.read_text("utf-8").splitlines()[1:]:
                if text:
                    entry = json.loads(text)
                    yield entry["event"], entry["commands"]


def _record(folder: Path) -> RunRecord:
    config = load_config(None, {"MUSTER_STATE_DIR": str(folder)})

    async def read() -> RunRecord:
        async with attached(config) as redis:
            return await read_record(redis, config.run, config.history(config.run))

    return asyncio.run(read())


def _ended(muster: Muster, folder: Path) -> Demo:
    lines = list(muster.lines())
    status = muster.ended()
    reports = [line for line in lines if line["event"] == "report"]
    assert reports, f"status {status}, no report; its last words: {lines[-5:]}"
    return Demo(status, reports[0], _record(folder), folder)


async def _status(folder: Path, replica: str) -> inf.GetReplicaStatusResponse:
    config = load_config(None, {"MUSTER_STATE_DIR": str(folder)})
    async with attached(config) as redis:
        entries = {e.id: e for e in await Registry(redis, config.run).list("inference")}
    async with rpc.channel(entries[replica].address) as channel:
        with rpc.calling("status"):
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            return await stub.GetReplicaStatus(inf.GetReplicaStatusRequest(), timeout=5)


def _kill_when_busy(folder: Path) -> None:
    """SIGKILL while at least two of its requests run, and others are over."""
    until = time.monotonic() + _BUSY_S
    while time.monotonic() < until:
        try:
            status = asyncio.run(_status(folder, KILLED))
            busy = status.running >= 2 and status.tokens_generated >= _TOKENS_MIN
        except MusterError:
            busy = False
        if busy:
            holding = state.read(folder)
            assert holding is not None
            process = holding.children[KILLED].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError(f"{KILLED} never had two requests at once")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("single")
    return _ended(Muster(folder, *DEMO, config=None), folder / "demo")


@pytest.fixture(scope="module")
def wounded(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("two")
    muster = Muster(folder, *DEMO, "--replicas", "2", config=None)
    muster.until(lambda line: line["event"] == "job" and line["turns"] >= 2)
    _kill_when_busy(folder / "demo")
    return _ended(muster, folder / "demo")


def test_the_run_finishes_and_its_record_adds_up(wounded: Demo) -> None:
    assert wounded.status == 0
    assert wounded.report["totals"]["groups_trained"] == 8
    audit = subprocess.run(
        [MUSTER, "audit", "--state-dir", str(wounded.folder)], capture_output=True, text=True
    )
    assert audit.returncode == 0, audit.stdout
    verified = subprocess.run([MUSTER, "journal", "verify", str(wounded.folder / "journal")])
    assert verified.returncode == 0


def test_no_episode_is_relaunched(wounded: Demo) -> None:
    totals = wounded.report["totals"]
    assert (totals["repairs"], totals["replays"]) == (0, 0)
    assert {turn.key.attempt for turn in wounded.record.turns} == {0}


def test_no_token_of_a_turn_that_the_dead_replica_did_not_finish_is_recorded(
    wounded: Demo,
) -> None:
    asked: dict[tuple[str, int, int], str] = {}  # episode, turn, retry → replica
    answered: dict[tuple[str, int], tuple[int, int]] = {}  # → retry, tokens
    cut: set[tuple[str, int]] = set()  # turns that the dead replica did not finish
    for event, commands in wounded.journal():
        if event["type"] == "GenerateFailed" and event["replica"] == KILLED:
            cut.add((_episode(event), event["turn"]))
        if event["type"] == "Generated":
            place = (_episode(event), event["turn"])
            answered[place] = (event.get("retry", 0), event["sampled_tokens"])
        for command in commands:
            if command["type"] == "Generate":
                asked[_episode(command), command["turn"], command["retry"]] = command["replica"]
    assert cut, "nothing ran there when it was killed"
    assert {*asked.values()} == {KILLED, OTHER}
    recorded = {(turn.key.id, turn.turn): turn for turn in wounded.record.turns}
    for place in cut:
        retry, tokens = answered[place]
        assert retry > 0
        turn = recorded[place]
        assert (turn.replica, turn.sampled_tokens) == (asked[*place, retry], tokens)


def _episode(line: Line) -> str:
    key = line["episode"]
    return f"{key['group']}.{key['sibling']}.{key['attempt']}"


def test_the_cache_serves_nearly_as_much_as_on_one_replica(single: Demo, wounded: Demo) -> None:
    alone, both = (d.report["totals"]["cached_token_share"] for d in (single, wounded))
    assert alone >= 0.5
    assert both >= 0.9 * alone
