"""The bank: events made durable, batches leased, memory kept.

    python -m bench.bank [--quick] [--json PATH|-]

Durable: 16 KiB of tokens and the entry that names them, appended as the router appends them (one
fenced, deduplicated script call) by WRITERS at once, against as many bare XADDs of 16 KiB on the
same server with `appendfsync always`; arms take turns. Lease: a batch of trajectories of 50,000
tokens in turns of 2,500 from the bank's process, against a bare gRPC stream of messages of the
same sizes from a process of its own; the reader drops both undecoded. Read: the same lease,
unpacked as it comes and counted in unpacked bytes, against a bare stream of as many, dropped. All
four arms take turns. Memory: resident memory of the bank and used memory of the server after many
small batches, each leased, acknowledged and cleared away with three checkpoints kept, against
after the first 50.
Does not cover: the router's own work per turn (not measured yet), other services (bench.soak).
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
from redis.asyncio import Redis

from bench import _bank_world as world
from bench import _results
from bench._bare_stream import METHOD
from muster.clock import monotonic
from muster.types import EpisodeKey

WRITERS, EVENT_BYTES = 32, 16 << 10
TURN_TOKENS, TURN_SAMPLED, TURNS = 2500, 500, 20
SIBLINGS, KEPT, FIRST = 8, 3, 50


async def durable(folder: Path, events: int, rounds: int) -> dict[str, float]:
    """Events a second of both arms; medians over rounds."""
    found: dict[str, list[float]] = {"append": [], "xadd": []}
    async with world.server(folder, "always") as (redis, _):
        router = await world.router(redis, [bytes(EVENT_BYTES)], 4)
        await router.group(0, 1)
        for number in range(rounds + 1):
            began = monotonic()
            await _at_once(events, lambda n, k=number: _append(router, k * events + n))
            middle = monotonic()
            await _at_once(events, lambda n: _xadd(redis))
            if number:  # the first round warms both
                found["append"].append(events / (middle - began))
                found["xadd"].append(events / (monotonic() - middle))
            await redis.delete("bare", router.streams.key("events"))
    return {
        "append_events_per_s": statistics.median(found["append"]),
        "xadd_events_per_s": statistics.median(found["xadd"]),
        "durable_ratio": _ratio(found["append"], found["xadd"]),
        "durable_ratio_min": min(a / b for a, b in zip(*found.values(), strict=True)),
    }


async def _at_once(count: int, do: Any) -> None:
    numbers = iter(range(count))

    async def writer() -> None:
        for number in numbers:
            await do(number)

    async with asyncio.TaskGroup() as tasks:
        for name in range(WRITERS):
            tasks.create_task(writer(), name=f"writer-{name}")


async def _append(router: world.Router, number: int) -> None:
    entry, payloads = router.turn(EpisodeKey(world.RUN, "job-00000", 0, 0, 1), 1 + number)
    await router.streams.append([entry], payloads)


async def _xadd(redis: Redis) -> None:
    await redis.xadd("bare", {"d": bytes(EVENT_BYTES)})


async def leasing(folder: Path, trajectories: int, rounds: int) -> dict[str, float]:
    """Bytes a second of each arm; medians over rounds."""
    groups = trajectories // SIBLINGS
    payload = world.payload(TURN_TOKENS, TURN_SAMPLED)
    async with world.server(folder, "everysec") as (redis, url):
        router = await world.router(redis, [payload] * TURNS, TURN_SAMPLED)
        for index in range(groups):
            await router.group(index, SIBLINGS)
        async with world.bank(folder, redis, url) as (_, channel):
            await world.register(channel, 1)
            packed = await world.lease(channel, 1, groups)
            plain = await world.lease(channel, 1, groups, read=world.unpacked)
            files = [folder / "packed", folder / "plain"]
            for file, sizes in zip(files, (packed, plain), strict=True):
                file.write_text("\n".join(str(size) for size in sizes if size))
            command = [sys.executable, "-m", "bench._bare_stream", *map(str, files)]
            bare = world.start(command, stdout=subprocess.PIPE)
            with world.ended(bare):
                assert bare.stdout is not None
                port = int(bare.stdout.readline())
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", _OPTIONS) as other:
                    found = await _leasing(channel, other, groups, (packed, plain), rounds)
    named = {name: statistics.median(values) / 1e6 for name, values in found.items()}
    return {
        "lease_mb_per_s": named["lease"],
        "bare_mb_per_s": named["bare"],
        "lease_mb": sum(packed) / 1e6,
        "lease_ratio": _ratio(found["lease"], found["bare"]),
        "lease_ratio_min": _worst(found["lease"], found["bare"]),
        "lease_ratio_max": 1 / _worst(found["bare"], found["lease"]),
        "read_mb_per_s": named["read"],
        "bare_unpacked_mb_per_s": named["bare_unpacked"],
        "read_mb": sum(plain) / 1e6,
        "read_ratio": _ratio(found["read"], found["bare_unpacked"]),
        "read_ratio_min": _worst(found["read"], found["bare_unpacked"]),
    }


async def _leasing(
    channel: grpc.aio.Channel,
    other: grpc.aio.Channel,
    groups: int,
    sizes: tuple[list[int], list[int]],
    rounds: int,
) -> dict[str, list[float]]:
    """Bytes a second, by arm and round; the first round warms them."""
    packed, plain = sizes
    found: dict[str, list[float]] = {"lease": [], "bare": [], "read": [], "bare_unpacked": []}
    for epoch in range(2, rounds + 3):
        await world.register(channel, epoch)
        times = [monotonic()]
        assert await world.lease(channel, 1, groups, epoch) == packed
        times.append(monotonic())
        assert await _bare(other, 0) == sum(packed)
        times.append(monotonic())
        assert await world.lease(channel, 1, groups, epoch, world.unpacked) == plain
        times.append(monotonic())
        assert await _bare(other, 1) == sum(plain)
        times.append(monotonic())
        for number, values in enumerate(found.values() if epoch > 2 else ()):
            values.append(sum(sizes[number // 2]) / (times[number + 1] - times[number]))
    return found


_OPTIONS = [("grpc.max_receive_message_length", 64 << 20)]


async def _bare(channel: grpc.aio.Channel, stream: int) -> int:
    method: Any = channel.unary_stream(METHOD)
    call = method(b"%d" % stream, timeout=world.DEADLINE_S)
    return sum([len(part) async for part in call])


async def memory(folder: Path, batches: int) -> dict[str, float]:
    """Bytes after 50 batches and at the end; medians of the ten batches up to each."""
    bank_kb: list[int] = []
    used: list[int] = []
    async with world.server(folder, "everysec") as (redis, url):
        router = await world.router(redis, [world.payload(200, 50)], 50)
        async with world.bank(folder, redis, url) as (pid, channel):
            await world.register(channel, 1)
            for step in range(1, batches + 1):
                for index in (2 * step, 2 * step + 1):
                    await router.group(index, 4)
                await world.lease(channel, step, 2)
                await world.acknowledge(channel, step, max(0, step - KEPT))
                await router.follow()
                if step in range(FIRST - 10, FIRST + 1) or step > batches - 10:
                    await asyncio.sleep(0.25)  # two ticks: what is over is gone
                    bank_kb.append(_resident_kb(pid))
                    used.append(int((await redis.info("memory"))["used_memory"]))
    first, last = slice(0, 11), slice(11, None)
    figures = {
        "bank_first_mb": statistics.median(bank_kb[first]) / 1e3,
        "bank_last_mb": statistics.median(bank_kb[last]) / 1e3,
        "redis_first_mb": statistics.median(used[first]) / 1e6,
        "redis_last_mb": statistics.median(used[last]) / 1e6,
    }
    figures["bank_memory_ratio"] = figures["bank_last_mb"] / figures["bank_first_mb"]
    figures["redis_memory_ratio"] = figures["redis_last_mb"] / figures["redis_first_mb"]
    return figures


def _resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise SystemExit("the bank is gone")


def _worst(ours: list[float], bare: list[float]) -> float:
    return min(a / b for a, b in zip(ours, bare, strict=True))


def _ratio(ours: list[float], bare: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, bare, strict=True))


async def _all(quick: bool) -> dict[str, Any]:
    settings = {
        "events": 500 if quick else 5000,
        "trajectories": 32 if quick else 256,
        "batches": 150 if quick else 1000,
        "rounds": 3 if quick else 5,
        "lease_rounds": 5 if quick else 21,
        "quick": quick,
    }
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mb-") as name:
        folders = [Path(name) / part for part in ("d", "l", "m")]
        for folder in folders:
            folder.mkdir()
        figures |= await durable(folders[0], settings["events"], settings["rounds"])
        figures |= await leasing(folders[1], settings["trajectories"], settings["lease_rounds"])
        figures |= await memory(folders[2], settings["batches"])
    ratios = {name: round(value, 3) for name, value in figures.items() if "_ratio" in name}
    plain = {name: round(value, 3) for name, value in figures.items() if name not in ratios}
    return {"settings": settings, "figures": plain, "ratios": ratios}


def main() -> None:
    asked = _results.arguments(__doc__ or "")
    machine = _results.machine()
    result = asyncio.run(_all(asked.quick))
    _results.publish({"name": "bank", "machine": machine, **result}, asked.json)


if __name__ == "__main__":
    main()
