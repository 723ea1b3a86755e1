"""`muster submit`, `muster watch` and `muster cancel`."""

from __future__ import annotations

import asyncio
import sys
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
        async with MusterClient(router, tell=_tell) as client:
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
            async with MusterClient(router, tell=_tell) as client:
                last: Progress | None = None
                async for last in client.watch(job):
                    shown.job(last)
                assert last is not None, "a watch ends with a state or raises"
                return last

        last = asyncio.run(follow())
    if not as_json:
        print(summary(last))
    return 0 if last.state is JobState.DONE else 1


def cancel(job: str, *, router: str, as_json: bool) -> int:
    """Stop a job's episodes and give up its open groups; 0 when it is cancelled or was done."""

    async def send() -> Progress:
        async with MusterClient(router, tell=_tell) as client:
            return await client.cancel(job)

    last = asyncio.run(send())
    if as_json:
        emit("cancelled", {"job": job, "state": str(last.state)})
    else:
        print(summary(last))
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
