"""muster report, audit, journal verify: from real streams, live and after the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner, Result

from muster.attach import attached
from muster.cli.inspect import app
from muster.config import Config, RedisConfig
from muster.errors import NotFound, Unavailable
from muster.record import read_record, runs
from muster.streams import RunStreams, StreamEntry

Story = Any
ServerAt = Callable[..., Any]


async def write(client: Redis, story: Story) -> None:
    """As the services do: through the append script, in order."""
    streams = RunStreams(client, story.run)
    await streams.append(
        [StreamEntry(m.stream, "s", str(n), m.data) for n, m in enumerate(story.messages)]
    )


def muster(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


async def test_a_record_read_from_a_server_is_that_of_the_story(valkey: Redis, good: Story) -> None:
    await write(valkey, good)
    found = await read_record(valkey, "r")
    told = good.record()
    for kind in ("opened", "turns", "finished", "labels", "versions", "batches", "fates", "jobs"):
        assert len(getattr(found, kind)) == len(getattr(told, kind)) > 0
    assert {s.stream: s.added for s in found.streams}["events"] == len(told.turns) + 6
    assert all(s.max_deleted == "0-0" for s in found.streams)


async def test_a_run_that_is_not_there_is_named_beside_those_that_are(
    valkey: Redis, good: Story
) -> None:
    await write(valkey, good)
    with pytest.raises(NotFound, match="nothing of that run") as caught:
        await read_record(valkey, "other")
    assert caught.value.way_out == "runs here: r; choose with --run"
    assert await runs(valkey) == ["r"]


async def test_an_entry_without_data_is_damaged_and_not_dropped(valkey: Redis, good: Story) -> None:
    await write(valkey, good)
    await valkey.xadd("m:{r}:events", {"x": "1"})
    await valkey.xadd("m:{r}:fates", {"d": b"\xff\xff"})
    found = await read_record(valkey, "r")
    assert [d.stream for d in found.damaged] == ["events", "fates"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder."""
    made = tmp_path / "state"
    (made / "redis").mkdir(parents=True)
    return made


@pytest.fixture
async def ended(folder: Path, good: Story, server_at: ServerAt) -> Path:
    """State folder of a good run that is over."""
    with server_at(folder / "redis", "--appendonly", "yes", "--appendfsync", "always") as socket:
        client = Redis(unix_socket_path=str(socket))
        await write(client, good)
        await client.aclose()
    return folder


async def harmed(folder: Path, server_at: ServerAt, harm: Callable[[Redis], Any]) -> None:
    """Something was done to the streams by hand."""
    with server_at(folder / "redis", "--appendonly", "yes", "--appendfsync", "always") as socket:
        client = Redis(unix_socket_path=str(socket))
        await harm(client)
        await client.aclose()


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


async def test_reading_an_ended_run_changes_nothing(ended: Path) -> None:
    before = contents(ended)
    async with attached(Config(state_dir=ended)) as client:
        assert len((await read_record(client, "r")).batches) == 4
        await client.set("scribble", "x")
    assert contents(ended) == before


async def test_the_copys_server_is_gone_afterwards(ended: Path) -> None:
    async with attached(Config(state_dir=ended)) as client:
        pid = (await client.info("server"))["process_id"]
        home = (await client.config_get("dir"))["dir"]
        assert there(f"/proc/{pid}", home) == [True, True]
    assert there(f"/proc/{pid}", home) == [False, False]


def there(*paths: str) -> list[bool]:
    return [Path(path).exists() for path in paths]


async def test_a_folder_without_data_is_named(folder: Path) -> None:
    with pytest.raises(NotFound) as caught:
        async with attached(Config(state_dir=folder)):
            pass
    assert caught.value.value == str(folder)
    assert "--state-dir" in caught.value.way_out


async def test_a_run_one_folder_below_is_pointed_at(ended: Path) -> None:
    with pytest.raises(NotFound) as caught:
        async with attached(Config(state_dir=ended.parent)):
            pass
    assert "--state-dir" in caught.value.way_out
    assert caught.value.way_out.endswith(str(ended))


