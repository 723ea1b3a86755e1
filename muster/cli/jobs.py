"""`muster submit` and `muster watch`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from muster.cli.screen import emit, screen, summary
from muster.client import JobState, MusterClient, Progress
from muster.types import SamplingParams


def submit(
    path: Path,
    *,
    groups: int,
    group_size: int,
    temperature: float,
    wait: bool,
    router: str,
    as_json: bool,
) -> int:
    """Submit; with `wait`, follow to the end. 0, or 1 when the job was cancelled."""

    async def send() -> str:
        async with MusterClient(router) as client:
            return await client.submit(
                path,
                groups=groups,
                group_size=group_size,
                sampling=SamplingParams(temperature=temperature),
            )

    job = asyncio.run(send())
    if as_json:
        emit("submitted", {"job": job})
    elif wait:
        print(f"submitted {job}", flush=True)
    else:
        print(job)
    return watch(job, router=router, as_json=as_json) if wait else 0


def watch(job: str, *, router: str, as_json: bool) -> int:
    """Follow to the end; 0 when the job is done, 1 when it was cancelled."""
    with screen(as_json) as shown:

        async def follow() -> Progress:
            async with MusterClient(router) as client:
                last: Progress | None = None
                async for last in client.watch(job):
                    shown.job(last)
                assert last is not None, "a watch ends with a state or raises"
                return last

        last = asyncio.run(follow())
    if not as_json:
        print(summary(last))
    return 0 if last.state is JobState.DONE else 1
