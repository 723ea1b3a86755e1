"""The arithmetic of the router's benchmarks, and the words of its fakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import _router_world as world
from bench import router_soak
from bench._router_fakes import Fakes, reply
from bench.router import added, window_rate
from muster.taskset import read_task_set
from muster.types import FinishReason
from muster.v1 import inference_pb2 as inf
from muster.v1 import sandbox_pb2 as sbx
from services.router.chat import parse


class Bytes:
    """One id a byte; 0 ends a reply."""

    stop_ids = (0,)

    def encode(self, text: str, *, special: bool) -> list[int]:
        del special
        return list(text.encode())


def fakes() -> Fakes:
    return Fakes(Bytes(), think_s=0.0, reply_tokens=64, output_bytes=100)  # type: ignore[arg-type]


def test_a_rate_counts_what_lies_in_the_window() -> None:
    assert window_rate([0.5, 1.0, 1.5, 2.5, 3.0], 1.0, 3.0) == 1.5


def test_the_lag_of_a_whole_run_is_that_of_its_windows_together() -> None:
    assert added([{"counts": [5, 0, 1]}, {"counts": [2, 3, 0]}]) == [7, 3, 1]


def test_the_reply_of_a_fake_is_a_command_of_about_its_length() -> None:
    ids = reply(Bytes(), 64)  # type: ignore[arg-type]
    assert 64 <= len(ids) <= 80
    assert ids[-1] == 0
    assert parse(bytes(ids[:-1]).decode(), FinishReason.STOP).command.startswith("true\n")


async def test_a_fake_says_the_same_to_everybody_and_that_its_cache_has_the_rest() -> None:
    request = inf.GenerateRequest(prompt_token_ids=bytes(4000)).SerializeToString()
    said = [part async for part in fakes().generate(request, None)]
    (part,) = [inf.GenerateResponse.FromString(data) for data in said]
    sampled = len(part.token_ids) // 4
    assert (part.finish.spans[0].start, part.finish.spans[0].end) == (0, sampled)
    assert len(part.logprobs) == len(part.token_ids)
    assert 900 <= part.finish.cached_tokens < 1000


def test_the_tasks_of_a_bench_can_be_read(tmp_path: Path) -> None:
    found = read_task_set(world.tasks(tmp_path / "tasks", 2, tokens=500, turns=3))
    assert [(len(t.instruction), t.max_turns) for t in found] == [(500, 3)] * 2
    assert found[0].instruction != found[1].instruction


def test_turns_are_read_from_the_journal_with_their_time(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "journal"
    folder.mkdir(parents=True)
    lines = [
        b'{"machine":"router","rules":{}}',
        b'{"now":12.5,"event":{"type":"TurnRecorded","turn":0},"commands":[],"chain":""}',
        b'{"now":13.0,"event":{"type":"Generated","text":"TurnRecorded"},"commands":[]}',
        b'{"now":13.5,"ev',
    ]
    (folder / "router-0001.jsonl").write_bytes(b"\n".join(lines))
    running = world.World(tmp_path, None, "", None, {})  # type: ignore[arg-type]
    assert running.turns_at() == [12.5]


def test_what_the_router_told_of_its_loop_is_read_from_its_log(tmp_path: Path) -> None:
    (tmp_path / "router.log").write_text(
        '{"logger": "muster.lag", "p99_ms": 3.0}\n'
        '{"logger": "router", "text": "of \\"muster.lag\\""}\n'
    )
    running = world.World(tmp_path, None, "", None, {})  # type: ignore[arg-type]
    assert [lag["p99_ms"] for lag in running.lags()] == [3.0]


def test_the_processor_time_of_a_process_is_read() -> None:
    assert world.cpu_s(os.getpid()) > 0.0
    with pytest.raises(SystemExit, match="ended"):
        world.cpu_s(2**22 + 1)


def kept(*figures: tuple[float, float]) -> router_soak.Kept:
    """A reading (memory, streams) for each EVERY episodes."""
    made = router_soak.Kept()
    for number, (memory, stream) in enumerate(figures, 1):
        at = number * router_soak.EVERY
        made.read.append((at, {"router_rss_mib": memory, "stream_events": stream}))
    return made


MARKS = [router_soak.EVERY * n for n in (1, 2, 3, 4, 5, 6)]


def test_nothing_grows_that_is_flat_after_the_warm_up() -> None:
    flat = kept((50, 10), (100, 900), (102, 905), (101, 910), (104, 930), (104, 940))
    ratios, grown = flat.judge(MARKS)
    assert grown == []
    assert ratios["router_rss_mib_ratio"] == pytest.approx(104 / 101)


def test_memory_and_streams_that_grow_are_named() -> None:
    rising = kept((50, 10), (100, 900), (102, 905), (104, 910), (106, 950), (108, 960))
    assert rising.judge(MARKS)[1] == ["router_rss_mib", "stream_events"]


def test_a_count_that_swings_back_has_not_grown() -> None:
    swings = kept((50, 10), (100, 900), (100, 900), (100, 900), (100, 900), (100, 1900))
    swings.read.append((MARKS[-1] - 1, {"router_rss_mib": 100, "stream_events": 900}))
    assert swings.judge(MARKS)[1] == []


@pytest.mark.parametrize(("most", "told"), [(router_soak.VERSIONS_KEPT, []), (99, ["versions"])])
def test_versions_that_are_kept_on_purpose_have_not_grown(most: float, told: list[str]) -> None:
    filling = router_soak.Kept()
    for number, mark in enumerate(MARKS, 1):
        filling.read.append((mark, {"stream_versions": most * number / len(MARKS)}))
    assert filling.judge(MARKS)[1] == [f"stream_{name}" for name in told]


async def test_boxes_of_a_fake_end_with_their_release() -> None:
    host, request = fakes(), sbx.AcquireBoxRequest()
    request.episode.group = "j-1"
    made = sbx.AcquireBoxResponse.FromString(await host.acquire(request.SerializeToString(), None))
    assert host.boxes == {made.box}
    await host.release(sbx.ReleaseBoxRequest(box=made.box).SerializeToString(), None)
    assert host.boxes == set()


def _told(kind: str, group: str) -> bytes:
    key = b'{"run":"r","group":"%b","sibling":0,"attempt":0,"owner_epoch":1}' % group.encode()
    event = b'{"type":"%b","episode":%b,"turn":0}' % (kind.encode(), key)
    return b'{"now":1.0,"event":%b,"commands":[],"chain":""}\n' % event


def test_a_window_waits_for_the_turn_of_each_episode_that_was_first(tmp_path: Path) -> None:
    journal = tmp_path / "router-0001.jsonl"
    boxes = [_told("BoxAcquired", group) for group in ("a", "b", "c")]
    late = _told("TurnRecorded", "b")
    journal.write_bytes(
        b"".join([*boxes, _told("TurnRecorded", "a"), _told("TurnRecorded", "c")]) + late[:-20]
    )
    first = world.FirstTurns(tmp_path, 2)
    assert not first.all()  # as many turns as episodes, but not one of each
    with journal.open("ab") as file:
        file.write(late[-20:])
    assert first.all()