async def test_a_configured_server_that_is_away_is_not_passed_over(ended: Path) -> None:
    config = Config(state_dir=ended, redis=RedisConfig(url=f"unix://{ended}/nobody"))
    with pytest.raises(Unavailable):
        async with attached(config):
            pass


async def test_a_server_is_read_even_when_it_is_volatile(
    tmp_path: Path, good: Story, server_at: ServerAt
) -> None:
    with server_at(tmp_path) as socket:
        async with attached(Config(state_dir=tmp_path), f"unix://{socket}") as client:
            await write(client, good)
            assert (await read_record(client, "r")).run == "r"


def test_report_and_audit_of_an_ended_run(ended: Path) -> None:
    at = ("--state-dir", str(ended), "--run", "r")
    told = muster("report", *at)
    assert told.exit_code == 0, told.output
    assert "bottleneck: " in told.output
    assert len(json.loads(muster("report", *at, "--json").output)["batches"]) == 2
    assert [
        b["step"]
        for b in json.loads(muster("report", *at, "--batch", "2", "--json").output)["batches"]
    ] == [2]
    checked = muster("audit", *at)
    assert checked.exit_code == 0, checked.output
    assert "clean" in checked.output
    assert json.loads(muster("audit", *at, "--json").output)["findings"] == []


async def _second_end(client: Redis) -> None:
    for _, fields in await client.xrange("m:{r}:events"):
        if b"h0" in fields[b"d"]:  # only the end of an episode names its host
            await client.xadd("m:{r}:events", fields)
            return


async def _second_fate(client: Redis) -> None:
    _, fields = (await client.xrange("m:{r}:fates", count=1))[0]
    await client.xadd("m:{r}:fates", fields)


async def _lost_end(client: Redis) -> None:
    for number, fields in await client.xrange("m:{r}:events"):
        if b"h0" in fields[b"d"]:
            await client.xdel("m:{r}:events", number)
            return


async def _lost_turn(client: Redis) -> None:
    number, _ = (await client.xrange("m:{r}:events", count=2))[1]
    await client.xdel("m:{r}:events", number)


async def _lost_trajectory(client: Redis) -> None:
    """All that was ever said of the last trajectory of the run."""
    for number, _ in (await client.xrange("m:{r}:events"))[-3:]:
        await client.xdel("m:{r}:events", number)
    number, _ = (await client.xrevrange("m:{r}:outcomes", count=1))[0]
    await client.xdel("m:{r}:outcomes", number)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_second_end, "finished 2 times"),
        (_second_fate, "has 2 fates"),
        (_lost_end, "its end is lost"),
        (_lost_turn, "turn 0 of 2 is lost"),
        (_lost_trajectory, "none has finished"),
    ],
    ids=["duplicate end", "duplicate fate", "lost end", "lost turn", "lost trajectory"],
)
async def test_a_planted_fault_makes_the_audit_exit_1(
    ended: Path, server_at: ServerAt, harm: Callable[[Redis], Any], told: str
) -> None:
    await harmed(ended, server_at, harm)
    async with attached(Config(state_dir=ended)) as client:
        record = await read_record(client, "r")
    result = audit_in_thread(ended)
    assert result.exit_code == 1, result.output
    findings = json.loads(result.output)["findings"]
    assert any(told in f["what"] for f in findings if f["severity"] == "problem")
    deleted = any("was deleted" in f["what"] for f in findings)
    assert deleted == ("lost" in harm.__name__)
    assert record.damaged == ()


def audit_in_thread(folder: Path) -> Result:
    """The command runs a loop of its own, so it gets a thread of its own here."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            muster, "audit", "--state-dir", str(folder), "--run", "r", "--json"
        ).result()


def test_errors_are_one_line_on_standard_error(folder: Path) -> None:
    told = muster("audit", "--state-dir", str(folder))
    assert told.exit_code == 2
    assert told.stdout == ""
    assert told.stderr.startswith("muster: state_dir = ")
    assert told.stderr.count("\n") == 1


def test_help_names_the_commands() -> None:
    told = muster("--help")
    assert all(word in told.output for word in ("report", "audit", "journal"))
